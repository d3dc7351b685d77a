"""What became of blocks that were used alike, and what a block of such a class is worth at which age."""

import itertools
import math
from bisect import bisect_right

_STARTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""The age at which each bucket starts, in epochs. The last one has no end."""
OLDEST = _STARTS[-1]
LAST = len(_STARTS) - 1
BUCKET = tuple(bisect_right(_STARTS, age) - 1 for age in range(OLDEST + 1))
"""The bucket of an age below `OLDEST`; that of any other is `LAST`."""
_WIDTH = (*(_STARTS[i + 1] - _STARTS[i] for i in range(LAST)), OLDEST)
_PRIOR = tuple(0.3 / (start + width / 2) for start, width in zip(_STARTS, _WIDTH, strict=True))
"""Uses per epoch that are assumed before anything is known: the older the fewer, as LRU does."""
_DECAY = 0.98
"""What is left of a class's evidence when it is learned again."""
LEVELS_PER_DOUBLING = 32
"""How finely worths are told apart: to 2 %."""
_STALE_AFTER = 8


class Cohort:
    """The blocks of a class that were last used in one epoch. Not thread-safe: the policy owner's lock guards it."""

    __slots__ = ("epoch", "num_waiting")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.num_waiting = 0
        """Its blocks, cached or remembered, whose next use we shall know of. The policy counts them."""


class BlockClass:
    """The evidence about blocks that were used alike. Not thread-safe: the policy owner's lock guards all of it."""

    __slots__ = ("_falls", "_group", "_shown_hits", "_shown_times", "censored", "cohorts", "hits", "kind", "levels")

    def __init__(self, kind: int, group: "ClassGroup", *, falls: bool = False) -> None:
        """`learn` has to be called before it is used.

        :param group: what is assumed of the class while little is known of it.
        :param falls: a block is never worth more than a younger one.
        """
        self.kind = kind
        self._group = group
        self._falls = falls
        self.hits = [0.0] * len(_STARTS)
        """Ages that ended with a use, by bucket. The policy counts them."""
        self.censored = [0.0] * len(_STARTS)
        """Ages whose end nobody will know, as the block was forgotten, by bucket."""
        self.cohorts: dict[int, Cohort] = {}
        """The cohorts of this class, by epoch."""
        self._shown_hits = [0.0] * len(_STARTS)
        self._shown_times = [0.0] * len(_STARTS)
        """The uses and the time that the group's sums hold of this class."""
        self.levels = [0] * len(_STARTS)
        """What a block is worth by the bucket of its age, as `LEVELS_PER_DOUBLING` times a logarithm."""

    def cohort(self, epoch: int) -> Cohort:
        """The one of an epoch, new where there is none."""
        cohort = self.cohorts.get(epoch)
        if cohort is None:
            cohort = self.cohorts[epoch] = Cohort(epoch)
        return cohort

    def learn(self, now: int, num_assumed: float) -> None:
        """Works out the levels, then lets the evidence fade. About 25 us.

        :param num_assumed: what is assumed of the class weighs as much as the time of so many blocks.
        """
        waiting = self._waiting(now)
        group_hits, group_times, rates = self._group.hits, self._group.times, self._group.rates(num_assumed)
        hits, censored, levels = self.hits, self.censored, self.levels
        shown_hits, shown_times = self._shown_hits, self._shown_times
        beyond = 0.0
        ahead: list[tuple[float, float, float]] = []
        for i in range(LAST, -1, -1):
            num_hits, width = hits[i], _WIDTH[i]
            weight = num_assumed * width
            ended = num_hits + censored[i] + waiting[i]
            time = width * (beyond + ended / 2)
            beyond += ended
            group_hits[i] += num_hits - shown_hits[i]
            group_times[i] += time - shown_times[i]
            shown_hits[i], shown_times[i] = num_hits, time
            rate = (num_hits + rates[i] * weight) / (time + weight)
            stay = math.exp(-rate * width)
            gain = 1.0 - stay
            cost = gain / rate
            # The best rate of uses over any horizon: later buckets join as long as they raise it.
            while ahead and ahead[-1][0] * cost > gain * ahead[-1][1]:
                later_gain, later_cost, later_stay = ahead.pop()
                gain, cost, stay = gain + stay * later_gain, cost + stay * later_cost, stay * later_stay
            ahead.append((gain, cost, stay))
            levels[i] = math.floor(math.log2(gain / cost) * LEVELS_PER_DOUBLING)
        if self._falls:
            levels[:] = itertools.accumulate(levels, min)
        hits[:] = [count * _DECAY for count in hits]
        censored[:] = [count * _DECAY for count in censored]

    def _waiting(self, now: int) -> list[float]:
        """Blocks that wait, by the bucket of their age. A block that waited too long is no longer followed."""
        waiting = [0.0] * len(_STARTS)
        ended = []
        for epoch, cohort in self.cohorts.items():
            age, num_waiting = now - epoch, cohort.num_waiting
            if age < OLDEST and (num_waiting or not age):
                waiting[BUCKET[age]] += num_waiting
                continue
            ended.append(epoch)
            self.censored[LAST] += num_waiting
            cohort.num_waiting = 0
        for epoch in ended:
            del self.cohorts[epoch]
        return waiting


class ClassGroup:
    """Classes of which much the same is assumed, as little is known of each. The policy owner's lock guards it."""

    __slots__ = ("_all", "_rates", "_until_stale", "hits", "times")

    def __init__(self, all_groups: "list[ClassGroup]") -> None:
        """:param all_groups: which the new one joins; what is assumed of a group that little is known of."""
        all_groups.append(self)
        self._all = all_groups
        self.hits = [0.0] * len(_STARTS)
        """Uses and block-epochs of the group's classes, by the bucket of the age. Classes add to them."""
        self.times = [0.0] * len(_STARTS)
        self._rates: list[float] = []
        self._until_stale = 0
        """Calls of `rates` until they are worked out again."""

    def rates(self, num_assumed: float) -> list[float]:
        """Uses per block and epoch, by the bucket of the age. 30 us at every eighth call."""
        if self._until_stale:
            self._until_stale -= 1
            return self._rates
        self._until_stale = _STALE_AFTER - 1
        self._rates = []
        for i, width in enumerate(_WIDTH):
            weight = num_assumed * width
            all_hits = sum(group.hits[i] for group in self._all)
            all_times = sum(group.times[i] for group in self._all)
            assumed = (max(all_hits, 0.0) + _PRIOR[i] * weight) / (max(all_times, 0.0) + weight)
            # Sums of differences: rounding may leave them just below 0.
            self._rates.append((max(self.hits[i], 0.0) + assumed * weight) / (max(self.times[i], 0.0) + weight))
        return self._rates
