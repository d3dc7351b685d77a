"""Blocks that may be evicted, in the order in which they go."""

import heapq
from collections import deque

from kvtier.policies.evidence import BUCKET, LAST, OLDEST, BlockClass, Cohort

NO_SLOT = -1


class Segment:
    """Blocks of one class that were last used in one epoch. The owner's lock guards it."""

    __slots__ = ("cohort", "epoch", "first", "in_turns", "known", "last", "level", "serial", "shift")

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
        self.level: int | None = None
        """The level with which the segment stands in the heap; None when it is not in the heap."""
        self.in_turns = False


class Candidates:
    """A list of slots in each segment, and the segments by what their blocks are worth. The owner's lock guards it.

    Slots are numbers from 0 on; the lists' links are columns with an entry for each, as an object for each block would
    cost more time and memory. Every call is O(1), or O(log n) in the number of segments, which is some hundreds.
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        """The segment of each slot; the owner sets it. All fields: guarded by the owner's lock."""
        self.epoch = 0
        """The owner counts it."""
        self._next: list[int] = []
        """The neighbours in the list of the segment, whose first one goes first."""
        self._previous: list[int] = []
        self._turns: deque[Segment] = deque()
        """Segments with candidates, the next to be ranked again first."""
        self._heap: list[tuple[int, int, Segment]] = []
        """Segments in a heap by level and serial; an entry with another level than its segment's is void."""

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
        if last >= 0:
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
        if first >= 0:
            self._previous[first] = slot
        else:
            segment.last = slot
            self._rank(segment)

    def unlist(self, slot: int) -> None:
        before, after = self._previous[slot], self._next[slot]
        segment = self.segments[slot]
        if before >= 0:
            self._next[before] = after
        else:
            segment.first = after
        if after >= 0:
            self._previous[after] = before
        else:
            segment.last = before

    def replace(self, slot: int, other: int) -> None:
        """Another slot of the segment, which is in no list, goes when this one would have gone."""
        segment = self.segments[slot]
        before = self._previous[other] = self._previous[slot]
        after = self._next[other] = self._next[slot]
        if before >= 0:
            self._next[before] = other
        else:
            segment.first = other
        if after >= 0:
            self._previous[after] = other
        else:
            segment.last = other

    def relist(self, slot: int) -> None:
        """Undoes `unlist`, where everything since is undone."""
        before, after = self._previous[slot], self._next[slot]
        segment = self.segments[slot]
        if before >= 0:
            self._next[before] = slot
        else:
            segment.first = slot
        if after >= 0:
            self._previous[after] = slot
        else:
            segment.last = slot

    def coldest(self) -> int:
        """The slot that goes first; `NO_SLOT` where there is none."""
        heap = self._heap
        while heap:
            level, _, segment = heap[0]
            if level == segment.level:
                if segment.first >= 0:
                    return segment.first
                segment.level = None
            heapq.heappop(heap)
        return NO_SLOT

    def levels(self) -> list[tuple[Segment, int | None]]:
        """The segments with candidates, each with its level, for `restore_levels`. O(segments)."""
        return [(segment, segment.level) for segment in self._turns]

    def restore_levels(self, levels: list[tuple[Segment, int | None]]) -> None:
        """Undoes what looking for the coldest has done. O(segments)."""
        for segment, level in levels:
            if segment.level != level:
                self._push(segment, level)

    def rank_some(self, most: int, most_empty: int) -> None:
        """Puts at most so many segments where they belong by now, each in its turn, and drops so many empty ones."""
        turns = self._turns
        for _ in range(min(len(turns), most + most_empty)):
            segment = turns.popleft()
            if segment.first < 0:
                segment.in_turns, segment.level = False, None
                continue
            turns.append(segment)
            self._rank(segment)
            most -= 1
            if not most:
                break
        if len(self._heap) > 2 * len(turns) + 64:
            self._heap = [(s.level, s.serial, s) for s in turns if s.level is not None]
            heapq.heapify(self._heap)

    def _rank(self, segment: Segment) -> None:
        age = self.epoch - segment.epoch
        level = segment.known.levels[BUCKET[age] if age < OLDEST else LAST] + segment.shift
        if level != segment.level:
            self._push(segment, level)
        if not segment.in_turns:
            segment.in_turns = True
            self._turns.append(segment)

    def _push(self, segment: Segment, level: int | None) -> None:
        segment.level = level
        if level is not None:
            heapq.heappush(self._heap, (level, segment.serial, segment))
