"""What a tier tells the world about its content."""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.keys import StoreKey


class EventKind(enum.Enum):
    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class Event:
    """One change of a tier's content. `keys` is empty for `CLEARED`: everything is gone."""

    kind: EventKind
    tier: str
    keys: tuple[StoreKey, ...] = ()


EventSink = Callable[[Event], None]
"""Receives events in the order of the changes, called without any lock held; must not block."""


def ignore_event(event: Event) -> None:
    """The sink for those who do not listen."""
