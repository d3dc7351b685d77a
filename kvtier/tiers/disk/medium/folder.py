"""The folder of a disk tier: who owns it, how its segments are called.

<folder>/kvtier-disk-tier      marker; its lock (flock) says that a process owns the folder
<folder>/<number>.segment      one segment; the number is 8 lower-case hexadecimal digits
"""

import errno
import fcntl
import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.tiers.disk.medium.files import PROBE, FileLayer

MARKER = "kvtier-disk-tier"
_MARKER_TEXT = b"kvtier disk tier, format 2\n"
_FILE_PER_BLOCK_TEXT = b"kvtier disk tier, format 1\n"
_EXPECTED = {MARKER, "lost+found"}
_SEGMENT_NAME = re.compile(r"([0-9a-f]{8})\.segment")


def segment_name(number: int) -> str:
    """The name of a segment's file."""
    return f"{number:08x}.segment"


@dataclass(frozen=True, slots=True)
class Listing:
    """What is in a folder."""

    numbers: list[int]
    """Numbers of the segments, by their files' names, in order."""
    foreign: list[str]
    """Names of files that kvtier did not make."""


class FolderLostError(OSError):
    """The folder was removed, emptied or replaced while a process owned it: nobody, or another process, owns it now."""


class DiskFolder:
    """An owned folder. Immutable; `close` gives it up."""

    def __init__(self, path: str, marker_fd: int) -> None:
        self.path = path
        self._marker_fd = marker_fd

    @classmethod
    def open(cls, path: Path, *, make: bool = True) -> "DiskFolder":
        """Takes the folder, making it if `make`. Raises `ConfigError` that names it and the remedy."""
        path = path.absolute()
        try:
            if make:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            return cls(str(path), _take(path, make))
        except OSError as error:
            raise _unusable(path, error) from error

    def require_owned(self, files: FileLayer) -> None:
        """Raises `FolderLostError` when it is not this process's any more."""
        if not files.is_named(self._marker_fd, f"{self.path}/{MARKER}"):
            raise FolderLostError(errno.ENOENT, "the folder was removed, emptied or replaced while in use", self.path)

    def segment_path(self, number: int) -> str:
        return f"{self.path}/{segment_name(number)}"

    def list(self) -> Listing:
        """Reads all names; `OSError` when it cannot."""
        return list_folder(self.path)

    def close(self) -> None:
        """Lets another process take the folder. Call once."""
        fcntl.flock(self._marker_fd, fcntl.LOCK_UN)  # a process that was forked has the descriptor, too
        os.close(self._marker_fd)


def list_folder(path: str) -> Listing:
    """What is there, whoever owns it."""
    numbers: list[int] = []
    foreign: list[str] = []
    for entry in os.scandir(path):
        match = _SEGMENT_NAME.fullmatch(entry.name)
        if match is not None and entry.is_file(follow_symlinks=False) and int(match[1], 16):
            numbers.append(int(match[1], 16))
        elif entry.name not in _EXPECTED:
            foreign.append(entry.name)
    return Listing(sorted(numbers), sorted(foreign))


def require_format(path: Path) -> None:
    """Raises `ConfigError` when the marker is not there, or of another version. Takes nothing."""
    try:
        text = (path / MARKER).read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise ConfigError(
            f"{path} is no disk tier folder: {error}; name the one of disk.directory or pool_service.disk_dir"
        ) from error
    except PermissionError as error:
        raise ConfigError(f"disk tier folder {path} cannot be read: {error}; run as the user of the folder") from error
    except OSError as error:
        raise ConfigError(
            f"disk tier folder {path} cannot be read: {error}; the drive or its file system fails: see dmesg, and mend "
            "or replace it"
        ) from error
    _check(path, text)


def require_no_strangers(path: Path, *, may_be_empty: bool) -> None:
    """Raises `ConfigError` for a folder without a marker that has files of others, or is empty unless it may be.

    :raises OSError: it cannot be read.
    """
    names = set(os.listdir(path)) - {PROBE}
    if MARKER not in names and (names - {"lost+found"} or not may_be_empty):
        if any(map(_SEGMENT_NAME.fullmatch, names)):
            raise ConfigError(
                f"disk tier folder {path} has segments, and its file {MARKER} is gone: remove the segments, or name an "
                "empty or new folder"
            )
        found = f"holds other files, such as {min(names)!r}" if names else "is empty"
        raise ConfigError(f"disk tier folder {path} {found}: name an empty or new folder")


def require_usable_folder(path: Path) -> None:
    """Raises `ConfigError` where `DiskFolder.open` would for this user, but for a folder that is in use.

    Makes and takes nothing.
    """
    try:
        if path.is_dir():
            if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                raise _refusal(path)
            if (path / MARKER).exists():
                require_format(path)
            else:
                require_no_strangers(path, may_be_empty=True)
            return
        there = next(place for place in (path, *path.absolute().parents) if place.exists())
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
        if not os.access(there, os.W_OK | os.X_OK):
            raise _refusal(there)
    except OSError as error:
        raise _unusable(path, error) from error


def _refusal(path: Path) -> OSError:
    """Why a folder that is there cannot be written: its file system is mounted so, or this user may not."""
    number = errno.EROFS if is_read_only(path) else errno.EACCES
    return OSError(number, os.strerror(number), str(path))


def is_read_only(path: Path) -> bool:
    """Whether the file system of what is there takes no writes."""
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"disk tier folder {path} cannot be used: {error}; name a folder that this user may write")


def _take(path: Path, make: bool) -> int:
    """The locked marker's descriptor. Without `make` nothing is written, on a file system that is read-only, too."""
    require_no_strangers(path, may_be_empty=make)
    fd = os.open(path / MARKER, (os.O_RDWR | os.O_CREAT if make else os.O_RDONLY) | os.O_CLOEXEC, 0o600)
    try:
        # A shared lock is one that NFS gives for a file that is open for reading; owners have an exclusive one.
        fcntl.flock(fd, (fcntl.LOCK_EX if make else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        text = os.pread(fd, 256, 0)
        if text or not make:
            _check(path, text)
        else:
            os.pwrite(fd, _MARKER_TEXT, 0)
    except BlockingIOError as error:
        os.close(fd)
        raise ConfigError(
            f"disk tier folder {path} is in use by another process: stop it, or give each process a folder of its own"
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(path: Path, text: bytes) -> None:
    if text == _FILE_PER_BLOCK_TEXT:
        raise ConfigError(
            f"disk tier folder {path} is of an earlier version, which kept a file per block and which this one does "
            "not read: empty the folder, or name another"
        )
    if text != _MARKER_TEXT:
        raise ConfigError(
            f"disk tier folder {path} was made by another version ({text[:60]!r}): empty it or name another"
        )
