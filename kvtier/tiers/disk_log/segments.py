"""Which segments there are, how full they are, and which one goes first. Bookkeeping only."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvtier.errors import InvariantError
from kvtier.keys import TenantId
from kvtier.tiers.disk_log.format import (
    MAX_NUMBER,
    MAX_PAGES,
    NO_ENTRIES,
    PAGE,
    Entries,
    SegmentId,
    footer_pages,
    head_pages,
)
from kvtier.tiers.disk_log.lowest import Lowest

NO_EPOCH = 2**64 - 1
"""Later than any."""


class Segment:
    """A file of the log. Everything but `id` is guarded by the tier's lock."""

    __slots__ = (
        "compacted",
        "doomed",
        "evicting",
        "id",
        "in_flight",
        "landed",
        "last_forget",
        "min_epoch",
        "next_page",
        "num_entries",
        "num_live",
        "num_pages",
        "retired",
        "sealed",
        "stuck_until_s",
        "unlisted",
    )

    def __init__(self, segment: SegmentId, num_pages: int) -> None:
        self.id = segment
        self.num_pages = num_pages
        """Disk space of the file."""
        self.next_page = 1
        """The first that nobody has taken."""
        self.num_entries = 0
        """In all extents taken."""
        self.in_flight = 0
        """Extents taken and not yet given back, and seals under way."""
        self.landed: list[Entries] = []
        """What its footer will say; empty once it is sealed."""
        self.num_live = 0
        """Records that the index has here."""
        self.last_forget = 0
        """The largest epoch of a tombstone here; 0 without one."""
        self.min_epoch = NO_EPOCH
        """Of all records here, dead ones included."""
        self.retired = False
        """Takes no more extents."""
        self.sealed = False
        """Has its footer, and never changes again."""
        self.evicting = False
        """Somebody is about to remove it."""
        self.compacted = False
        """It has tombstones and nothing else, in as few pages as can be."""
        self.doomed = False
        """It holds what must not come back: whoever is the last to write to it removes it."""
        self.unlisted = False
        """Its file may have records that the index does not: it is being removed, or a write to it has failed."""
        self.stuck_until_s = -math.inf
        """It could not be removed a moment ago; until then, others are tried first."""

    @property
    def number(self) -> int:
        return self.id.number

    def takes(self, num_entries: int, payload_pages: int) -> bool:
        """Whether an extent and, later, the footer still fit."""
        needed = head_pages(num_entries) + payload_pages + footer_pages(self.num_entries + num_entries)
        return not self.retired and self.next_page + needed <= self.num_pages

    @property
    def spare_pages(self) -> int:
        """What cutting it would give back."""
        return 0 if self.sealed else self.num_pages - self.next_page - footer_pages(self.num_entries)


@dataclass(frozen=True, slots=True)
class Extent:
    """Pages of a segment that the caller alone writes; the segment stays until they are given back."""

    segment: Segment
    page: int
    head_pages: int
    num_pages: int

    @property
    def payload_page(self) -> int:
        return self.page + self.head_pages


@dataclass(slots=True)
class _OfTenant:
    """Segments of one tenant. At least one."""

    segments: dict[int, Segment] = field(default_factory=dict)
    """By number, oldest first."""
    open: Segment | None = None
    """The one that takes extents."""
    nbytes: int = 0
    num_live: int = 0
    epochs: Lowest = field(default_factory=Lowest)
    """`min_epoch` of those that have records."""
    empty: Lowest = field(default_factory=Lowest)
    """`last_forget` of those that have no live record."""
    num_unlisted: int = 0


