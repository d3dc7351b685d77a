"""Counts and times every call of a tier."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Generic

from kvtier.identity.keys import StoreKey
from kvtier.metrics import Metrics
from kvtier.tiers.base import Item, PayloadT_contra, Status, TargetT_contra, TierOf, Usage, WriteStatus


class TierCounts:
    """`Metrics.tier_blocks` and `tier_bytes` of one tier. Any thread. About 1 us per number that changes."""

    def __init__(self, tier: str, metrics: Metrics, *, has_lookups: bool = True) -> None:
        """Makes the samples of all verbs and answers, which read 0 from now on.

        :param tier: the label.
        :param has_lookups: False: lookups are not counted. A pool's writers look up as well, so its memory's lookups
            would say nothing of hits.
        """
        counted = Status if has_lookups else ()
        self._lookups = {s: metrics.tier_blocks.labels(tier, "lookup", s.name.lower()) for s in counted}
        self._reads = {s: metrics.tier_blocks.labels(tier, "read", s.name.lower()) for s in Status}
        self._writes = {s: metrics.tier_blocks.labels(tier, "write", s.name.lower()) for s in WriteStatus}
        self._discards = metrics.tier_blocks.labels(tier, "discard", "hit")
        self._read_bytes = metrics.tier_bytes.labels(tier, "read")
        self._written_bytes = metrics.tier_bytes.labels(tier, "write")

    def note_lookup(self, statuses: Sequence[Status]) -> None:
        """Blocks were looked up."""
        for status, count in Counter(statuses).items():
            self._lookups[status].inc(count)

    def note_read(self, num_blocks: int, num_hits: int, nbytes: int) -> None:
        """Blocks were to be read. All others than the hits were misses.

        :param nbytes: of the payloads of the hits.
        """
        if num_hits:
            self._reads[Status.HIT].inc(num_hits)
            self._read_bytes.inc(nbytes)
        if num_hits < num_blocks:
            self._reads[Status.MISS].inc(num_blocks - num_hits)

    def note_write(self, status: WriteStatus, num_blocks: int, nbytes: int) -> None:
        """Blocks were to be written.

        :param nbytes: of the payloads of those that were stored.
        """
        self._writes[status].inc(num_blocks)
        self._written_bytes.inc(nbytes)

    def note_discard(self, num_found: int) -> None:
        """Blocks were forgotten."""
        self._discards.inc(num_found)


class TimedCalls:
    """Calls of one tier that are counted and timed. Any thread. About 5 us per call.

    Calls that raise are timed but count no blocks.
    """

    def __init__(self, tier: str, metrics: Metrics) -> None:
        """:param tier: the label."""
        self._counts = TierCounts(tier, metrics)
        self._seconds = {
            op: metrics.tier_batch_seconds.labels(tier, op) for op in ("lookup", "read", "write", "discard")
        }

    def lookup(self, call: Callable[[], list[Status]], *, counts: bool = True) -> list[Status]:
        """Makes the call, and returns what it does.

        :param counts: whether the blocks count, and not the time alone.
        """
        with self._seconds["lookup"].time():
            statuses = call()
        if counts:
            self._counts.note_lookup(statuses)
        return statuses

    def note_lookup(self, statuses: Sequence[Status], seconds: float) -> None:
        """Counts a lookup that was made elsewhere, and the time that it took."""
        self._seconds["lookup"].observe(seconds)
        self._counts.note_lookup(statuses)

    def read(self, call: Callable[[], list[Status]], into: Sequence[Sized]) -> list[Status]:
        """Makes and counts a call that reads. `into` are the buffers, one for each block."""
        with self._seconds["read"].time():
            statuses = call()
        num_hits = statuses.count(Status.HIT)
        self._counts.note_read(len(statuses), num_hits, _bytes_where(Status.HIT, statuses, into))
        return statuses

    def write(self, call: Callable[[], list[WriteStatus]], payloads: Sequence[Sized]) -> list[WriteStatus]:
        """Makes and counts a call that writes, with a payload for each block."""
        with self._seconds["write"].time():
            statuses = call()
        for status, count in Counter(statuses).items():
            is_stored = status is WriteStatus.STORED
            self._counts.note_write(status, count, _bytes_where(status, statuses, payloads) if is_stored else 0)
        return statuses

    def discard(self, call: Callable[[], int]) -> int:
        """Makes and counts a call that discards."""
        with self._seconds["discard"].time():
            num_found = call()
        self._counts.note_discard(num_found)
        return num_found


class Metered(Generic[PayloadT_contra, TargetT_contra]):
    """A tier like the one inside, all of whose calls are `TimedCalls`. Any thread."""

    def __init__(self, tier: TierOf[PayloadT_contra, TargetT_contra], metrics: Metrics) -> None:
        """:param tier: belongs to this object from now on; its name is the label."""
        self._tier, self._calls = tier, TimedCalls(tier.name, metrics)

    @property
    def name(self) -> str:
        return self._tier.name

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        return self._calls.lookup(lambda: self._tier.lookup(keys))

    def read(self, keys: Sequence[StoreKey], into: Sequence[TargetT_contra]) -> list[Status]:
        return self._calls.read(lambda: self._tier.read(keys, into), into)

    def write(self, items: Sequence[Item[PayloadT_contra]]) -> list[WriteStatus]:
        return self._calls.write(lambda: self._tier.write(items), [payload for _, payload, _ in items])

    def discard(self, keys: Sequence[StoreKey]) -> int:
        return self._calls.discard(lambda: self._tier.discard(keys))

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
