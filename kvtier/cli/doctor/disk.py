"""A disk tier's folder: whether the process may use it, who does already, and what its file system gives."""

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvtier.cli.doctor.folder_owner import owner_of
from kvtier.cli.doctor.lines import Level, Line
from kvtier.clock import MONOTONIC
from kvtier.config.findings import nearest_existing, obtainable_bytes, size_words
from kvtier.errors import ConfigError
from kvtier.memory.pages import map_memory
from kvtier.tiers.disk.medium.files import PROBE, OsFiles, supports_direct
from kvtier.tiers.disk.medium.folder import MARKER, is_read_only, require_format, require_no_strangers

_PROBE_BYTES = 16 << 20
_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class FolderSettings:
    """What the configuration says of a disk tier."""

    key: str
    """The key of its folder, with dots."""
    folder: Path
    capacity_key: str
    capacity_bytes: int
    reserve_bytes: int
    direct_io: str


def folder_lines(settings: FolderSettings, file: Path | None) -> Iterable[Line]:
    """Looks at the folder. Writes a probe file into it, if it is there, and removes it. Blocks for as long as the disk
    does.

    :param file: of the configuration.
    """
    folder = settings.folder
    try:
        there = nearest_existing(folder)
    except PermissionError:
        found = f"user {os.geteuid()} may not enter the folders above {folder}"
        remedy = "run as the user of the folder, or let this one enter: chmod o+x"
        yield Line(Level.PROBLEM, settings.key, found, "nothing starts with it", remedy)
        return
    if there.is_dir():
        yield from _room(settings, there)
    if there != folder:
        yield _not_made_yet(settings, there)
        return
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        yield _not_permitted(settings.key, folder, "may not read and write")
        return
    try:
        if (folder / MARKER).exists():
            require_format(folder)
        else:
            require_no_strangers(folder, may_be_empty=True)
    except ConfigError as error:
        yield Line(Level.PROBLEM, settings.key, str(error))
        return
    except OSError as error:
        found, remedy = (
            f"{folder} cannot be read: {error}",
            "the drive or its file system fails: see dmesg, and mend it",
        )
        yield Line(Level.PROBLEM, settings.key, found, "nothing starts with it", remedy)
        return
    yield from _owner(settings.key, folder, file)
    yield _medium(settings)


def _room(settings: FolderSettings, there: Path) -> Iterable[Line]:
    """Says so where the drive would be large enough, and others have filled it."""
    can_have = obtainable_bytes(settings.folder, settings.reserve_bytes)
    if can_have <= 0 or settings.capacity_bytes > shutil.disk_usage(there).total - settings.reserve_bytes:
        return  # `kvtier config check` says it
    if can_have < settings.capacity_bytes:
        found = (
            f"{size_words(settings.capacity_bytes)}, and {size_words(can_have)} can be had now: others take the rest"
        )
        effect = "the tier holds what there is, and evicts sooner"
        yield Line(Level.WARNING, settings.capacity_key, found, effect, "free the file system, or lower the key")


def _owner(key: str, folder: Path, file: Path | None) -> Iterable[Line]:
    owner = owner_of(folder, file)
    if owner is None:
        return
    who = f"process {owner.pid}" + (f" ({owner.command})" if owner.command else "")
    if owner.has_file:
        yield Line(Level.OK, key, f"{folder} is in use by process {owner.pid}, which runs with this file")
        return
    yield Line(
        Level.PROBLEM,
        key,
        f"{folder} is in use by {who}",
        "no other process starts on it",
        "stop that one, or give each process a folder of its own (if it is the one that this file is for, all is well)",
    )


def _not_made_yet(settings: FolderSettings, there: Path) -> Line:
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        return _not_permitted(settings.key, there, f"may not make {settings.folder} in")
    free = size_words(shutil.disk_usage(there).free)
    return Line(
        Level.NOTE,
        settings.key,
        f"{settings.folder} is not there yet, and is made at the start, on {_file_system(there)} with {free} free",
    )


def _not_permitted(key: str, folder: Path, what: str) -> Line:
    found = os.stat(folder)
    if is_read_only(folder):
        text = f"{folder} is on {_file_system(folder)}, which is mounted read-only"
        return Line(Level.PROBLEM, key, text, "nothing starts with it", "look for errors of the drive; remount it")
    return Line(
        Level.PROBLEM,
        key,
        f"user {os.geteuid()} {what} {folder}, which is {found.st_mode & 0o777:04o} of user {found.st_uid}",
        "nothing starts with it",
        f"run as user {found.st_uid}, or give the folder to this user: chown",
    )


def _medium(settings: FolderSettings) -> Line:
    folder, key = settings.folder, settings.key
    usage = shutil.disk_usage(folder)
    found = f"{folder} is on {_file_system(folder)} with {size_words(usage.free)} free"
    try:
        can = supports_direct(str(folder))
        speed = _written_bytes_per_s(folder, can) if usage.free > settings.reserve_bytes + 2 * _PROBE_BYTES else None
    except OSError as error:
        effect = "no block gets to disk"
        return Line(Level.PROBLEM, key, f"{found}, and takes no file: {error}", effect, "mend or free the file system")
    measured = "" if speed is None else f"; a file of {size_words(_PROBE_BYTES)} is written at {speed / 1e9:.2f} GB/s"
    if can:
        past = "is not wanted" if settings.direct_io == "off" else "works"
        return Line(Level.OK, key, f"{found}; O_DIRECT {past}{measured}")
    if settings.direct_io == "on":
        remedy = 'set direct_io to "auto", or name a folder on ext4 or xfs'
        return Line(Level.PROBLEM, key, f"{found}, and has no O_DIRECT", "nothing starts with direct_io on", remedy)
    effect = "blocks go through the page cache, which keeps them a second time"
    return Line(Level.NOTE, key, f"{found}, and has no O_DIRECT{measured}", effect, "name a folder on ext4 or xfs")


def _written_bytes_per_s(folder: Path, direct: bool) -> float:
    """Writes a probe file, removes it, and returns how fast it got to the drive. Raises `OSError`."""
    files, path = OsFiles(direct=direct), str(folder / PROBE)
    memory = map_memory(_PROBE_BYTES, prefault=True)
    descriptor = files.create(path, _PROBE_BYTES)
    try:
        begun = MONOTONIC()
        files.write(descriptor, [memory], 0)
        files.sync(descriptor)
        return _PROBE_BYTES / max(1e-9, MONOTONIC() - begun)
    finally:
        files.close(descriptor)
        with suppress(FileNotFoundError):
            files.remove(path)


def _file_system(folder: Path) -> str:
    """Returns the type of the file system of a folder, such as `ext4`."""
    try:
        mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return "a file system"
    real = folder.resolve()
    above = [words for words in mounts if words[4] == "/" or Path(words[4]) in (real, *real.parents)]
    nearest = max(above, key=lambda words: len(words[4]), default=None)
    return "a file system" if nearest is None else nearest[nearest.index("-") + 1]