class SegmentSet:
    """All segments of a folder. Not thread-safe: the tier's lock guards all of it.

    What is asked under that lock costs the same however many segments a tenant has, but for `__iter__` and `check`.
    """

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._of: dict[TenantId, _OfTenant] = {}
        self._file_bytes = 0
        self._set_aside_bytes = 0
        """For files about to be made, and of files that cannot be read."""
        self._next_number = 1

    @property
    def used_bytes(self) -> int:
        """Disk space of all files, those about to be made included."""
        return self._file_bytes + self._set_aside_bytes

    @property
    def num_tenants(self) -> int:
        return len(self._of)

    def bytes_of(self, tenant: TenantId) -> int:
        return self._of[tenant].nbytes if tenant in self._of else 0

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments.values())

    def __contains__(self, tenant: TenantId) -> bool:
        """Whether the tenant has a segment."""
        return tenant in self._of

    def find(self, number: int) -> Segment | None:
        return self._segments.get(number)

    def num_blocks_of(self, tenant: TenantId) -> int:
        return self._of[tenant].num_live if tenant in self._of else 0

    def is_open(self, segment: Segment) -> bool:
        """Whether it takes extents."""
        return self._of[segment.id.tenant].open is segment

    def end_of(self, tenant: TenantId) -> tuple[int, int]:
        """Number and page before which lies all of the tenant that has a place by now."""
        of = self._of.get(tenant)
        return (of.open.number, of.open.next_page) if of is not None and of.open is not None else (self._next_number, 0)

    def next_number(self) -> int:
        """For a new segment. Never given again."""
        number = self._next_number
        if number > MAX_NUMBER:
            raise OSError(f"segment numbers are used up at {MAX_NUMBER}: empty the folder")
        self._next_number += 1
        return number

    def not_before(self, number: int) -> None:
        """Numbers up to this one are taken."""
        self._next_number = max(self._next_number, number + 1)

    def set_aside(self, nbytes: int) -> None:
        """Counts disk space from before a file is made, so that the sum is never less than what is there."""
        self._set_aside_bytes += nbytes

    def add(self, segment: Segment, *, from_aside: bool) -> None:
        """A file that is there. A new one, whose space was set aside, takes extents from now on, unless retired."""
        nbytes = segment.num_pages * PAGE
        of = self._of.setdefault(segment.id.tenant, _OfTenant())
        self._segments[segment.number] = of.segments[segment.number] = segment
        of.nbytes += nbytes
        of.num_live += segment.num_live
        self._file_bytes += nbytes
        self._note(of, segment)
        if from_aside:
            self._set_aside_bytes -= nbytes
            if not segment.retired:
                of.open = segment

    def take(self, tenant: TenantId, num_entries: int, payload_pages: int, epoch: int) -> Extent | None:
        """Room for a head and payloads in the tenant's open segment; None when it has none.

        :param epoch: the smallest that a record in it has.
        """
        of = self._of.get(tenant)
        segment = of.open if of is not None else None
        if segment is None or segment.evicting or not segment.takes(num_entries, payload_pages):
            return None
        return self.extend(segment, num_entries, payload_pages, epoch)

    def extend(self, segment: Segment, num_entries: int, payload_pages: int, epoch: int) -> Extent:
        """`take`, of a certain segment that has room."""
        head = head_pages(num_entries)
        extent = Extent(segment, segment.next_page, head, head + payload_pages)
        segment.next_page += extent.num_pages
        segment.num_entries += num_entries
        segment.in_flight += 1
        segment.min_epoch = min(segment.min_epoch, epoch)
        self._note(self._of[segment.id.tenant], segment)
        return extent

    def count(self, segment: Segment, change: int) -> None:
        """So many records more are found in it."""
        of = self._of[segment.id.tenant]
        segment.num_live += change
        of.num_live += change
        self._note(of, segment)

    def note_forget(self, segment: Segment, epoch: int) -> None:
        """A tombstone of this epoch is in it."""
        segment.last_forget = max(segment.last_forget, epoch)
        self._note(self._of[segment.id.tenant], segment)

    def first_epoch(self, tenant: TenantId, but: Segment | None = None) -> tuple[int, int]:
        """The smallest of any record of the tenant, dead ones included, and the segment's number; not in `but`."""
        of = self._of.get(tenant)
        found = of.epochs.first(lambda number: but is not None and number == but.number) if of is not None else None
        return found if found is not None else (NO_EPOCH, 0)

    def first_empty(self, tenant: TenantId, *, open_too: bool) -> Segment | None:
        """Of those without a live record that nobody writes to or removes: the one whose tombstones are the oldest.

        :param open_too: the one that takes extents counts.
        """
        of = self._of.get(tenant)
        found = (
            of.empty.first(lambda number: not self.is_unused(of.segments[number], open_too=open_too)) if of else None
        )
        return self._segments[found[1]] if found is not None else None

    @staticmethod
    def is_unused(segment: Segment, *, open_too: bool) -> bool:
        """Whether it has no live record, and nobody writes to it, or removes it, or tried to in vain."""
        busy = segment.num_live or segment.in_flight or segment.evicting or segment.stuck_until_s > -math.inf
        return not busy and (segment.retired or open_too)

    def retire(self, tenant: TenantId) -> Segment | None:
        """The tenant's open segment takes no more; None when there was none."""
        of = self._of.get(tenant)
        segment = of.open if of is not None else None
        if of is not None and segment is not None:
            segment.retired, of.open = True, None
        return segment

    def shrink(self, segment: Segment, num_pages: int) -> None:
        """Its file was cut."""
        nbytes = (segment.num_pages - num_pages) * PAGE
        self._of[segment.id.tenant].nbytes -= nbytes
        self._file_bytes -= nbytes
        segment.num_pages = num_pages

    def victim(self, now_s: float) -> Segment | None:
        """The oldest segment that may go and has more than tombstones, of the tenant that has most."""
        for of in sorted(self._of.values(), key=lambda of: -of.nbytes):
            for segment in of.segments.values():
                busy = segment.in_flight or segment.evicting or segment.compacted
                if not busy and segment.stuck_until_s <= now_s:
                    return segment
        return None

    def has_unlisted(self, tenant: TenantId) -> bool:
        """Whether there may be records of the tenant on disk that the index does not have."""
        return tenant in self._of and self._of[tenant].num_unlisted > 0

    def set_unlisted(self, segment: Segment, unlisted: bool) -> None:
        """Whether its file may have records that the index does not."""
        self._of[segment.id.tenant].num_unlisted += unlisted - segment.unlisted
        segment.unlisted = unlisted

    def sealed(self, segment: Segment, num_pages: int) -> None:
        """Its footer says what it has, and its file is cut behind that."""
        self.shrink(segment, num_pages)
        segment.next_page, segment.sealed, segment.landed = num_pages, True, []
        self.set_unlisted(segment, unlisted=False)

    def mark(self, segment: Segment) -> Segment:
        """The caller is about to remove it."""
        segment.evicting = True
        self.set_unlisted(segment, unlisted=True)
        if self.is_open(segment):
            self.retire(segment.id.tenant)
        return segment

    def stuck(self, segment: Segment, until_s: float) -> None:
        """It could not be removed."""
        segment.evicting, segment.stuck_until_s = False, until_s

    def compacted(self, segment: Segment, num_pages: int, num_entries: int) -> None:
        """A segment that was to be removed has nothing but tombstones now, and so many pages."""
        of = self._of[segment.id.tenant]
        self.sealed(segment, num_pages)
        of.epochs.drop(segment.number)
        segment.num_entries, segment.min_epoch, segment.compacted = num_entries, NO_EPOCH, True
        segment.evicting, segment.stuck_until_s = False, -math.inf

    def gone(self, segment: Segment) -> None:
        """Its file is no longer there."""
        of = self._of[segment.id.tenant]
        of.nbytes -= segment.num_pages * PAGE
        self._file_bytes -= segment.num_pages * PAGE
        self.set_unlisted(segment, unlisted=False)
        del self._segments[segment.number], of.segments[segment.number]
        of.epochs.drop(segment.number)
        of.empty.drop(segment.number)
        if not of.segments:
            del self._of[segment.id.tenant]

    def check(self, num_records: int) -> None:
        """Raises `InvariantError` when the books do not add up."""
        if sum(segment.num_live for segment in self) != num_records:
            raise InvariantError(f"disk segments: live records are miscounted, the index has {num_records}")
        if self._file_bytes != sum(segment.num_pages for segment in self) * PAGE:
            raise InvariantError("disk segments: their bytes are miscounted")
        for segment in self:
            if segment.next_page > segment.num_pages or segment.num_live < 0 or segment.in_flight < 0:
                raise InvariantError(f"disk segment {segment.number}: {segment.next_page} of {segment.num_pages} pages")
        for of in self._of.values():
            self._check(of)

    @staticmethod
    def _check(of: _OfTenant) -> None:
        segments = of.segments.values()
        if of.open is not None and of.open.retired:
            raise InvariantError("disk segments: a retired one takes extents")
        sums = sum(segment.num_live for segment in segments), sum(segment.num_pages for segment in segments) * PAGE
        if sums != (of.num_live, of.nbytes):
            raise InvariantError("disk segments: those of a tenant are miscounted")
        first = min((segment.min_epoch for segment in segments), default=NO_EPOCH)
        known = of.epochs.first()
        if (known[0] if known is not None else NO_EPOCH) != first or len(of.empty) != sum(
            not s.num_live for s in segments
        ):
            raise InvariantError("disk segments: epochs or empty ones of a tenant are not known")
        if of.num_unlisted != sum(segment.unlisted for segment in segments):
            raise InvariantError("disk segments: those with more than the index has are miscounted")

    @staticmethod
    def _note(of: _OfTenant, segment: Segment) -> None:
        """Keeps what is known of all segments of a tenant up to date."""
        if segment.min_epoch != NO_EPOCH:
            of.epochs.put(segment.number, segment.min_epoch)
        if segment.num_live:
            of.empty.drop(segment.number)
        else:
            of.empty.put(segment.number, segment.last_forget)


def segment_pages(wanted_bytes: int, num_entries: int, payload_pages: int) -> int | None:
    """Pages of a new segment that takes this extent at least; None when no segment can."""
    needed = 1 + head_pages(num_entries) + payload_pages + footer_pages(num_entries)
    pages = max(wanted_bytes // PAGE, needed)
    return pages if pages <= MAX_PAGES else None


def concatenated(landed: list[Entries]) -> Entries:
    """All entries of a segment that is not sealed yet, in one array."""
    return np.concatenate(landed) if landed else NO_ENTRIES
