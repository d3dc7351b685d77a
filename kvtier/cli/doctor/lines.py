"""What the doctor finds, and the kind of functions that look."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvtier.config import Config


class Level(StrEnum):
    """How much a line matters."""

    PROBLEM = "problem"
    """Something of the set-up does not work, or nothing starts with it."""
    WARNING = "warning"
    """It works, and something is wasted, slow or about to end."""
    NOTE = "note"
    """Nothing is wrong: it is worth knowing."""
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was found. It never holds a secret."""

    level: Level
    subject: str
    """What it is about: a key of the file, or a part of the machine."""
    found: str
    effect: str = ""
    """What comes of it; empty where `found` says so."""
    remedy: str = ""
    """What to do about it; empty where there is nothing to do, or `found` says so."""


@dataclass(frozen=True, slots=True)
class Look:
    """One part of the set-up that is looked at, beside the others."""

    subject: str
    """What it is called if it does not end."""
    run: Callable[[], Iterable[Line]]
    """Looks. May block. Its `KvtierError` or `OSError` becomes a problem. Called once, on a thread of its own."""


Looks = Callable[[Config, Path | None], Iterable[Look]]
"""What an entry point of the group `kvtier.doctor_looks` is: gives what is to be looked at for a configuration, and the
file that it is from, if any. It changes nothing and blocks for nothing: that is for the looks."""
