"""The folder of a disk tier: who owns it, how its files are named, what a start finds in it.

    <folder>/kvtier-disk-tier      marker; its lock (flock) says that a process owns the folder
    <folder>/tmp/<anything>        blocks being written; removed at start
    <folder>/<xx>/<key>.<number>   one block in the stored form; xx is the first byte of the chain hash

Key and number are lower-case hexadecimal. The number is new for every write, so that removing an old
file of a key can never hit a newer one.
"""

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier.codec import HEADER_BYTES
from kvtier.errors import ConfigError
from kvtier.keys import STORE_KEY_BYTES, StoreKey

MARKER = "kvtier-disk-tier"
_MARKER_TEXT = b"kvtier disk tier, format 1\n"
_TEMP = "tmp"
_FAN_OUT = [f"{i:02x}" for i in range(256)]
_EXPECTED = {MARKER, _TEMP, "lost+found", *_FAN_OUT}
_BLOCK_NAME = re.compile(rf"([0-9a-f]{{{2 * STORE_KEY_BYTES}}})\.([1-9a-f][0-9a-f]{{0,15}})")
"""One name per key and number: a leading zero is somebody else's."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that was there at start."""

    key: StoreKey
    number: int
    nbytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Scan:
    """What a start found, apart from temporary files, which are gone now."""

    blocks: list[FoundFile]
    """Oldest first; a key may occur more than once."""
    torn: list[FoundFile]
    """Shorter than a header: a write that the machine did not survive."""
    num_foreign: int
    """Files that kvtier did not make."""


class DiskFolder:
    """An owned folder. Immutable; `close` gives it up."""

    def __init__(self, path: str, marker_fd: int) -> None:
        self.path = path
        self._marker_fd = marker_fd

    @classmethod
    def open(cls, path: Path) -> "DiskFolder":
        """Takes the folder, making it if need be. Raises `ConfigError` that names it and the remedy."""
        path = path.absolute()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            marker_fd = _take(path)
        except OSError as error:
            raise ConfigError(
                f"disk tier folder {path} cannot be used: {error}; name a folder that this user may write"
            ) from error
        try:
            for name in (_TEMP, *_FAN_OUT):
                (path / name).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            os.close(marker_fd)
            raise ConfigError(
                f"disk tier folder {path} cannot be filled: {error}; make room or name another folder"
            ) from error
        return cls(str(path), marker_fd)

    def block_path(self, key: StoreKey, number: int) -> str:
        return f"{self.path}/{key[32]:02x}/{key.hex()}.{number:x}"

    def temp_path(self, number: int) -> str:
        return f"{self.path}/{_TEMP}/{number:x}"

    @property
    def temp_folder(self) -> str:
        return f"{self.path}/{_TEMP}"

    def scan(self) -> Scan:
        """Reads all names and sizes and removes temporary files. About 5 us per file."""
        for entry in _files(self.temp_folder):
            os.unlink(entry.path)
        found: list[FoundFile] = []
        num_foreign = sum(name not in _EXPECTED for name in os.listdir(self.path))
        for folder in _FAN_OUT:
            for entry in os.scandir(f"{self.path}/{folder}"):
                block = _parse(entry, folder)
                if block is None:
                    num_foreign += 1
                else:
                    found.append(block)
        found.sort(key=lambda block: block.modified_ns)
        whole = [block for block in found if block.nbytes >= HEADER_BYTES]
        torn = [block for block in found if block.nbytes < HEADER_BYTES]
        return Scan(whole, torn, num_foreign)

    def close(self) -> None:
        """Lets another process take the folder. Call once."""
        os.close(self._marker_fd)


def _take(path: Path) -> int:
    """The locked marker's descriptor."""
    names = set(os.listdir(path))
    if MARKER not in names and names - {"lost+found"}:
        raise ConfigError(
            f"disk tier folder {path} holds other files, such as {min(names)!r}: name an empty or new folder"
        )
    fd = os.open(path / MARKER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        text = os.pread(fd, 256, 0)
        if not text:
            os.pwrite(fd, _MARKER_TEXT, 0)
        elif text != _MARKER_TEXT:
            raise ConfigError(
                f"disk tier folder {path} was made by another version ({text[:60]!r}): empty it or name another"
            )
    except BlockingIOError as error:
        os.close(fd)
        raise ConfigError(
            f"disk tier folder {path} is in use by another process: stop it, or give each process a folder of its own"
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _files(folder: str) -> Iterator["os.DirEntry[str]"]:
    return (entry for entry in os.scandir(folder) if not entry.is_dir(follow_symlinks=False))


def _parse(entry: "os.DirEntry[str]", folder: str) -> FoundFile | None:
    """The block that a directory entry is by its name, None for a foreign one."""
    match = _BLOCK_NAME.fullmatch(entry.name)
    info = entry.stat(follow_symlinks=False)
    if match is None or not stat.S_ISREG(info.st_mode):
        return None
    key = StoreKey(bytes.fromhex(match[1]))
    if f"{key[32]:02x}" != folder:
        return None
    return FoundFile(key, int(match[2], 16), info.st_size, info.st_mtime_ns)
