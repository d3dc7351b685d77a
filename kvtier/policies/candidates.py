"""Blocks that may be evicted, in the order in which they go."""

import heapq
from collections import deque

from kvtier.policies.evidence import BUCKET, LAST, OLDEST, BlockClass, Cohort
from kvtier.policies.use_order import NO_SLOT, length_at_first

NO_ENTRY = -1 << 200
_SERIAL_BITS = 48
_SERIAL = (1 << _SERIAL_BITS) - 1


class Segment:
    """Blocks of one class that were last used in one epoch. The owner's lock guards it."""

    __slots__ = ("cohort", "entry", "epoch", "first", "known", "last", "serial", "shift")

    def __init__(self, known: BlockClass, cohort: Cohort, shift: int, serial: int) -> None:
        self.known = known
        self.cohort = cohort
        self.epoch = cohort.epoch
        self.shift = shift
        """What priority and size add to the level."""
        self.serial = serial
        """The rank by age among segments of one level: the older one, with the smaller number, goes first."""
        self.first = self.last = NO_SLOT
        """Its candidates for eviction: the ends of a list."""
        self.entry = NO_ENTRY
        """What the segment stands in the heap with; `NO_ENTRY` when it is not in the heap."""


class Candidates:
    """A list of slots in each segment, and the segments by what their blocks are worth. The owner's lock guards it.

    Slots are numbers from 0 on; the lists' links are columns with an entry for each, as an object for each block would
    cost more time and memory. Every call is O(1), or O(log n) in the number of segments, which is some hundreds.
    """

    def __init__(self, gone: Segment) -> None:
        """:param gone: the segment of slots without a block."""
        self.segments = [gone] * length_at_first(6)
        """The segment of each slot; the owner sets it. All fields: guarded by the owner's lock."""
        self.epoch = 0
        """The owner counts it."""
        self._next = [NO_SLOT] * length_at_first(7)
        """The neighbours in the list of the segment, whose first one goes first."""
        self._previous = [NO_SLOT] * length_at_first(8)
        self._turns: deque[Segment] = deque()
        """Segments with candidates, the next to be ranked again first."""
        self._heap: list[int] = []
        """Segments in a heap by level and serial, both in one number: the garbage collector passes over numbers.
        An entry that is not its segment's is void."""
        self.top: Segment | None = None
        """The segment with the blocks that go first, while it has any; None: it has to be looked for."""
        self._by_serial: dict[int, Segment] = {}
        """The segments that have turns."""

    def add_slot(self, segment: Segment) -> None:
        self.segments.append(segment)
        self._next.append(NO_SLOT)
        self._previous.append(NO_SLOT)

    def list_last(self, slot: int) -> None:
        """It goes after all others of its segment."""
        segment = self.segments[slot]
        last = segment.last
        self._previous[slot] = last
        self._next[slot] = NO_SLOT
        segment.last = slot
        if last:
            self._next[last] = slot
        else:
            segment.first = slot
            self._rank(segment)

    def list_first(self, slot: int) -> None:
        """It goes before all others of its segment."""
        segment = self.segments[slot]
        first = segment.first
        self._previous[slot] = NO_SLOT
        self._next[slot] = first
        segment.first = slot
        if first:
            self._previous[first] = slot
        else:
            segment.last = slot
            self._rank(segment)

    def unlist(self, slot: int) -> None:
        before, after = self._previous[slot], self._next[slot]
        segment = self.segments[slot]
        if before:
            self._next[before] = after
        else:
            segment.first = after
        if after:
            self._previous[after] = before
        else:
            segment.last = before

    def replace(self, slot: int, other: int) -> None:
        """Another slot of the segment, which is in no list, goes when this one would have gone."""
        segment = self.segments[slot]
        before = self._previous[other] = self._previous[slot]
        after = self._next[other] = self._next[slot]
        if before:
            self._next[before] = other
        else:
            segment.first = other
        if after:
            self._previous[after] = other
        else:
            segment.last = other

    def relist(self, slot: int) -> None:
        """Undoes `unlist`, where everything since is undone."""
        before, after = self._previous[slot], self._next[slot]
        segment = self.segments[slot]
        if before:
            self._next[before] = slot
        else:
            segment.first = slot
        if after:
            self._previous[after] = slot
        else:
            segment.last = slot

    def coldest(self) -> int:
        """The slot that goes first; `NO_SLOT` where there is none."""
        heap = self._heap
        while heap:
            entry = heap[0]
            segment = self._by_serial.get(entry & _SERIAL)
            if segment is not None and entry == segment.entry:
                if segment.first:
                    self.top = segment
                    return segment.first
                segment.entry = NO_ENTRY
            heapq.heappop(heap)
        return NO_SLOT

    def levels(self) -> list[tuple[Segment, int]]:
        """The segments with candidates, each with its entry, for `restore_levels`. O(segments)."""
        return [(segment, segment.entry) for segment in self._turns]

    def restore_levels(self, levels: list[tuple[Segment, int]]) -> None:
        """Undoes what looking for the coldest has done. O(segments)."""
        for segment, entry in levels:
            if segment.entry != entry:
                self._push(segment, entry)

    def rank_some(self, most: int, most_empty: int) -> None:
        """Puts at most so many segments where they belong by now, each in its turn, and drops so many empty ones."""
        turns = self._turns
        for _ in range(min(len(turns), most + most_empty)):
            segment = turns.popleft()
            if not segment.first:
                segment.entry = NO_ENTRY
                del self._by_serial[segment.serial]
                continue
            turns.append(segment)
            self._rank(segment)
            most -= 1
            if not most:
                break
        if len(self._heap) > 2 * len(turns) + 64:
            self._heap[:] = [segment.entry for segment in turns if segment.entry != NO_ENTRY]
            heapq.heapify(self._heap)

    def _rank(self, segment: Segment) -> None:
        age = self.epoch - segment.epoch
        level = segment.known.levels[BUCKET[age] if age < OLDEST else LAST] + segment.shift
        entry = level << _SERIAL_BITS | segment.serial
        if entry != segment.entry:
            self._push(segment, entry)
        if segment.serial not in self._by_serial:
            self._by_serial[segment.serial] = segment
            self._turns.append(segment)

    def _push(self, segment: Segment, entry: int) -> None:
        self.top = None
        segment.entry = entry
        if entry != NO_ENTRY:
            heapq.heappush(self._heap, entry)
