"""A disk that fails, on demand or by a seed that it prints."""

import errno
import os
import random
import threading
from collections import defaultdict

from kvtier.tiers.files import FileLayer


class FaultyFiles:
    """Passes on to real files, except when told to fail. Any thread.

    With a `probability`, operations fail by themselves: writes and renames with ENOSPC or EIO, writes
    after half of the data, reads with EIO, a flipped bit or a short file. Threads make the order of
    operations, so a seed repeats the faults exactly only with one I/O thread.
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
        """By operation, the errnos of the next failures. Guarded by _lock."""

    def fail_next(self, op: str, code: int, times: int = 1) -> None:
        """The next `times` calls of `write`, `read`, `rename`, `remove` or `free_bytes` raise errno `code`."""
        with self._lock:
            self._planned[op] += [code] * times

    def fail_by_chance(self, probability: float) -> None:
        """From now on, that often; 0 heals the disk of all but what is damaged already and of planned failures."""
        with self._lock:
            self._probability = probability

    def write(self, path: str, buffer: memoryview, nbytes: int) -> None:
        code = self._fault("write", errno.ENOSPC, errno.EIO)
        if code:
            self._inner.write(path, buffer, nbytes // 2)
        _raise(code, path)
        self._inner.write(path, buffer, nbytes)

    def read(self, path: str, buffer: memoryview) -> int:
        _raise(self._fault("read", errno.EIO), path)
        num_read = self._inner.read(path, buffer)
        with self._lock:
            if num_read and self._random.random() < self._probability:
                buffer[self._random.randrange(num_read)] ^= 1 << self._random.randrange(8)
            if num_read and self._random.random() < self._probability:
                num_read = self._random.randrange(num_read)
        return num_read

    def rename(self, source: str, target: str) -> None:
        _raise(self._fault("rename", errno.ENOSPC, errno.EIO), source)
        self._inner.rename(source, target)

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


def _raise(code: int, path: str) -> None:
    if code:
        raise OSError(code, os.strerror(code), path)
