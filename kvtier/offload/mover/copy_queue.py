"""Batches that wait for one of a mover's threads to copy them, and which of them go together."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Generic, NamedTuple, TypeVar

from kvtier.device.kv import Fence

_MOST_BYTES = 1 << 30
"""The most bytes of one copy of several batches. That is 20 ms of PCIe 5.0, and 16,384 transfers of 64 KiB: on an H200,
as many wait on one stream before the call that asks for more has to wait as well."""

BatchT = TypeVar("BatchT")


class _Waiting(NamedTuple, Generic[BatchT]):
    batch: BatchT
    num_bytes: int
    after: Fence | None


class CopyQueue(Generic[BatchT]):
    """Copies between device and arena that are begun in order. Any thread; nothing blocks.

    Batches that wait behind one fence are copied together. All of their transfers are then with the device before it
    gets to the fence, and none waits for the interpreter, which an engine's thread may hold for most of a step. A batch
    that waits for no fence is copied by itself, and so is sooner where it should be.
    """

    def __init__(self, threads: Executor, copy: Callable[[Sequence[BatchT], Fence | None], None]) -> None:
        """:param copy: copies batches behind a fence, in one of the threads; several calls may be under way."""
        self._threads, self._copy = threads, copy
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting[BatchT]] = deque()
        """What no thread has begun to copy. Guarded by _lock."""

    def submit(self, batch: BatchT, num_bytes: int, after: Fence | None) -> None:
        """Queues a batch. What it copies was last touched before the fence."""
        with self._lock:
            self._waiting.append(_Waiting(batch, num_bytes, after))
        self._threads.submit(self._copy_next)

    def _copy_next(self) -> None:
        """Copies the batch that has waited longest, with those that follow it behind the same fence."""
        with self._lock:
            together = self._take()
        if together:  # or else they have gone with an earlier one
            self._copy([waiting.batch for waiting in together], together[0].after)

    def _take(self) -> list[_Waiting[BatchT]]:
        """Caller holds _lock."""
        together: list[_Waiting[BatchT]] = []
        num_bytes = 0
        while self._waiting:
            following = self._waiting[0]
            num_bytes += following.num_bytes
            if together and (following.after is None or following.after is not together[0].after):
                break
            if together and num_bytes > _MOST_BYTES:
                break
            together.append(self._waiting.popleft())
        return together
