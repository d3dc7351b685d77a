"""The few file operations that the disk tier needs; a seam where tests put a failing disk."""

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from kvtier.memory.pages import PAGE_BYTES, map_memory

_DIRECT = os.O_DIRECT if sys.platform == "linux" else 0
_NO_DIRECT_ERRNOS = (errno.EINVAL, errno.EOPNOTSUPP)
PROBE = "kvtier-probe"
"""A file that is there for a moment, when a folder is tried out."""
_MOST_BUFFERS = 1024
"""IOV_MAX of Linux."""


class FileLayer(Protocol):
    """All methods block, release the GIL, raise `OSError`, and may be called from any thread.

    Offsets and lengths of buffers are whole pages of 4 KiB, and so are the buffers' addresses where `direct`.
    """

    @property
    def direct(self) -> bool:
        """Whether buffers must be page-aligned."""

    def create(self, path: str, nbytes: int) -> int:
        """A descriptor of a new file with disk space for `nbytes`.

        After an error there is no such file, unless it is somebody else's (`FileExistsError`) or could not be removed.
        """

    def open(self, path: str, *, writable: bool = True) -> int:
        """A descriptor of a file that is there."""

    def size(self, path: str) -> int:
        """Bytes of the file of this name; of a link, its own."""

    def is_named(self, fd: int, path: str) -> bool:
        """Whether an open file still has this name."""

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        """All of the buffers, one after the other. After an error any part of it may be written; one that has no name
        any more is an error."""

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fills the buffers, one after the other, until the file ends; how many bytes it was."""

    def truncate(self, fd: int, nbytes: int) -> None:
        """Cuts the file's end off and gives its space back."""

    def sync(self, fd: int) -> None:
        """What is written outlives a loss of power."""

    def sync_folder(self, directory: str) -> None:
        """The names of files that were made in it outlive a loss of power."""

    def close(self, fd: int) -> None:
        """Gives up the descriptor."""

    def remove(self, path: str) -> None:
        """Unlinks a file."""

    def free_bytes(self, directory: str) -> int:
        """What an unprivileged process may still write to the file system of `directory`."""


class OsFiles:
    """The real thing. With `direct`, payloads go past the page cache (O_DIRECT), where they would be kept twice."""

    def __init__(self, *, direct: bool) -> None:
        self._direct = direct and _DIRECT != 0
        self._flags = os.O_CLOEXEC | (_DIRECT if direct else 0)

    @property
    def direct(self) -> bool:
        return self._direct

    def create(self, path: str, nbytes: int) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | self._flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        return fd

    def open(self, path: str, *, writable: bool = True) -> int:
        # A FIFO in its place must not hold up the thread, a link not lead elsewhere.
        access = os.O_RDWR if writable else os.O_RDONLY
        return os.open(path, access | os.O_NONBLOCK | os.O_NOFOLLOW | self._flags)

    def size(self, path: str) -> int:
        return os.stat(path, follow_symlinks=False).st_size

    def is_named(self, fd: int, path: str) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        left = list(buffers)
        while left:
            done = os.pwritev(fd, left[:_MOST_BUFFERS], offset)
            offset += done
            left = _behind(left, done)
        if os.fstat(fd).st_nlink == 0:  # what is written to it is gone when the process ends
            raise FileNotFoundError(errno.ENOENT, "the file was removed while it was open")

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        left, start = list(buffers), offset
        while left:
            done = os.preadv(fd, left[:_MOST_BUFFERS], offset)
            offset += done
            if done == 0 or (self._direct and offset % PAGE_BYTES):  # the file's end
                break
            left = _behind(left, done)
        return offset - start

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_folder(self, directory: str) -> None:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def free_bytes(self, directory: str) -> int:
        stat = os.statvfs(directory)
        return stat.f_bavail * stat.f_frsize


def supports_direct(directory: str) -> bool:
    """Tries O_DIRECT with a file of one page, in a folder of the caller's. `OSError` when no file can be written."""
    path, files = os.path.join(directory, PROBE), OsFiles(direct=True)
    try:
        with contextlib.suppress(FileNotFoundError):  # of a process that was killed here
            os.unlink(path)
        fd = files.create(path, PAGE_BYTES)
        try:
            files.write(fd, [map_memory(PAGE_BYTES, prefault=True)], 0)
        finally:
            files.close(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECT_ERRNOS:
            raise
        return False
    finally:
        if os.path.lexists(path):
            os.unlink(path)
    return _DIRECT != 0


def _behind(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers after their first `done` bytes."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []
