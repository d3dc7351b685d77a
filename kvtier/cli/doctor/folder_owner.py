"""Which process owns a disk tier's folder, as the kernel tells of its lock: nothing is locked to find out."""

import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kvtier.tiers.disk.medium.folder import MARKER

_LOCKS = Path("/proc/locks")
_PROCESSES = Path("/proc")


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that holds the lock of a folder."""

    pid: int
    command: str
    """Its program and its configuration, and nothing else of its command line, which may have secrets. Empty: it cannot
    be read."""
    has_file: bool
    """Whether it, or one of the processes that started it, was started with the file of the configuration."""


def owner_of(folder: Path, file: Path | None) -> Owner | None:
    """Returns who has locked the folder; None: nobody whom this process can see.

    :param file: the configuration that is looked at.
    :raises OSError: the folder, or the kernel's list of locks, cannot be read.
    """
    marker = folder / MARKER
    if not marker.exists() or not _LOCKS.exists():
        return None
    pid = _holder(marker)
    if pid is None:
        return None
    return Owner(pid, _named(_words(pid)), file is not None and was_started_with(file, pid))


def _holder(marker: Path) -> int | None:
    """Returns the process in whose name the file is locked."""
    found = os.stat(marker)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    others = []
    for line in _LOCKS.read_text().splitlines():
        words = line.split()
        if len(words) < 6 or words[1] != "FLOCK" or int(words[4]) <= 0:
            continue
        if words[5] == place:
            return int(words[4])
        if words[5].rpartition(":")[2] == str(found.st_ino):
            others.append(int(words[4]))
    # Some file systems have a device here that `stat` does not know: then the file has to be open there.
    return next((pid for pid in others if _has_open(pid, marker)), None)


def _has_open(pid: int, marker: Path) -> bool:
    try:
        links = list((_PROCESSES / str(pid) / "fd").iterdir())
        return any(os.path.samefile(link, marker) for link in links if os.path.lexists(link))
    except OSError:
        return False


def _words(pid: int) -> list[str]:
    try:
        packed = (_PROCESSES / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return [word.decode(errors="replace") for word in packed.rstrip(b"\0").split(b"\0")]


def _named(words: list[str]) -> str:
    start = words.index("-m") + 1 if "-m" in words else 0
    options = [place for place in range(start, len(words)) if words[place].startswith("-")]
    program = " ".join(words[start : min(options, default=len(words))])
    config = next((f" --config {after}" for word, after in pairwise(words) if word == "--config"), "")
    return program + config


def was_started_with(file: Path, pid: int) -> bool:
    """Whether the process or one above it was started with this file. Engines' tiers run in a child of theirs."""
    wanted = file.resolve()
    while pid > 0:  # in a container, the service itself is process 1
        words = _words(pid)
        named = (word.rpartition("=")[2] for word in words)
        if any(_same(word, wanted, pid) for word in named) or any(f'{wanted.name}"' in word for word in words):
            return True
        pid = _parent(pid)
    return False


def _same(word: str, wanted: Path, pid: int) -> bool:
    if Path(word).name != wanted.name:
        return False
    try:
        begun_in = os.readlink(_PROCESSES / str(pid) / "cwd")
    except OSError:  # a pool is private, and says where it was started to root alone
        return not word.startswith("/") or Path(word).resolve() == wanted
    return Path(begun_in, word).resolve() == wanted


def _parent(pid: int) -> int:
    try:
        return int((_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
