"""Memory that tiers own, and copies that let other threads run."""

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvtier.memory.buffers import ReadableBuffer

PAGE_BYTES = mmap.PAGESIZE
_HUGE_PAGE_BYTES = 2 * 2**20
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, of Linux 5.14: as if every page were written to, without a fault for each."""
_MOST_THREADS = 4
"""The most threads that touch memory: several engines may start side by side, and a few keep the memory busy."""
_TOUCH_BYTES = 64 << 20
"""Touched by one call, within which the system maps nothing else for this process; and worth a thread."""


def round_up(nbytes: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `nbytes`."""
    return -(-nbytes // unit) * unit


def map_memory(nbytes: int, *, prefault: bool) -> memoryview:
    """Anonymous, page-aligned, zeroed memory of this process, given back when the last view of it is gone.

    Raises `OSError` when the system has none. Large memory gets huge pages where the system has them.

    :param prefault: touch every page now: see `touch_pages`.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge_pages(memory)
    view = memoryview(memory)
    if prefault:
        touch_pages(view)
    return view


def advise_huge_pages(memory: mmap.mmap) -> None:
    """Asks for huge pages where the memory is large enough for one. Without them, nothing changes.

    Shared memory gets them where /sys/kernel/mm/transparent_hugepage/shmem_enabled says `advise` or more.
    """
    if sys.platform == "linux" and len(memory) >= _HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)


def touch_pages(memory: memoryview) -> None:
    """Has the system give every page of memory that is zero as yet, so that nobody has to wait for pages later: a copy
    into pages never touched is about eight times slower than one into warm ones.

    Large memory is touched by several threads, 4 at most; the GIL is released. Takes 0.1 to 0.5 s per GiB and thread.
    Raises `OSError` when the system has not that much.

    :param memory: writable; begins with a page.
    """
    starts = range(0, len(memory), _TOUCH_BYTES)
    num_threads = min(_MOST_THREADS, len(starts))
    if num_threads <= 1:
        _touch(memory)
        return
    with ThreadPoolExecutor(num_threads, "kvtier-touch") as threads:
        for _ in threads.map(_touch, (memory[start : start + _TOUCH_BYTES] for start in starts)):
            pass


def _touch(memory: memoryview) -> None:
    pages = np.frombuffer(memory, dtype=np.uint8)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(len(memory)), ctypes.c_int(_POPULATE_WRITE)
        if not libc.madvise(*arguments):
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:  # that would be an older kernel
            raise OSError(code, os.strerror(code))
    np.copyto(pages[::PAGE_BYTES], 0)


def copy_bytes(into: memoryview, source: ReadableBuffer) -> None:
    """Copies all of `source` over the front of `into`; releases the GIL, unlike a slice assignment."""
    nbytes = len(source)
    if nbytes:  # numpy refuses empty buffers
        np.copyto(np.frombuffer(into, dtype=np.uint8, count=nbytes), np.frombuffer(source, dtype=np.uint8))
