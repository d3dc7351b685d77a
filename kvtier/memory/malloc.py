"""Tells the C library to keep the memory of freed buffers, for processes that are kvtier's own."""

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEEP_BYTES = 512 << 20
_MMAP_FROM_BYTES = 32 << 20


def give_back_freed_memory() -> None:
    """Gives whole pages of freed buffers back to the system, so that their content is gone. Some 10 ms per GiB."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Call once, before the first thread and the first large allocation, in the main program of a service; never in a
    library.

    gRPC allocates a message per MiB and a forward pass its activations, and both free them again. glibc
    would map and unmap each, and copying into fresh pages is several times slower than into warm ones:
    more than half of the throughput of a process's first read. Does nothing where the C library is not
    glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
    mallopt(_M_ARENA_MAX, 1)
