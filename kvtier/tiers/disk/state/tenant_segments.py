"""The segments of one tenant: how much they are, which ones are empty, which one is the oldest."""

from dataclasses import dataclass, field

from kvtier.errors import InvariantError
from kvtier.tiers.disk.log.format import PAGE
from kvtier.tiers.disk.log.segments import NO_EPOCH, Segment
from kvtier.tiers.disk.state.lowest import Lowest


@dataclass(slots=True)
class TenantSegments:
    """The segments of a tenant, at least one, and sums over all. Not thread-safe: the tier's lock guards all of it."""

    segments: dict[int, Segment] = field(default_factory=dict)
    """The tenant's segments by number, oldest first."""
    open: Segment | None = None
    """The segment that takes extents."""
    nbytes: int = 0
    """Disk space of the segments' files."""
    num_pages: int = 0
    """Pages that were taken: what is preallocated and not yet used is not the tenant's share."""
    num_live: int = 0
    num_owing: int = 0
    epochs: Lowest[int] = field(default_factory=Lowest)
    """`min_epoch` of the segments that have records, by number."""
    empty: Lowest[int] = field(default_factory=Lowest)
    """`last_forget` of the segments that have no live record, by number."""

    def note(self, segment: Segment) -> None:
        """Keeps `epochs` and `empty` up to date after a change of this segment."""
        if segment.min_epoch != NO_EPOCH:
            self.epochs.put(segment.number, segment.min_epoch)
        if segment.num_live:
            self.empty.drop(segment.number)
        else:
            self.empty.put(segment.number, segment.last_forget)

    def drop(self, segment: Segment) -> None:
        """It is no longer there. Sums are the caller's."""
        del self.segments[segment.number]
        self.epochs.drop(segment.number)
        self.empty.drop(segment.number)

    def first_epoch(self, but: Segment | None) -> tuple[int, int] | None:
        """The smallest of any record, dead ones included, and the segment's number; not in `but`."""
        return self.epochs.first(lambda number: but is not None and number == but.number)

    def first_empty(self, now_s: float, *, open_too: bool) -> Segment | None:
        """The unused segment whose tombstones are the oldest; None when no segment is unused."""
        found = self.empty.first(lambda number: not self.segments[number].is_unused(now_s, open_too=open_too))
        return self.segments[found[1]] if found is not None else None

    def oldest(self, now_s: float) -> Segment | None:
        """The oldest segment that may go and has more than tombstones; None when there is none."""
        return next((s for s in self.segments.values() if s.may_go(now_s) and not s.compacted), None)

    def check(self) -> None:
        """Raises `InvariantError` when the sums are wrong."""
        segments = self.segments.values()
        if self.open is not None and self.open.retired:
            raise InvariantError("disk segments: a retired one takes extents")
        sums = sum(segment.num_live for segment in segments), sum(segment.num_pages for segment in segments) * PAGE
        if sums != (self.num_live, self.nbytes) or self.num_pages != sum(segment.next_page for segment in segments):
            raise InvariantError("disk segments: those of a tenant are miscounted")
        first, known = min((segment.min_epoch for segment in segments), default=NO_EPOCH), self.epochs.first()
        if (known[0] if known is not None else NO_EPOCH) != first:
            raise InvariantError("disk segments: the smallest epoch of a tenant is not known")
        if len(self.empty) != sum(not segment.num_live for segment in segments):
            raise InvariantError("disk segments: empty ones of a tenant are not known")
        if self.num_owing != sum(segment.owing for segment in segments):
            raise InvariantError("disk segments: those with more than the index has are miscounted")
