"""A segment as a tier knows it: how full it is, and who works on it; and how large the next one is."""

import math
import threading
from dataclasses import dataclass

import numpy as np

from kvtier.tiers.disk.log.format import MAX_PAGES, NO_ENTRIES, PAGE, Entries, SegmentId, footer_pages, head_pages

NO_EPOCH = 2**64 - 1
"""An epoch that is later than any."""
SEGMENTS_AT_LEAST = 16
"""The fewest segments of a tenant that has its fair share; eviction takes away a whole segment at once."""
_SMALL_BYTES = 64 << 10
"""The size in bytes of a segment of one of many tenants, unless the capacity is too small for all of them."""


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
        "owing",
        "removed",
        "retired",
        "sealed",
        "stuck_until_s",
    )

    def __init__(self, segment: SegmentId, num_pages: int) -> None:
        self.id = segment
        self.num_pages = num_pages
        """Disk space of the file."""
        self.next_page = 1
        """The first that nobody has taken."""
        self.num_entries = 0
        """Entries in all extents taken."""
        self.in_flight = 0
        """Extents taken and not yet given back, and seals under way."""
        self.landed: list[Entries] = []
        """What its footer will say; empty once it is sealed."""
        self.num_live = 0
        """Records that the index has here."""
        self.last_forget = 0
        """The largest epoch of a tombstone here; 0 without one."""
        self.min_epoch = NO_EPOCH
        """The smallest epoch of all records in the segment, dead ones included; `NO_EPOCH` without a record."""
        self.retired = False
        """The segment takes no more extents."""
        self.sealed = False
        """The segment has its footer, and never changes again."""
        self.evicting = False
        """Somebody is about to remove it."""
        self.compacted = False
        """It has tombstones and nothing else, in as few pages as can be."""
        self.doomed = False
        """The segment holds what must not come back; the last one to write to it removes it."""
        self.removed: threading.Event | None = None
        """The event that is set when a doomed segment was removed, or could not be. None before and after that."""
        self.owing = False
        """Its file may have records that the index does not, and no tombstone says so: of a write that failed, of a
        drop, or all of them, as it is being removed."""
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

    def may_go(self, now_s: float) -> bool:
        """Whether nobody writes to it, or removes it, or tried to a moment ago."""
        return not self.in_flight and not self.evicting and self.stuck_until_s <= now_s

    def is_unused(self, now_s: float, *, open_too: bool) -> bool:
        """Whether it may go and has no live record.

        :param open_too: even if it takes extents.
        """
        return not self.num_live and self.may_go(now_s) and (self.retired or open_too)

    @property
    def is_stuck(self) -> bool:
        """It could not be removed, up to now."""
        return self.stuck_until_s > -math.inf


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


def segment_pages(wanted_bytes: int, num_entries: int, payload_pages: int) -> int | None:
    """Pages of a new segment that takes this extent at least; None when no segment can."""
    needed = 1 + head_pages(num_entries) + payload_pages + footer_pages(num_entries)
    pages = max(wanted_bytes // PAGE, needed)
    return pages if pages <= MAX_PAGES else None


def share_bytes(capacity_bytes: int, num_tenants: int) -> int:
    """The bytes of a segment where so many tenants share a capacity: all open ones together have a sixteenth of it.

    Or a quarter, before they get so small that hardly more than a block is in each file.
    """
    small = min(_SMALL_BYTES, capacity_bytes // SEGMENTS_AT_LEAST, capacity_bytes // (4 * num_tenants))
    return max(capacity_bytes // (SEGMENTS_AT_LEAST * num_tenants), small) // PAGE * PAGE


def concatenated(landed: list[Entries]) -> Entries:
    """All entries of a segment that is not sealed yet, in one array."""
    return np.concatenate(landed) if landed else NO_ENTRIES
