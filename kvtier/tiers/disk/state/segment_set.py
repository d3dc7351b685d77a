"""Which segments there are, who has how many, and which one goes first. Bookkeeping only."""

import math
import threading
from collections.abc import Iterator, Mapping

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import InvariantError
from kvtier.identity.keys import TenantId
from kvtier.tiers.common.shares import Share
from kvtier.tiers.disk.log.format import MAX_NUMBER, PAGE, head_pages
from kvtier.tiers.disk.log.segments import NO_EPOCH, SEGMENTS_AT_LEAST, Extent, Segment, share_bytes
from kvtier.tiers.disk.state.lowest import Lowest
from kvtier.tiers.disk.state.tenant_segments import TenantSegments
from kvtier.tiers.disk.state.tenant_shares import TenantShares

_STUCK_S = 30.0
"""A segment that could not be removed is left alone for so long."""


class SegmentSet:
    """All segments of a folder. Not thread-safe: the tier's lock guards all of it.

    What is asked under that lock costs the same however many tenants and segments there are, but for `__iter__`,
    `above_caps` and `check`.
    """

    def __init__(self, clock: Clock = MONOTONIC) -> None:
        self._clock = clock
        self._segments: dict[int, Segment] = {}
        self._of: dict[TenantId, TenantSegments] = {}
        self._owed = TenantShares()
        self._roomiest: Lowest[int] = Lowest()
        """`spare_pages` of open segments, negative."""
        self._file_bytes = 0
        self._set_aside_bytes = 0
        """Disk space of files that are about to be made, and of files that cannot be read."""
        self._next_number = 1

    @property
    def used_bytes(self) -> int:
        """Disk space of all files, those about to be made included."""
        return self._file_bytes + self._set_aside_bytes

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

    def set_shares(self, shares: Mapping[TenantId, Share], capacity_bytes: int) -> None:
        """Gives tenants these shares from now on, and all others equal ones.

        Raises `InvalidInputError`, and changes nothing, when more would be guaranteed than there is.
        """
        self._owed.set(shares, capacity_bytes)

    def taken_bytes_of(self, tenant: TenantId) -> int:
        """Disk space of all pages that were taken: what is preallocated and not yet used is not the tenant's."""
        return self._of[tenant].num_pages * PAGE if tenant in self._of else 0

    def spare_bytes_of(self, tenant: TenantId) -> int:
        """What the tenant's open segment may still take."""
        of = self._of.get(tenant)
        return of.open.spare_pages * PAGE if of is not None and of.open is not None else 0

    def most_bytes_of(self, tenant: TenantId) -> float:
        """What the tenant may have; infinite without a cap."""
        return self._owed.most_bytes_of(tenant)

    def exceeds_cap(self, tenant: TenantId, nbytes: int) -> bool:
        """Whether so many bytes are more than the tenant may have beside what it has."""
        return self.taken_bytes_of(tenant) + nbytes > self.most_bytes_of(tenant)

    def above_caps(self) -> list[TenantId]:
        """The tenants that have more than they may have. O(tenants)."""
        return [tenant for tenant in self._of if self.exceeds_cap(tenant, 0)]

    def next_number(self) -> int:
        """A number for a new segment, never given again. `OSError` when numbers are used up."""
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
        of = self._of.setdefault(segment.id.tenant, TenantSegments())
        self._segments[segment.number] = of.segments[segment.number] = segment
        of.nbytes += nbytes
        of.num_live += segment.num_live
        self._file_bytes += nbytes
        self._took(segment, segment.next_page)
        of.note(segment)
        if from_aside:
            self._set_aside_bytes -= nbytes
            if not segment.retired:
                of.open = segment
                self._roomiest.put(segment.number, -segment.spare_pages)

    def take(self, tenant: TenantId, num_entries: int, payload_pages: int, epoch: int) -> Extent | None:
        """Room for a head and payloads in the tenant's open segment; None when it has none, or no payloads may come to
        what the tenant has: its cap was lowered.

        :param epoch: the smallest that a record in it has.
        """
        of = self._of.get(tenant)
        segment = of.open if of is not None else None
        if segment is None or segment.evicting or not segment.takes(num_entries, payload_pages):
            return None
        if payload_pages and self.exceeds_cap(tenant, (head_pages(num_entries) + payload_pages) * PAGE):
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
        self._took(segment, extent.num_pages)
        self._of[segment.id.tenant].note(segment)
        if self.is_open(segment):
            self._roomiest.put(segment.number, -segment.spare_pages)
        return extent

    def count(self, segment: Segment, change: int) -> None:
        """The index has `change` more records in the segment, or fewer if it is negative."""
        of = self._of[segment.id.tenant]
        segment.num_live += change
        of.num_live += change
        of.note(segment)

    def note_forget(self, segment: Segment, epoch: int) -> None:
        """A tombstone of this epoch is in it."""
        segment.last_forget = max(segment.last_forget, epoch)
        self._of[segment.id.tenant].note(segment)

    def first_epoch(self, tenant: TenantId, but: Segment | None = None) -> tuple[int, int]:
        """The smallest of any record of the tenant, dead ones included, and the segment's number; not in `but`."""
        of = self._of.get(tenant)
        found = of.first_epoch(but) if of is not None else None
        return found if found is not None else (NO_EPOCH, 0)

    def first_empty(self, tenant: TenantId, *, open_too: bool) -> Segment | None:
        """The tenant's segment with the oldest tombstones among those without a live record that nobody writes to or
        removes.

        :param open_too: the one that takes extents counts.
        """
        of = self._of.get(tenant)
        return of.first_empty(self._clock(), open_too=open_too) if of is not None else None

    def is_unused(self, segment: Segment, *, open_too: bool) -> bool:
        """Whether it has no live record, and nobody writes to it, or removes it, or tried to a moment ago."""
        return segment.is_unused(self._clock(), open_too=open_too)

    def retire(self, tenant: TenantId) -> Segment | None:
        """The tenant's open segment takes no more; None when there was none."""
        of = self._of.get(tenant)
        segment = of.open if of is not None else None
        if of is not None and segment is not None:
            segment.retired, of.open = True, None
            self._roomiest.drop(segment.number)
        return segment

    def shrink(self, segment: Segment, num_pages: int) -> None:
        """The segment's file was cut to `num_pages`, behind the last page that counts."""
        nbytes = (segment.num_pages - num_pages) * PAGE
        self._of[segment.id.tenant].nbytes -= nbytes
        self._file_bytes -= nbytes
        self._took(segment, num_pages - segment.next_page)
        segment.next_page = segment.num_pages = num_pages

    def wanted_bytes(self, tenant: TenantId, capacity_bytes: int) -> int:
        """Size of the tenant's next segment: its part of a fair share, or as large a part of what it has if that is
        more; and of what it may have at the most."""
        of = self._of.get(tenant)
        num_pages = of.num_pages // SEGMENTS_AT_LEAST if of is not None else 0
        wanted = max(share_bytes(capacity_bytes, len(self._of) + (of is None)), num_pages * PAGE)
        return int(min(wanted, self.most_bytes_of(tenant) / SEGMENTS_AT_LEAST))

    def roomiest(self, capacity_bytes: int) -> Segment | None:
        """An open segment that has more room left than its tenant would get anew, and that nobody writes to."""

        def is_fair(number: int) -> bool:
            segment = self._segments[number]
            spare_bytes = segment.spare_pages * PAGE
            return segment.in_flight > 0 or spare_bytes <= self.wanted_bytes(segment.id.tenant, capacity_bytes)

        # Segments with more room than a fair share are few: their tenants came when there were fewer, or have more.
        least = share_bytes(capacity_bytes, max(1, len(self._of))) // PAGE
        found = self._roomiest.first(is_fair, below=-least)
        return self._segments[found[1]] if found is not None else None

    def victim(self, borrower: TenantId | None = None) -> Segment | None:
        """The oldest segment that may go and has more than tombstones, of the tenant that is furthest above what is
        guaranteed to it; None when nobody has to give one.

        :param borrower: who wants the room. Others give only what is above their guarantees, and not when they have
            less beyond it than the borrower. None: nobody does, all have to give.
        """
        now_s = self._clock()

        def keeps(tenant: TenantId) -> bool:
            segment = self._of[tenant].oldest(now_s)
            if segment is None or borrower is None or borrower == tenant:
                return segment is None
            left_bytes = self.taken_bytes_of(tenant) - segment.next_page * PAGE
            return not self._owed.gives(tenant, left_bytes, borrower)

        found = self._owed.furthest_above(keeps)
        return self._of[found].oldest(now_s) if found is not None else None

    def own_victim(self, tenant: TenantId) -> Segment | None:
        """The tenant's oldest segment that may go and has more than tombstones."""
        return self._of[tenant].oldest(self._clock()) if tenant in self._of else None

    def owes(self, tenant: TenantId) -> bool:
        """Whether there may be records of the tenant on disk that the index does not have."""
        return tenant in self._of and self._of[tenant].num_owing > 0

    def owe(self, segment: Segment) -> None:
        """The segment's file may have records that the index does not: discarding them later takes a tombstone."""
        self._set_owing(segment, owing=True)

    def sealed(self, segment: Segment, num_pages: int) -> None:
        """The segment's footer says what it has, and its file is cut behind that."""
        self.shrink(segment, num_pages)
        segment.sealed, segment.landed = True, []

    def unsure_of(self, tenant: TenantId) -> list[int]:
        """Numbers of the tenant's segments that may have records that the index does not: some are being written."""
        of = self._of.get(tenant)
        return [s.number for s in of.segments.values() if s.owing or s.in_flight] if of is not None else []

    def doom(self, segment: Segment) -> threading.Event:
        """It is to be removed by those who write to it or evict it; set when that was tried."""
        segment.doomed = True
        segment.removed = segment.removed or threading.Event()
        self.owe(segment)
        if self.is_open(segment):
            self.retire(segment.id.tenant)
        return segment.removed

    def mark(self, segment: Segment) -> Segment:
        """The caller is about to remove it."""
        segment.evicting = True
        self.owe(segment)
        if self.is_open(segment):
            self.retire(segment.id.tenant)
        return segment

    def stuck(self, segment: Segment) -> None:
        """It could not be removed."""
        segment.evicting, segment.compacted, segment.stuck_until_s = False, False, self._clock() + _STUCK_S
        self._tell(segment)

    def emptied(self, segment: Segment) -> None:
        """Its file has nothing in it, and could not be unlinked. It counts a page: there is to be an end to them."""
        segment.last_forget = 0
        self.compacted(segment, 1, 0)
        segment.stuck_until_s = self._clock() + _STUCK_S

    def compacted(self, segment: Segment, num_pages: int, num_entries: int) -> None:
        """A segment that was to be removed has nothing but tombstones now, and so many pages."""
        of = self._of[segment.id.tenant]
        segment.doomed = False
        self._set_owing(segment, owing=False)
        self.sealed(segment, num_pages)
        of.epochs.drop(segment.number)
        segment.num_entries, segment.min_epoch, segment.compacted = num_entries, NO_EPOCH, True
        segment.evicting, segment.stuck_until_s = False, -math.inf
        of.note(segment)
        self._tell(segment)

    def gone(self, segment: Segment) -> None:
        """The segment's file is no longer there."""
        of = self._of[segment.id.tenant]
        of.nbytes -= segment.num_pages * PAGE
        self._file_bytes -= segment.num_pages * PAGE
        self._took(segment, -segment.next_page)
        self._set_owing(segment, owing=False)
        del self._segments[segment.number]
        of.drop(segment)
        self._tell(segment)
        if not of.segments:
            del self._of[segment.id.tenant]
            self._owed.drop(segment.id.tenant)

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
            of.check()
        opened = [of.open for of in self._of.values() if of.open is not None]
        spare = self._roomiest.first()
        if -(spare[0] if spare is not None else 0) != max((segment.spare_pages for segment in opened), default=0):
            raise InvariantError("disk segments: it is not known which one has most room")
        self._owed.check({tenant: of.num_pages * PAGE for tenant, of in self._of.items()})

    def _set_owing(self, segment: Segment, owing: bool) -> None:
        self._of[segment.id.tenant].num_owing += owing - segment.owing
        segment.owing = owing

    def _took(self, segment: Segment, num_pages: int) -> None:
        """Counts `num_pages` more as taken of the share of the segment's tenant."""
        of = self._of[segment.id.tenant]
        of.num_pages += num_pages
        self._owed.weigh(segment.id.tenant, of.num_pages * PAGE)

    @staticmethod
    def _tell(segment: Segment) -> None:
        """Wakes the threads that wait for the segment to go."""
        if segment.removed is not None:
            segment.removed.set()
            segment.removed = None
