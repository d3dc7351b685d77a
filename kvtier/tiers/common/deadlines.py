"""Calls to a neighbour that may be slow or dead: batches, a deadline over all of them, and what its health says."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import KvtierError, UnavailableError
from kvtier.tiers.common.health import Health


class RemoteCalls:
    """What tiers over a network do around each call. Any thread; no lock is held while the neighbour is asked.

    A call fails by a `KvtierError`, which `health` is told.
    """

    def __init__(
        self,
        health: Health,
        *,
        call_timeout_s: float,
        max_batch_bytes: int,
        max_batch_blocks: int,
        clock: Clock = MONOTONIC,
    ) -> None:
        """
        :param health: of the neighbour; it says whether a call may be made.
        :param call_timeout_s: seconds for all batches of one call together.
        :param max_batch_bytes: payload bytes in one batch; a block larger than that is a batch of its own.
        :param max_batch_blocks: blocks in one batch.
        """
        self._health = health
        self._call_timeout_s = call_timeout_s
        self._max_batch_bytes = max_batch_bytes
        self._max_batch_blocks = max_batch_blocks
        self._clock = clock

    def in_batches(
        self, op: str, sizes: Sequence[int], ask: Callable[[slice, float], None], timeout_s: float | None = None
    ) -> None:
        """Calls `ask(batch, timeout_s)` on slices within the budgets, until one fails or time is up.

        :param sizes: payload bytes of each block.
        :param timeout_s: for all batches together, if less than `call_timeout_s`.
        """
        deadline = self._clock() + (timeout_s if timeout_s is not None else self._call_timeout_s)

        def ask_in_time(batch: slice) -> None:
            remaining_s = deadline - self._clock()
            if remaining_s <= 0:
                raise UnavailableError(f"no time left for blocks {batch.start} and after")
            ask(batch, remaining_s)

        for batch in self._batches(sizes):
            if not self.attempt(op, partial(ask_in_time, batch)):
                return

    def attempt(self, op: str, call: Callable[[], None]) -> bool:
        """Whether `call` came back with an answer; without, the neighbour failed or is left alone at the moment."""
        with self._health.asking(op) as may_ask:
            if not may_ask:
                return False
            try:
                call()
            except KvtierError as error:
                self._health.failed(op, error)
                return False
            self._health.worked()
            return True

    def _batches(self, sizes: Sequence[int]) -> Iterator[slice]:
        start = num_bytes = 0
        for i, size in enumerate(sizes):
            if i > start and (num_bytes + size > self._max_batch_bytes or i - start == self._max_batch_blocks):
                yield slice(start, i)
                start, num_bytes = i, 0
            num_bytes += size
        if start < len(sizes):
            yield slice(start, len(sizes))
