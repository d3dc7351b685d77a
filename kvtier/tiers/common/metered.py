"""Counts and times every call of a tier."""

from collections import Counter
from collections.abc import Iterable, Sequence, Sized
from typing import Generic

from kvtier.identity.keys import StoreKey
from kvtier.metrics import Metrics
from kvtier.tiers.base import Item, PayloadT_contra, Status, TargetT_contra, TierOf, Usage, WriteStatus


class Metered(Generic[PayloadT_contra, TargetT_contra]):
    """A tier like the one inside, with `Metrics.tier_blocks`, `tier_bytes` and `tier_batch_seconds` kept.

    Any thread. About 5 us per batch. Calls that raise are timed but count no blocks.
    """

    def __init__(self, tier: TierOf[PayloadT_contra, TargetT_contra], metrics: Metrics) -> None:
        """:param tier: belongs to this object from now on; its name is the label."""
        self._tier = tier
        name = tier.name
        self._seconds = {
            op: metrics.tier_batch_seconds.labels(name, op) for op in ("lookup", "read", "write", "discard")
        }
        self._lookups = {s: metrics.tier_blocks.labels(name, "lookup", s.name.lower()) for s in Status}
        self._reads = {s: metrics.tier_blocks.labels(name, "read", s.name.lower()) for s in Status}
        self._writes = {s: metrics.tier_blocks.labels(name, "write", s.name.lower()) for s in WriteStatus}
        self._discards = metrics.tier_blocks.labels(name, "discard", "hit")
        self._read_bytes = metrics.tier_bytes.labels(name, "read")
        self._written_bytes = metrics.tier_bytes.labels(name, "write")

    @property
    def name(self) -> str:
        return self._tier.name

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        with self._seconds["lookup"].time():
            statuses = self._tier.lookup(keys)
        for status, count in Counter(statuses).items():
            self._lookups[status].inc(count)
        return statuses

    def read(self, keys: Sequence[StoreKey], into: Sequence[TargetT_contra]) -> list[Status]:
        with self._seconds["read"].time():
            statuses = self._tier.read(keys, into)
        for status, count in Counter(statuses).items():
            self._reads[status].inc(count)
        self._read_bytes.inc(_bytes_where(Status.HIT, statuses, into))
        return statuses

    def write(self, items: Sequence[Item[PayloadT_contra]]) -> list[WriteStatus]:
        with self._seconds["write"].time():
            statuses = self._tier.write(items)
        for status, count in Counter(statuses).items():
            self._writes[status].inc(count)
        self._written_bytes.inc(_bytes_where(WriteStatus.STORED, statuses, (payload for _, payload, _ in items)))
        return statuses

    def discard(self, keys: Sequence[StoreKey]) -> int:
        with self._seconds["discard"].time():
            num_found = self._tier.discard(keys)
        self._discards.inc(num_found)
        return num_found

    def usage(self) -> Usage:
        return self._tier.usage()

    def check(self) -> None:
        self._tier.check()

    def close(self) -> None:
        self._tier.close()


def _bytes_where(
    wanted: Status | WriteStatus, statuses: Iterable[Status | WriteStatus], buffers: Iterable[Sized]
) -> int:
    return sum(len(b) for s, b in zip(statuses, buffers, strict=True) if s is wanted)
