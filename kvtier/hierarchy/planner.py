"""How much of a hit is worth fetching."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.tiers.base import Status


@dataclass(frozen=True, slots=True)
class BlockStatus:
    """Where one block of a lookup was found. `tier` is empty unless `status` is HIT."""

    status: Status
    tier: str = ""


MISSING = BlockStatus(Status.MISS)
PENDING = BlockStatus(Status.PENDING)


class Planner(Protocol):
    """Weighs fetching against computing. Scheduler thread; called once per request; must not block."""

    def blocks_to_fetch(self, statuses: Sequence[BlockStatus]) -> int:
        """How many leading blocks to fetch: at most the leading run of hits."""


class AlwaysFetch:
    """Fetches every leading hit."""

    def blocks_to_fetch(self, statuses: Sequence[BlockStatus]) -> int:
        return leading_hits(statuses)


def leading_hits(statuses: Sequence[BlockStatus]) -> int:
    """Length of the run of hits at the start."""
    for index, status in enumerate(statuses):
        if status.status is not Status.HIT:
            return index
    return len(statuses)
