"""A span for every call of a tier that is made within a trace."""

from collections.abc import Sequence
from typing import Generic

from kvtier.identity.keys import StoreKey
from kvtier.system.tracing import tracing
from kvtier.tiers.base import Item, PayloadT_contra, Status, TargetT_contra, TierOf, Usage, WriteStatus


class Traced(Generic[PayloadT_contra, TargetT_contra]):
    """A tier like the one inside, with spans of its lookups, reads and writes. Any thread.

    Only for processes that trace: `traced` leaves tiers as they are in others.
    """

    def __init__(self, tier: TierOf[PayloadT_contra, TargetT_contra]) -> None:
        """:param tier: belongs to this object from now on; its name is in the spans'."""
        self._tier = tier

    @property
    def name(self) -> str:
        return self._tier.name

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        with tracing.span(f"lookup {self.name}", tier=self.name, blocks=len(keys)) as span:
            statuses = self._tier.lookup(keys)
            if span is not None:
                span.attributes["hits"] = statuses.count(Status.HIT)
        return statuses

    def read(self, keys: Sequence[StoreKey], into: Sequence[TargetT_contra]) -> list[Status]:
        with tracing.span(f"read {self.name}", tier=self.name, blocks=len(keys)) as span:
            statuses = self._tier.read(keys, into)
            if span is not None:
                there = [len(each) for each, status in zip(into, statuses, strict=True) if status is Status.HIT]
                span.attributes |= {"hits": len(there), "bytes": sum(there)}
        return statuses

    def write(self, items: Sequence[Item[PayloadT_contra]]) -> list[WriteStatus]:
        with tracing.span(f"write {self.name}", tier=self.name, blocks=len(items)) as span:
            statuses = self._tier.write(items)
            if span is not None:
                stored = [len(item[1]) for item, s in zip(items, statuses, strict=True) if s is WriteStatus.STORED]
                span.attributes |= {"stored": len(stored), "bytes": sum(stored)}
        return statuses

    def discard(self, keys: Sequence[StoreKey]) -> int:
        return self._tier.discard(keys)

    def usage(self) -> Usage:
        return self._tier.usage()

    def check(self) -> None:
        self._tier.check()

    def close(self) -> None:
        self._tier.close()


def traced(tier: TierOf[PayloadT_contra, TargetT_contra]) -> TierOf[PayloadT_contra, TargetT_contra]:
    """The tier, with spans if this process has any."""
    return Traced(tier) if tracing.is_on else tier
