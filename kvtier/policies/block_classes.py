"""All classes of blocks that are used alike, the evidence about them, and where blocks that are used now belong."""

from collections import deque

from kvtier.policies.candidates import Segment
from kvtier.policies.evidence import BUCKET, LAST, LEVELS_PER_DOUBLING, OLDEST, BlockClass, ClassGroup, Cohort

_LEARN_LEAST = 64
"""Uses between two classes that are learned, at least."""
_PLACES = 3 * 4 * 8
"""Classes for each count of uses: 3 kinds of request, 4 places from its start, 8 from its end."""
UNKNOWN = 3 * _PLACES
"""The class of blocks of which nothing is known: LRU, as a chain could not be told from its blocks otherwise."""
_FROM_START: tuple[int, ...] = tuple(8 * min((position + 1).bit_length() >> 1, 3) for position in range(32))
_FROM_END: tuple[int, ...] = tuple(max(left.bit_length() - 1, 0) for left in range(256))
NEXT_USE = (*(min(kind // _PLACES + 1, 2) * _PLACES for kind in range(UNKNOWN)), UNKNOWN)
"""The first class of blocks that have one use more, by class."""
NEW = UNKNOWN + 1
"""Instead of the first class of blocks with as many uses: there was none."""
_FIRST: tuple[int, ...] = (*range(UNKNOWN), 0, 0)
"""The first class of blocks with as many uses, by what `NEXT_USE` has, or `NEW`."""
_ASSUMED = 20.0
"""What is assumed of a class weighs as much as so many blocks, and one request more: its blocks are used together, so
that many of them tell no more than a few."""
_NEW_LENGTH = 0.01
"""What a request weighs in the mean of lengths."""


def kind_of(uses: int, position: int, num_blocks: int, num_hits: int) -> int:
    """The class of a block that is used now, of which a `Use` says the rest.

    :param uses: the first class of blocks with as many uses, or `NEW`.
    """
    if num_blocks < 2 and num_hits < 0:
        return UNKNOWN if uses == NEW else uses
    left = num_blocks - position
    return (
        _FIRST[uses]
        + (64 if num_hits * 4 >= 3 * num_blocks else 32 if num_hits > 1 else 0)
        + (_FROM_START[position] if position < 32 else 24)
        + (_FROM_END[left] if 0 <= left < 256 else 7)
    )


def shift_of(priority: int, nbytes: int) -> int:
    """What priority and size of a block add to its level."""
    return LEVELS_PER_DOUBLING * (priority - nbytes.bit_length())


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
        self.newest = [self.gone] * (UNKNOWN + 1)
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

    def segment(self, kind: int, shift: int) -> Segment:
        """The segment of this epoch for blocks of that class and shift. It is the newest of the class then."""
        segment = self._others.get((kind, shift))
        if segment is None:
            self._num_segments += 1
            known = self._class_of(kind)
            segment = Segment(known, known.cohort(self.epoch), shift, self._num_segments)
            self._others[kind, shift] = segment
        self.newest[kind] = segment
        return segment

    def end(self, kind: int, epoch: int, is_hit: bool) -> None:
        """A remembered block that was last used in that epoch is used again, or is forgotten."""
        known = self._classes[kind]
        cohort = known.cohorts.get(epoch) if known is not None else None
        if known is not None and cohort is not None and cohort.num_waiting:
            cohort.num_waiting -= 1
            age = self.epoch - epoch
            (known.hits if is_hit else known.censored)[BUCKET[age] if age < OLDEST else LAST] += 1.0

    def learn_next(self, num_blocks: int) -> int:
        """One class learns. Returns after how many uses the next one should, in a cache of `num_blocks`. 30 us."""
        self._to_learn[0].learn(self.epoch, _ASSUMED + self._mean_length)
        self._to_learn.rotate(-1)
        return max(num_blocks // len(self._to_learn), _LEARN_LEAST)

    def _class_of(self, kind: int) -> BlockClass:
        known = self._classes[kind]
        if known is None:
            group = self._groups[kind // _PLACES]
            known = self._classes[kind] = BlockClass(kind, group, falls=kind == UNKNOWN)
            known.learn(self.epoch, _ASSUMED + self._mean_length)
            self._to_learn.append(known)
        return known
