"""How long forward passes take, also on a device that computes while the host goes on."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Computed:
    """Steps that are over, and the time from the first one's launch to the last one's end."""

    num_tokens: tuple[int, ...]
    """Tokens of each chunk of these steps."""
    seconds: float
    is_pure: bool
    """Whether these seconds are of computing alone: no step waited for layers that were still being loaded."""


class ComputeTimes:
    """Books the time of forward passes when it is known. Scheduler thread only; never waits.

    A forward pass on CUDA is only launched. The host learns that it is over when it waits for a result, as it does to
    sample a token. Chunks of a prompt before its last one sample nothing, so the steps from the first launch up to a
    sample are booked as one. On CPU every step is over when `forward` returns, and is booked by itself.
    """

    def __init__(self, *, asynchronous: bool) -> None:
        """:param asynchronous: whether `forward` returns before the device has computed."""
        self._asynchronous = asynchronous
        self._num_tokens: list[int] = []
        """Tokens of each chunk that was launched and not waited for."""
        self._since_s = 0.0
        """The time when the first of these chunks was launched. Meaningless while there are none."""
        self._is_pure = True
        """Whether none of them waited for a load."""

    def end_step(
        self,
        num_tokens: Sequence[int],
        launched_at_s: float,
        ended_at_s: float,
        *,
        sampled: bool,
        is_arriving: bool = False,
    ) -> Computed | None:
        """Takes in a step that computed so many tokens of each chunk. None while it is not known how long it takes.

        :param launched_at_s: the time just before `forward` was called, and `ended_at_s` that after the last sample.
        :param sampled: whether the step's result was waited for.
        :param is_arriving: whether the step may have waited for layers of a load.
        """
        if not self._num_tokens:
            self._since_s, self._is_pure = launched_at_s, True
        self._is_pure &= not is_arriving
        self._num_tokens += num_tokens
        if self._asynchronous and not sampled:
            return None
        computed = Computed(tuple(self._num_tokens), ended_at_s - self._since_s, self._is_pure)
        self._num_tokens.clear()
        return computed

    def end_idle_step(self) -> None:
        """Takes in a step in which there was nothing to compute.

        When the device ends what was launched before cannot be told any more: these steps are not booked.
        """
        self._num_tokens.clear()
