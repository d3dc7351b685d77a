"""The few file operations that the disk tier needs; a seam where tests put a failing disk."""

import errno
import os
import sys
from typing import Protocol

from kvtier.tiers.memory import PAGE_BYTES, map_memory, round_up

_DIRECT = os.O_DIRECT if sys.platform == "linux" else 0
_NO_DIRECT_ERRNOS = (errno.EINVAL, errno.EOPNOTSUPP)


class FileLayer(Protocol):
    """All methods block, release the GIL, raise `OSError`, and may be called from any thread."""

    def write(self, path: str, buffer: memoryview, nbytes: int) -> None:
        """Creates `path` with the first `nbytes` of `buffer`.

        `buffer` is page-aligned and at least `nbytes` rounded up to pages. After an error the file may
        be there, whole or in part.
        """

    def read(self, path: str, buffer: memoryview) -> int:
        """Reads the file into the page-aligned `buffer` of whole pages until one of them ends."""

    def rename(self, source: str, target: str) -> None:
        """Atomically: `target` is there in full or not at all."""

    def remove(self, path: str) -> None:
        """Unlinks a file."""

    def free_bytes(self, directory: str) -> int:
        """What an unprivileged process may still write to the file system of `directory`."""


class OsFiles:
    """The real thing. With `direct`, payloads go past the page cache (O_DIRECT), where they would be kept twice."""

    def __init__(self, *, direct: bool) -> None:
        self._flags = os.O_CLOEXEC | (_DIRECT if direct else 0)

    def write(self, path: str, buffer: memoryview, nbytes: int) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flags, 0o600)
        try:
            end = round_up(nbytes, PAGE_BYTES)  # O_DIRECT takes whole pages only
            done = 0
            while done < end:
                done += os.pwrite(fd, buffer[done:end], done)
            if end != nbytes:
                os.ftruncate(fd, nbytes)
        finally:
            os.close(fd)

    def read(self, path: str, buffer: memoryview) -> int:
        # A FIFO in its place must not hold up the thread, a link not lead elsewhere.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | self._flags)
        try:
            done = 0
            while done < len(buffer):
                num_read = os.preadv(fd, [buffer[done:]], done)
                done += num_read
                if num_read == 0 or num_read % PAGE_BYTES:  # the file's end; O_DIRECT could not go on from there
                    break
            return done
        finally:
            os.close(fd)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def free_bytes(self, directory: str) -> int:
        stat = os.statvfs(directory)
        return stat.f_bavail * stat.f_frsize


def supports_direct(directory: str) -> bool:
    """Tries O_DIRECT with a file of one page. Raises `OSError` when no file can be written at all."""
    path = os.path.join(directory, f"probe-{os.getpid()}")
    try:
        OsFiles(direct=True).write(path, map_memory(PAGE_BYTES, prefault=True), PAGE_BYTES)
    except OSError as error:
        if error.errno not in _NO_DIRECT_ERRNOS:
            raise
        return False
    finally:
        if os.path.lexists(path):
            os.unlink(path)
    return _DIRECT != 0
