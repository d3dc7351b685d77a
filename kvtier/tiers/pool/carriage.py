"""What one tier seals and opens blocks with: its keys, one thread that helps, and memory that is used again.

Sealing costs as much as moving a block does, so the two go on at the same time: the helper works for whoever is in a
call, on the processor only. It never waits for a pool, so that no call waits for another one's pool.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from operator import itemgetter
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.codec.sealing import SealingKeys

HELPED_FROM_BYTES = 256 << 10
"""Blocks from this size on are worth another thread, which takes some 30 us to begin, and memory that is kept."""
_KEPT_BYTES = 16 << 20
"""The most memory that is kept for later calls: some large blocks."""
_MOST_BEHIND = 2
"""Blocks that wait for the helper before their caller gets another one: their memory stays in the cache."""
_T = TypeVar("_T")
_Array = npt.NDArray[np.uint8]


class Rooms:
    """Memory for sealed blocks, used again: to fill fresh pages takes longer than to seal. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[_Array] = []
        """The one used last at the end. Guarded by _lock."""

    def take(self, nbytes: int) -> memoryview:
        """Memory of this size, which holds anything; the caller's, who may `give` it back."""
        if nbytes >= HELPED_FROM_BYTES:
            with self._lock:
                room = self._kept.pop() if self._kept else None
            if room is not None and len(room) >= nbytes:
                return room.data[:nbytes]
        return np.empty(nbytes, np.uint8).data

    def give(self, room: memoryview) -> None:
        """Takes memory of `take` back. Nobody looks at it any more."""
        array = room.obj
        if len(room) < HELPED_FROM_BYTES or not isinstance(array, np.ndarray):
            return
        with self._lock:
            if sum(map(len, self._kept)) + len(array) <= _KEPT_BYTES:
                self._kept.append(array)


class Carriage:
    """Keys, helper and memory of one tier. Any thread."""

    def __init__(self, keys: SealingKeys) -> None:
        self.keys = keys
        self.rooms = Rooms()
        self.helper: Executor = ThreadPoolExecutor(1, "kvtier-seal")
        """Starts its thread with the first call that is given to it."""

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


def ahead(calls: Sequence[Callable[[], _T]], helper: Executor | None) -> Generator[_T]:
    """Yields the results of calls in order. While the consumer has one, the helper makes the next.

    Closing the generator waits for the helper.
    """
    pending: Future[_T] | None = None
    try:
        for i, call in enumerate(calls):
            result = call() if pending is None else _result(pending, call)
            pending = None if helper is None or i + 1 == len(calls) else helper.submit(calls[i + 1])
            yield result
    finally:
        _settle([] if pending is None else [pending])


def behind(calls: Iterable[Callable[[], _T]], helper: Executor | None) -> Generator[_T]:
    """Yields the results of calls in order. The helper makes them while the next calls come.

    Closing the generator waits for the helper.
    """
    pending: deque[tuple[Future[_T], Callable[[], _T]]] = deque()
    try:
        for call in calls:
            if helper is None:
                yield call()
                continue
            pending.append((helper.submit(call), call))
            if len(pending) > _MOST_BEHIND:
                yield _result(*pending.popleft())
        while pending:
            yield _result(*pending.popleft())
    finally:
        _settle([future for future, _ in pending])


def _result(future: Future[_T], call: Callable[[], _T]) -> _T:
    """What the helper has made; made here where the helper has not begun, since it works for another call."""
    return call() if future.cancel() else future.result()


def _settle(futures: Sequence[Future[_T]]) -> None:
    """The helper does nothing of these any more from now on."""
    wait([future for future in futures if not future.cancel()])
