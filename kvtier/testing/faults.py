"""A disk that fails, on demand or by a seed that it prints."""

import errno
import os
import random
import threading
from collections import defaultdict
from collections.abc import Sequence

from kvtier.tiers.disk.medium.files import FileLayer


class FaultyFiles:
    """Passes on to real files, except when told to fail. Any thread.

    With a `probability`, operations fail by themselves: new files and writes with ENOSPC or EIO, writes after half of
    the data, reads with EIO, a flipped bit or a short file. Threads make the order of operations, so a seed repeats the
    faults exactly only with one I/O thread.
    """

    def __init__(self, inner: FileLayer, *, seed: int = 0, probability: float = 0.0) -> None:
        print(f"FaultyFiles(seed={seed}, probability={probability})")
        self._inner = inner
        self._lock = threading.Lock()
        self._probability = probability
        """Guarded by _lock."""
        self._random = random.Random(seed)
        """Guarded by _lock."""
        self._planned: dict[str, list[int]] = defaultdict(list)
        """The errnos of the next failures, by operation. Guarded by _lock."""
        self._lost_writes = 0
        """How many of the next writes stop halfway and say nothing. Guarded by _lock."""

    @property
    def direct(self) -> bool:
        return self._inner.direct

    def fail_next(self, op: str, code: int, times: int = 1) -> None:
        """The next `times` calls of the method called `op` raise errno `code`."""
        with self._lock:
            self._planned[op] += [code] * times

    def lose_next(self, times: int = 1) -> None:
        """The next `times` writes end halfway, and nobody hears of it: a drive that lies, or lost power."""
        with self._lock:
            self._lost_writes += times

    def fail_by_chance(self, probability: float) -> None:
        """Sets how often operations fail from now on; 0 heals the disk of all but what is damaged already and planned
        failures."""
        with self._lock:
            self._probability = probability

    def create(self, path: str, nbytes: int) -> int:
        _raise(self._fault("create", errno.ENOSPC, errno.EIO), path)
        return self._inner.create(path, nbytes)

    def open(self, path: str, *, writable: bool = True) -> int:
        _raise(self._fault("open"), path)
        return self._inner.open(path, writable=writable)

    def size(self, path: str) -> int:
        return self._inner.size(path)

    def is_named(self, fd: int, path: str) -> bool:
        return self._inner.is_named(fd, path)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        code = self._fault("write", errno.ENOSPC, errno.EIO)
        with self._lock:
            lost = self._lost_writes > 0
            self._lost_writes -= lost
        if code or lost:
            self._inner.write(fd, _half(buffers), offset)
        _raise(code, "write")
        if not lost:
            self._inner.write(fd, buffers, offset)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        _raise(self._fault("read", errno.EIO), "read")
        num_read = self._inner.read(fd, buffers, offset)
        with self._lock:
            if num_read and self._random.random() < self._probability:
                buffer = self._random.choice([buffer for buffer in buffers if len(buffer)])
                buffer[self._random.randrange(len(buffer))] ^= 1 << self._random.randrange(8)
            if num_read and self._random.random() < self._probability:
                num_read = self._random.randrange(num_read)
        return num_read

    def truncate(self, fd: int, nbytes: int) -> None:
        _raise(self._fault("truncate"), "truncate")
        self._inner.truncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        _raise(self._fault("sync"), "sync")
        self._inner.sync(fd)

    def sync_folder(self, directory: str) -> None:
        _raise(self._fault("sync_folder"), directory)
        self._inner.sync_folder(directory)

    def close(self, fd: int) -> None:
        self._inner.close(fd)

    def remove(self, path: str) -> None:
        _raise(self._fault("remove"), path)
        self._inner.remove(path)

    def free_bytes(self, directory: str) -> int:
        _raise(self._fault("free_bytes"), directory)
        return self._inner.free_bytes(directory)

    def _fault(self, op: str, *by_chance: int) -> int:
        """The errno to fail with, 0 for none."""
        with self._lock:
            if self._planned[op]:
                return self._planned[op].pop(0)
            if by_chance and self._random.random() < self._probability:
                return self._random.choice(by_chance)
        return 0


def _half(buffers: Sequence[memoryview]) -> list[memoryview]:
    """The front of what is to be written, in whole pages."""
    left = sum(map(len, buffers)) // 2 // 4096 * 4096
    half = []
    for buffer in buffers:
        half.append(buffer[:left])
        left -= len(half[-1])
    return [buffer for buffer in half if len(buffer)]


def _raise(code: int, path: str) -> None:
    if code:
        raise OSError(code, os.strerror(code), path)
