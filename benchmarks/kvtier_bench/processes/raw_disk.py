"""The floor of disks: the same blocks to and from one preallocated file, past the page cache, as many at a time.

No keys, no checksums, no index: block i is at offset i.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtier.memory.pages import PAGE_BYTES
from kvtier.tiers.disk.medium.files import OsFiles, supports_direct


class RawDisk:
    """A file. A context manager: leaving it removes the file."""

    def __init__(self, folder: Path, payload_bytes: int, num_slots: int, depth: int) -> None:
        """:param depth: blocks on their way at once, each in a thread."""
        self.direct = supports_direct(str(folder)) and payload_bytes % PAGE_BYTES == 0
        self._files = OsFiles(direct=self.direct)
        self._path = str(folder / f"raw-{os.getpid()}")
        self._payload_bytes = payload_bytes
        self._num_slots = num_slots
        self._executor = ThreadPoolExecutor(depth, thread_name_prefix="kvtier-raw-disk")
        self._fd = self._files.create(self._path, payload_bytes * num_slots)

    def renew(self) -> None:
        """An empty file in its place: what is written anew costs more than what is overwritten."""
        self._files.close(self._fd)
        self._files.remove(self._path)
        self._fd = self._files.create(self._path, self._payload_bytes * self._num_slots)

    def write(self, sources: Sequence[memoryview], first: int = 0) -> float:
        """Writes payloads to slots from `first` on; returns the seconds that it took."""
        start = time.perf_counter()
        slots = range(first, first + len(sources))
        list(self._executor.map(self._write_one, sources, slots))
        return time.perf_counter() - start

    def read(self, into: Sequence[memoryview], slots: Sequence[int]) -> float:
        """Seconds."""
        start = time.perf_counter()
        list(self._executor.map(self._read_one, into, slots))
        return time.perf_counter() - start

    def __enter__(self) -> "RawDisk":
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()
        self._files.close(self._fd)
        self._files.remove(self._path)

    def _write_one(self, source: memoryview, slot: int) -> None:
        self._files.write(self._fd, [source], slot * self._payload_bytes)

    def _read_one(self, into: memoryview, slot: int) -> None:
        self._files.read(self._fd, [into], slot * self._payload_bytes)
