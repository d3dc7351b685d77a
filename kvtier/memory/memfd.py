"""Memory that other processes may map: anonymous files of fixed size, passed as descriptors. Linux only."""

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import sys
import weakref

from kvtier.errors import ConfigError
from kvtier.memory.pages import advise_huge_pages, touch_pages

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0x1 | 0x2 | 0x4
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW: the size is final for all that map it, so a read cannot end in SIGBUS."""
_MAP_FAILED = ctypes.c_void_p(-1).value
_PART_OF_DESCRIPTORS = 0.75
"""The part of a process's descriptors that its memory and all else may take before there is no new memory: with none
left, a server could not take a connection."""
_PUNCH = 0x1 | 0x2
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE."""


def available() -> bool:
    """Whether this system has memfds."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def create(name: str, nbytes: int) -> int:
    """A descriptor of `nbytes` of zeroed memory, sealed against resizing. The caller closes it.

    Raises `ConfigError` where there are no memfds, `OSError` when there is no memory, or no descriptor but those that
    are left to connections and files: a quarter of what the process may have.
    Nobody but this user and root may open it by its path in /proc: others get a descriptor. That this user's other
    processes may not either is for `kvtier.system.private_process`.
    """
    if not available():
        raise ConfigError("shared memory needs Linux; use the socket alone")
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _require_others(descriptor)
        os.ftruncate(descriptor, nbytes)
        os.fchmod(descriptor, 0o400)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def reopen_read_only(descriptor: int) -> int:
    """A second descriptor of the same memory that cannot be mapped for writing. The caller closes it."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def is_sealed(descriptor: int, nbytes: int) -> bool:
    """Whether this is memory of so many bytes at least, and will be as long as it is mapped."""
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:  # not a memfd
        return False
    return seals & _SEALS == _SEALS and os.fstat(descriptor).st_size >= nbytes


def map_descriptor(descriptor: int, nbytes: int, *, writable: bool) -> memoryview:
    """Maps the first `nbytes`, page tables filled ahead; given back when the last view is gone.

    So many must be there, and stay: see `is_sealed`. The descriptor stays the caller's and may be closed: unlike
    `mmap`, this keeps none for each map, and other threads run meanwhile. About 0.15 ms per MiB of memory that exists
    already. `OSError`: not to be had.
    """
    libc = _libc()
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = libc.mmap(None, nbytes, protection, mmap.MAP_SHARED | mmap.MAP_POPULATE, descriptor, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_char * nbytes).from_address(address)
    # At the end of the process the system does it: threads may still read there.
    weakref.finalize(memory, libc.munmap, address, nbytes).atexit = False
    view = memoryview(memory).cast("B")
    return view if writable else view.toreadonly()


def map_new(descriptor: int, nbytes: int, *, prefault: bool) -> memoryview:
    """Maps memory that `create` has just made, writable; `prefault` touches every page.

    Huge pages as `advise_huge_pages` has it.
    """
    memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)
    advise_huge_pages(memory)
    view = memoryview(memory)
    if prefault:
        touch_pages(view)
    return view


def punch(descriptor: int, nbytes: int) -> None:
    """Gives the memory back to the system at once, even while processes map it: they read zeros from now on."""
    libc = _libc()
    if libc.fallocate(descriptor, _PUNCH, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        code = ctypes.get_errno()
        if code != errno.EOPNOTSUPP:
            raise OSError(code, os.strerror(code))


def _require_others(newest: int) -> None:
    """Raises `OSError` unless enough descriptors are left. The kernel gives the lowest number that is free."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and newest >= most * _PART_OF_DESCRIPTORS:
        raise OSError(errno.EMFILE, f"{newest} descriptors are open, of {most}; raise the limit (`ulimit -n`)")


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
