"""What a look at a configuration finds, before anything is started with it."""

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from kvtier.config.config import Config
from kvtier.config.credentials import TokenConfig
from kvtier.config.reference import texts_of
from kvtier.errors import ConfigError
from kvtier.system.memory import available_bytes, total_bytes

_STAT_BLOCK_BYTES = 512


class Severity(StrEnum):
    """How much a finding matters."""

    ERROR = "error"
    """Nothing starts with it."""
    WARNING = "warning"
    """It starts, and something is wasted, useless or contradictory."""
    NOTE = "note"
    """Nothing is wrong: it says what the settings come to."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about a configuration."""

    severity: Severity
    key: str
    """The key that it is about, with dots."""
    text: str
    """What is found, and what to do about it."""
    defeats: bool = False
    """Whether what the key is for cannot work, although the process starts: `kvtier doctor` calls it a problem."""


Checks = Callable[[Config], Iterable[Finding]]
"""What looks at a configuration for one kind of process. It changes nothing, opens no connection and loads no model."""


def log_warnings(log: logging.Logger, found: Iterable[Finding]) -> None:
    """Logs what is wasted, useless or contradictory, for a process that starts all the same."""
    for finding in found:
        if finding.severity is Severity.WARNING:
            log.warning("configuration: %s: %s", finding.key, finding.text)


def errors_of(*attempts: Callable[[], object]) -> Iterable[Finding]:
    """Calls each, and yields an error for each `ConfigError` that is raised."""
    for attempt in attempts:
        try:
            attempt()
        except ConfigError as error:
            yield Finding(Severity.ERROR, "", str(error))


def ended_tokens(key: str, tokens: Sequence[TokenConfig]) -> Iterable[Finding]:
    """Yields a warning where tokens are given and none of them is accepted any more."""
    ends = [token.expires_at for token in tokens if token.expires_at is not None]
    if ends and len(ends) == len(tokens) and max(ends) <= datetime.now(UTC):
        yield Finding(
            Severity.WARNING,
            key,
            f"none holds any more, since {max(ends):%Y-%m-%d %H:%M %Z}: whoever has one is refused; add a newer one",
            defeats=True,
        )


def without_effect(config: Config, table: str, names: Iterable[str], needed: str) -> Iterable[Finding]:
    """Yields a warning for each key of `names` that is set although `needed`, which gives it a meaning, is not.

    :param needed: the key without which the others do nothing, in the same table.
    """
    section = getattr(config, table)
    for name in names:
        if name != needed and name in section.model_fields_set:
            yield Finding(Severity.WARNING, f"{table}.{name}", f"has no effect without {table}.{needed}; set that too")


def fields_of(config: Config, table: str, prefix: str = "") -> list[str]:
    """Returns the names of all keys of a table that begin with `prefix`."""
    return [name for name in texts_of(type(getattr(config, table))) if name.startswith(prefix)]


def room_on_disk(
    key: str, folder: Path, capacity_bytes: int, reserve_bytes: int, reserve_key: str
) -> Iterable[Finding]:
    """Yields what is wrong with a disk tier's size, on the file system that its folder is on or will be on."""
    there = nearest_existing(folder)
    if not there.is_dir():
        yield Finding(Severity.ERROR, key, f"{there} is not a folder; name another one")
        return
    usage = shutil.disk_usage(there)
    if obtainable_bytes(folder, reserve_bytes) <= 0:
        free = f"the file system of {folder} has {size_words(usage.free)} free: nothing will be stored"
        if reserve_bytes:
            kept = f"{size_words(reserve_bytes)} are kept free for others, and "
            text = f"{kept}{free}. Lower {reserve_key}, or use a larger file system"
        else:
            text = f"{free}. Free it, or use a larger one"
        yield Finding(Severity.WARNING, reserve_key if reserve_bytes else key, text, defeats=True)
    elif capacity_bytes > usage.total - reserve_bytes:
        yield Finding(
            Severity.WARNING,
            key,
            f"{size_words(capacity_bytes)} will never be had: the file system of {folder} has "
            f"{size_words(usage.total)}, of which {size_words(reserve_bytes)} stay free; the tier takes what there is",
        )


def nearest_existing(folder: Path) -> Path:
    """The folder, or what there is above it. Raises `OSError` where this user may not look."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def obtainable_bytes(folder: Path, reserve_bytes: int) -> int:
    """Bytes that a disk tier in a folder could have now: what is free, but for the reserve, and what its files take
    already, which it uses again. Negative where others have filled the file system."""
    own = 0
    with suppress(OSError):  # the folder is not there yet, or is of another user
        own = sum(os.stat(entry).st_blocks * _STAT_BLOCK_BYTES for entry in os.scandir(folder) if entry.is_file())
    return shutil.disk_usage(nearest_existing(folder)).free + own - reserve_bytes


def room_in_memory(key: str, wanted_bytes: int, effect: str) -> Iterable[Finding]:
    """Yields a warning where so much memory cannot be had here, now or ever.

    :param effect: what happens then.
    """
    total, available = total_bytes(), available_bytes()
    if total is not None and wanted_bytes > total:
        have = f"this machine or its control group has {size_words(total)} in all"
        yield Finding(
            Severity.WARNING, key, f"{size_words(wanted_bytes)}, and {have}: {effect}. Lower it", defeats=True
        )
    elif available is not None and wanted_bytes > available:
        have = f"{size_words(available)} are available now, beside what runs already"
        yield Finding(
            Severity.WARNING, key, f"{size_words(wanted_bytes)}, and {have}: {effect}. Lower it, or free memory"
        )


def size_words(amount: float) -> str:
    """`amount` bytes for people: at most one decimal, in the largest unit that it fills."""
    value, unit = float(amount), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:,.1f}".removesuffix(".0") + f" {unit}"
