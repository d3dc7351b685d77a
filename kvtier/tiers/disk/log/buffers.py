"""Page-aligned memory for payloads on their way, lent and used again: fresh pages cost more than the copy."""

import contextlib
import threading
from collections.abc import Iterator

import numpy as np

from kvtier.memory.buffers import ReadableBuffer
from kvtier.memory.pages import copy_bytes, map_memory
from kvtier.tiers.disk.log.format import PAGE, pages_of


class Buffers:
    """Lends aligned buffers of whole pages. Any thread."""

    def __init__(self, most_kept: int) -> None:
        """:param most_kept: how many are kept when nobody uses them: as many as threads take at a time."""
        self._most_kept = most_kept
        self._lock = threading.Lock()
        self._kept: list[memoryview] = []
        """Smallest first. Guarded by _lock."""

    @contextlib.contextmanager
    def lend(self, nbytes: int) -> Iterator[memoryview]:
        """Lends `nbytes` in whole pages, one at least; they hold anything. `OSError` when there is no memory."""
        needed = max(1, pages_of(nbytes)) * PAGE
        with self._lock:
            found = next((i for i, buffer in enumerate(self._kept) if len(buffer) >= needed), None)
            memory = self._kept.pop(found) if found is not None else None
        if memory is None:
            memory = map_memory(needed, prefault=True)
        try:
            yield memory[:needed]
        finally:
            with self._lock:
                self._kept.append(memory)
                self._kept.sort(key=len)
                if len(self._kept) > self._most_kept:
                    del self._kept[0]

    def give_back(self) -> None:
        """Gives memory that nobody uses back to the system, with what payloads have left in it."""
        with self._lock:
            self._kept.clear()


def address_of(buffer: ReadableBuffer) -> int:
    """Address of a buffer's first byte, 0 if it is empty. `BufferError` or `ValueError` unless it is contiguous
    bytes."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]) if len(buffer) else 0


def is_aligned(buffer: ReadableBuffer) -> bool:
    """Whether O_DIRECT takes it as it is: whole pages on a page boundary."""
    return len(buffer) % PAGE == 0 and address_of(buffer) % PAGE == 0


def fill_pages(into: memoryview, source: ReadableBuffer) -> memoryview:
    """Copies `source` to the front of `into`, zeros behind it up to the end of its page; gives those pages."""
    end = pages_of(len(source)) * PAGE
    copy_bytes(into, source)
    if end > len(source):
        into[len(source) : end] = bytes(end - len(source))
    return into[:end]
