"""What a tier tells the world about its content, and about itself."""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.identity.keys import StoreKey


class TierState(enum.Enum):
    """What the medium of a tier lets it do."""

    WRITABLE = "writable"
    """Everything."""
    READ_ONLY = "read_only"
    """Writes fail, and are tried every few seconds. What is there is read."""
    OFF = "off"
    """All is a miss: while the medium hangs, or, where reads fail, until the tier's process starts again."""


class EventKind(enum.Enum):
    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"
    WRITABLE = TierState.WRITABLE.value
    """The tier takes blocks again."""
    READ_ONLY = TierState.READ_ONLY.value
    """It takes none for now."""
    OFF = TierState.OFF.value
    """It answers nothing and takes nothing. Where that is for good, CLEARED tells, too; else WRITABLE or READ_ONLY
    will, and what it had is there again."""


@dataclass(frozen=True, slots=True)
class Event:
    """One change of a tier's content, or of its state. `keys` is empty where it is about the tier as a whole."""

    kind: EventKind
    tier: str
    keys: tuple[StoreKey, ...] = ()


ABOUT_TIERS = frozenset(EventKind) - {EventKind.STORED, EventKind.REMOVED}
"""Kinds that are about a tier as a whole: everything is gone, or its state has changed."""

EventSink = Callable[[Event], None]
"""Receives events in the order of the changes, called without any lock held; must not block."""


def ignore_event(event: Event) -> None:
    """A sink that ignores events."""
