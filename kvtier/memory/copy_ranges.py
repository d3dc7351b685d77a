"""Many copies within this process in one system call, so that a thread asks for the interpreter once, not per copy.

A thread that returns from a copy has to wait for the interpreter's lock: 5 ms, where the engine's thread is busy with
Python. Linux copies up to 1,024 ranges between two processes at a time, which may be the same one (process_vm_readv(2),
process_vm_writev(2)), about as fast as memcpy does.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Ranges = npt.NDArray[np.uint64]
"""`[n, 2]` uint64, C order: address and length in bytes of each."""

_MAX_RANGES = 1024
"""IOV_MAX of Linux."""
_MAX_BYTES = 0x7FFF_F000
"""MAX_RW_COUNT of Linux, with pages of 4 KiB: what one call copies at most."""
_Call = Callable[[int, ctypes.c_void_p, int, ctypes.c_void_p, int, int], int]


def _of_libc(name: str) -> _Call | None:
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if call is not None:
        size = ctypes.c_ulong
        call.argtypes = (ctypes.c_int, ctypes.c_void_p, size, ctypes.c_void_p, size, size)
        call.restype = ctypes.c_ssize_t
    return call


_READ, _WRITE = _of_libc("process_vm_readv"), _of_libc("process_vm_writev")


def ranges_of(slots: Sequence[int], columns: Sequence[tuple[int, int]], widths: Sequence[int]) -> Ranges:
    """Ranges of some slots of memory that is divided into rows: all columns of one slot, then those of the next.

    :param slots: whether they are there, the caller has to see.
    :param columns: of each, its address in slot 0, and the bytes from one slot to the next.
    :param widths: of each, in bytes.
    """
    start, step = np.asarray(columns, dtype=np.int64).T
    ranges = np.empty((len(slots), len(columns), 2), dtype=np.uint64)
    ranges[:, :, 0] = start + np.asarray(slots, dtype=np.int64)[:, None] * step
    ranges[:, :, 1] = widths
    return ranges.reshape(-1, 2)


def copy_from(source: Ranges, into: Ranges) -> bool:
    """Copies each range of `source` to that of `into`, of the same length; they must not overlap.

    False: this system does not do it (another one than Linux, a sandbox), or not with this memory; some of the bytes
    may have been copied. Thread-safe. The caller keeps the memory alive.

    :param source: of ordinary memory; its pages are pinned for the copy, which is fastest with huge ones.
    """
    return _copy(_READ, source, into)


def copy_to(into: Ranges, source: Ranges) -> bool:
    """Copies each range of `source` to that of `into`, as `copy_from` does, but with the pages of `into` pinned."""
    return _copy(_WRITE, into, source)


def _copy(call: _Call | None, pinned: Ranges, other: Ranges) -> bool:
    if call is None:
        return False
    pid = os.getpid()
    at = 0
    while at < len(pinned):
        ends = np.cumsum(other[at : at + _MAX_RANGES, 1])
        stop = at + max(1, int(np.searchsorted(ends, _MAX_BYTES, side="right")))
        theirs, ours = pinned[at:stop], other[at:stop]
        at = stop
        nbytes = call(pid, _address(ours), len(ours), _address(theirs), len(theirs), 0)
        if nbytes != int(ours[:, 1].sum()):
            return False
    return True


def _address(ranges: Ranges) -> ctypes.c_void_p:
    return ctypes.c_void_p(ranges.ctypes.data)
