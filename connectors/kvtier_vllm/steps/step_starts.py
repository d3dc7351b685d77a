"""Which of the steps that vLLM has queued on the device a load must come after: docs/adr/0019-one-fence-per-step.md."""

from collections import deque

from vllm.v1.core.sched.output import SchedulerOutput

from kvtier.device.kv import Fence

_MAX_KEPT = 64
"""More than steps can be queued: one per stage of a pipeline, and one."""


class StepNumbers:
    """The scheduler's half: it numbers steps, and knows which have been processed. Scheduler thread only.

    Where vLLM gives a device block to a request only when it has processed the last step that used it, what is left of
    that step is over when the next one starts.
    """

    def __init__(self) -> None:
        self.frees_late = False
        """Whether it is so, as far as `compat.frees_late` has said. Loads come after all steps otherwise."""
        self._last = self._heard = 0
        self._cleared = 0
        """The first step at whose start no block is still being cleared or filled from another one."""

    def begin(self, output: SchedulerOutput) -> tuple[int, int]:
        """A step was planned. Its number, 0 if it computes nothing; and which one's start its loads come after.

        The latter may be the number of a step to come: then it is this one's start.
        """
        computes = output.total_num_scheduled_tokens > 0
        self._last += computes
        if output.new_block_ids_to_zero or output.kv_cache_block_copies:
            self._cleared = self._last + (not computes)
        loads_after = max(self._heard + 1, self._cleared) if self.frees_late else self._last + 1
        return self._last if computes else 0, loads_after

    def hear(self, number: int) -> None:
        """The step with this number is processed, and so are all before it."""
        self._heard = max(self._heard, number)


class StepStarts:
    """The worker's half: it has fences at the starts of the last steps. One thread."""

    def __init__(self) -> None:
        self._starts: deque[tuple[int, Fence | None]] = deque(maxlen=_MAX_KEPT)
        self._present: Fence | None = None

    def begin(self, number: int, fence: Fence | None) -> None:
        """A step starts: blocks are cleared, and its forward pass is not queued yet.

        :param number: 0 for one that computes nothing.
        """
        self._present = fence
        if number:
            self._starts.append((number, fence))

    def fence(self, number: int) -> Fence | None:
        """The fence at the start of the step with this number; of the present step if that is unknown (any more)."""
        return next((fence for known, fence in self._starts if known == number), self._present)
