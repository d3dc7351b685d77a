"""Which segments there are, how full they are, and which one goes first. Bookkeeping only."""

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass

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

NO_EPOCH = 2**64 - 1
"""Later than any."""


class Segment:
    """A file of the log. Everything but `id` is guarded by the tier's lock."""

    __slots__ = (
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

    @property
    def number(self) -> int:
        return self.id.number

    def takes(self, num_entries: int, payload_pages: int) -> bool:
        """Whether an extent and, later, the footer still fit."""
        needed = head_pages(num_entries) + payload_pages + footer_pages(self.num_entries + num_entries)
        return not self.retired and self.next_page + needed <= self.num_pages


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


class SegmentSet:
    """All segments of a folder. Not thread-safe: the tier's lock guards all of it."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._of: dict[TenantId, dict[int, Segment]] = {}
        """By tenant and number, oldest first. No tenant without a segment."""
        self._open: dict[TenantId, Segment] = {}
        """The one that takes extents."""
        self._bytes_of: Counter[TenantId] = Counter()
        self._set_aside_bytes = 0
        """For files about to be made."""
        self._next_number = 1

    @property
    def used_bytes(self) -> int:
        """Disk space of all files, those about to be made included."""
        return self._bytes_of.total() + self._set_aside_bytes

    def bytes_of(self, tenant: TenantId) -> int:
        return self._bytes_of[tenant]

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments.values())

    def find(self, number: int) -> Segment | None:
        return self._segments.get(number)

    def of(self, tenant: TenantId) -> list[Segment]:
        """Oldest first."""
        return list(self._of.get(tenant, {}).values())

    def num_blocks_of(self, tenant: TenantId) -> int:
        return sum(segment.num_live for segment in self._of.get(tenant, {}).values())

    def next_number(self) -> int:
        """For a new segment. Never given again."""
        number = self._next_number
        if number > MAX_NUMBER:
            raise OSError(f"segment numbers are used up at {MAX_NUMBER}: empty the folder")
        self._next_number += 1
        return number

    def not_before(self, number: int) -> None:
        """Numbers up to this one are taken, by segments or by other files."""
        self._next_number = max(self._next_number, number + 1)

    def set_aside(self, nbytes: int) -> None:
        """Counts disk space from before a file is made, so that the sum is never less than what is there."""
        self._set_aside_bytes += nbytes

    def add(self, segment: Segment, *, from_aside: bool) -> None:
        """A file that is there. A new one, whose space was set aside, takes extents from now on."""
        nbytes = segment.num_pages * PAGE
        self._segments[segment.number] = segment
        self._of.setdefault(segment.id.tenant, {})[segment.number] = segment
        self._bytes_of[segment.id.tenant] += nbytes
        if from_aside:
            self._set_aside_bytes -= nbytes
            self._open[segment.id.tenant] = segment

    def take(self, tenant: TenantId, num_entries: int, payload_pages: int, epoch: int) -> Extent | None:
        """Room for a head and payloads in the tenant's open segment; None when it has none.

        :param epoch: the smallest that a record in it has.
        """
        segment = self._open.get(tenant)
        if segment is None or segment.evicting or not segment.takes(num_entries, payload_pages):
            return None
        head = head_pages(num_entries)
        extent = Extent(segment, segment.next_page, head, head + payload_pages)
        segment.next_page += extent.num_pages
        segment.num_entries += num_entries
        segment.in_flight += 1
        segment.min_epoch = min(segment.min_epoch, epoch)
        return extent

    def retire(self, tenant: TenantId) -> Segment | None:
        """The tenant's open segment takes no more; None when there was none."""
        segment = self._open.pop(tenant, None)
        if segment is not None:
            segment.retired = True
        return segment

    def shrink(self, segment: Segment, num_pages: int) -> None:
        """Its file was cut."""
        self._bytes_of[segment.id.tenant] -= (segment.num_pages - num_pages) * PAGE
        segment.num_pages = num_pages

    def victim(self, tried: Container[int] = ()) -> Segment | None:
        """The oldest segment that may go, of the tenant that has most; marked, so that nobody else gets it.

        :param tried: numbers of those that could not be removed a moment ago.
        """
        for tenant, _ in self._bytes_of.most_common():
            for segment in self._of.get(tenant, {}).values():
                if not segment.in_flight and not segment.evicting and segment.number not in tried:
                    return self.mark(segment)
        return None

    def mark(self, segment: Segment) -> Segment:
        """The caller is about to remove it."""
        segment.evicting = True
        if self._open.get(segment.id.tenant) is segment:
            self.retire(segment.id.tenant)
        return segment

    def gone(self, segment: Segment) -> None:
        """Its file is no longer there."""
        tenant = segment.id.tenant
        del self._segments[segment.number]
        del self._of[tenant][segment.number]
        self._bytes_of[tenant] -= segment.num_pages * PAGE
        if not self._of[tenant]:
            del self._of[tenant], self._bytes_of[tenant]

    def check(self, num_records: int) -> None:
        """Raises `InvariantError` when the books do not add up."""
        if sum(segment.num_live for segment in self) != num_records:
            raise InvariantError(f"disk segments: live records are miscounted, the index has {num_records}")
        if self._bytes_of.total() != sum(segment.num_pages for segment in self) * PAGE:
            raise InvariantError("disk segments: their bytes are miscounted")
        for segment in self:
            if segment.next_page > segment.num_pages or segment.num_live < 0 or segment.in_flight < 0:
                raise InvariantError(f"disk segment {segment.number}: {segment.next_page} of {segment.num_pages} pages")
        if any(segment.retired for segment in self._open.values()):
            raise InvariantError("disk segments: a retired one takes extents")


def segment_pages(wanted_bytes: int, num_entries: int, payload_pages: int) -> int | None:
    """Pages of a new segment that takes this extent at least; None when no segment can."""
    needed = 1 + head_pages(num_entries) + payload_pages + footer_pages(num_entries)
    pages = max(wanted_bytes // PAGE, needed)
    return pages if pages <= MAX_PAGES else None


def concatenated(landed: list[Entries]) -> Entries:
    """All entries of a segment that is not sealed yet, in one array."""
    return np.concatenate(landed) if landed else NO_ENTRIES
