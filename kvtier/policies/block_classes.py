"""All classes of blocks that are used alike, the evidence about them, and where blocks that are used now belong."""

from collections import deque
from typing import Any

from kvtier.policies.base import Use
from kvtier.policies.candidates import Segment
from kvtier.policies.evidence import LEVELS_PER_DOUBLING, BlockClass, ClassGroup, Cohort

_LEARN_LEAST = 64
"""Uses between two classes that are learned, at least."""
_PLACES = 3 * 4 * 8
"""Classes for each count of uses: 3 kinds of request, 4 places from its start, 8 from its end."""
UNKNOWN = 3 * _PLACES
"""The class of blocks of which nothing is known: LRU, as a chain could not be told from its blocks otherwise."""
_FROM_START = tuple(8 * min((position + 1).bit_length() >> 1, 3) for position in range(32))
_FROM_END = tuple(max(left.bit_length() - 1, 0) for left in range(256))
NEXT_USE = (*(min(kind // _PLACES + 1, 2) * _PLACES for kind in range(UNKNOWN)), UNKNOWN)
"""The first class of blocks that have one use more, by class."""
_ASSUMED = 20.0
"""What is assumed of a class weighs as much as so many blocks, and one request more: its blocks are used together, so
that many of them tell no more than a few."""
_NEW_LENGTH = 0.01
"""What a request weighs in the mean of lengths."""


class BlockClasses:
    """The classes by their numbers, and the segment of this epoch of each. The owner's lock guards it."""

    def __init__(self) -> None:
        self.epoch = 0
        """The time now. All fields: guarded by the owner's lock."""
        self.gone = Segment(BlockClass(0, ClassGroup([])), Cohort(-1), 0, 0)
        """The segment of blocks that are in no cache."""
        groups: list[ClassGroup] = []
        self._groups = [ClassGroup(groups) for _ in range(4)]
        self._classes: list[BlockClass | None] = [None] * (UNKNOWN + 1)
        self._newest = [self.gone] * (UNKNOWN + 1)
        """The segment that was last used, by class."""
        self._others: dict[tuple[int, int], Segment] = {}
        """All segments of this epoch, by class and shift."""
        self._num_segments = 0
        """Counts them all."""
        self._to_learn: deque[BlockClass] = deque()
        """Every class, the next first."""
        self._mean_length = 0.0
        """The mean over requests, in which later ones weigh more."""

    def begin_epoch(self) -> None:
        self.epoch += 1
        self._others = {}

    def note_length(self, num_blocks: int) -> None:
        """A request of that length begins."""
        self._mean_length += _NEW_LENGTH * (num_blocks - self._mean_length)

    def segment(self, use: Use[Any], uses: int) -> Segment:
        """Returns where a block belongs that is used now.

        :param uses: the first class of blocks with as many uses; -1: it is new.
        """
        _, position, num_blocks, num_hits, priority, nbytes = use
        if num_blocks > 1 or num_hits >= 0:
            left = num_blocks - position
            kind = (
                (uses if 0 <= uses < UNKNOWN else 0)
                + (64 if num_hits * 4 >= 3 * num_blocks else 32 if num_hits > 1 else 0)
                + (_FROM_START[position] if position < 32 else 24)
                + (_FROM_END[left] if 0 <= left < 256 else 7)
            )
        else:
            kind = UNKNOWN if uses < 0 else uses
        segment = self._newest[kind]
        shift = LEVELS_PER_DOUBLING * (priority - nbytes.bit_length()) if priority or nbytes else 0
        if segment.epoch != self.epoch or segment.shift != shift:
            segment = self._newest[kind] = self._segment_of(kind, shift)
        return segment

    def end(self, kind: int, epoch: int, is_hit: bool) -> None:
        """A remembered block that was last used in that epoch is used again, or is forgotten."""
        known = self._classes[kind]
        if known is not None:
            known.end(epoch, self.epoch, is_hit)

    def learn_next(self, num_blocks: int) -> int:
        """One class learns. Returns after how many uses the next one should, in a cache of `num_blocks`. 30 us."""
        self._to_learn[0].learn(self.epoch, _ASSUMED + self._mean_length)
        self._to_learn.rotate(-1)
        return max(num_blocks // len(self._to_learn), _LEARN_LEAST)

    def _segment_of(self, kind: int, shift: int) -> Segment:
        segment = self._others.get((kind, shift))
        if segment is None:
            self._num_segments += 1
            known = self._class_of(kind)
            segment = Segment(known, known.cohort(self.epoch), shift, self._num_segments)
            self._others[kind, shift] = segment
        return segment

    def _class_of(self, kind: int) -> BlockClass:
        known = self._classes[kind]
        if known is None:
            group = self._groups[kind // _PLACES]
            known = self._classes[kind] = BlockClass(kind, group, falls=kind == UNKNOWN)
            known.learn(self.epoch, _ASSUMED + self._mean_length)
            self._to_learn.append(known)
        return known
