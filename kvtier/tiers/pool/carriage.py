"""What one tier seals and opens blocks with: its keys, and one thread that helps.

In shared memory sealing costs as much as moving a block does, so two threads do both: the helper works for whoever is
in a call, on the processor only. It never waits for a pool, so that no call waits for another one's pool.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from operator import itemgetter
from typing import TypeVar

from kvtier.codec.sealing import SealingKeys
from kvtier.system.started_threads import started_threads

HELPED_FROM_BYTES = 256 << 10
"""Blocks from this size on are worth another thread, which takes some 30 us to begin, and system calls of their own."""
_T = TypeVar("_T")


class Carriage:
    """Keys and helper of one tier. Any thread."""

    def __init__(self, keys: SealingKeys) -> None:
        self.keys = keys
        self.helper: Executor = started_threads(1, "kvtier-seal")

    def close(self) -> None:
        """Ends the helper; after all calls have ended. Idempotent."""
        self.helper.shutdown()


def share(
    calls: Sequence[Callable[[], _T]], helper: Executor | None, is_last: Callable[[_T], bool]
) -> list[tuple[int, _T]]:
    """Index and result of each call, in order, made by this thread and the helper together.

    :param is_last: of a result with which there is no time for more: no other call is begun, and some may be missing.
    """
    left = deque(enumerate(calls))
    results: list[tuple[int, _T]] = []

    def work() -> None:
        while left:
            try:
                i, call = left.popleft()
            except IndexError:  # the other was faster
                return
            result = call()
            results.append((i, result))
            if is_last(result):
                left.clear()

    helping = helper.submit(work) if helper is not None and len(calls) > 1 else None
    try:
        work()
    finally:
        left.clear()
        if helping is not None:
            _settle([helping])
    if helping is not None and not helping.cancelled():
        helping.result()
        results.sort(key=itemgetter(0))
    return results


def _settle(futures: Sequence[Future[_T]]) -> None:
    """The helper does nothing of these any more from now on."""
    wait([future for future in futures if not future.cancel()])
