"""How long fetching and computing take here, as measured: what the planner weighs."""

from dataclasses import dataclass

from kvtier.clock import MONOTONIC, Clock

_FORGET_S = 20.0
"""Seconds after which a measurement says nothing any more: a tier that was slow is tried again."""
_ENOUGH_BLOCKS = 32
"""The number of blocks before which a tier's measurements say nothing yet."""
_FADE = 0.8
"""What is left of earlier measurements' weight with each new one."""
_OUTLIER = 4.0
"""How many times as long as expected a measurement may say at most: one that hung is no rule."""


@dataclass(slots=True)
class _Rate:
    """Seconds per block, recent blocks counting for more."""

    num_blocks: float = 0.0
    seconds: float = 0.0
    measured: float = 0.0
    """Blocks, without fading."""
    at_s: float = 0.0

    def note(self, num_blocks: float, seconds: float, now_s: float) -> None:
        expected = self.seconds_per_block(now_s)
        if expected is not None:
            seconds = min(seconds, _OUTLIER * expected * num_blocks)
        elif now_s - self.at_s > _FORGET_S:
            self.num_blocks = self.seconds = self.measured = 0.0
        self.num_blocks = self.num_blocks * _FADE + num_blocks
        self.seconds = self.seconds * _FADE + seconds
        self.measured += num_blocks
        self.at_s = now_s

    def seconds_per_block(self, now_s: float) -> float | None:
        if self.measured < _ENOUGH_BLOCKS or now_s - self.at_s > _FORGET_S:
            return None
        return self.seconds / self.num_blocks


@dataclass(slots=True)
class _Source:
    """A tier that blocks are fetched from."""

    rate: _Rate
    num_under_way: int = 0


class Speeds:
    """Measures seconds per block, since blocks are of one size. Scheduler thread only."""

    def __init__(self, clock: Clock = MONOTONIC) -> None:
        self._clock = clock
        self._sources: dict[str, _Source] = {}
        self._computing = _Rate()

    def fetch_begins(self, tier: str, num_blocks: int) -> None:
        """Notes that blocks are asked for."""
        self._source(tier).num_under_way += num_blocks

    def fetch_ends(self, tier: str, num_blocks: int, *, num_there: int, seconds: float) -> None:
        """Notes that blocks which were asked for are there, or will not come.

        :param num_there: how many of them are there. Where none is, the time says nothing.
        :param seconds: the time that the mover took for them, without the time that they waited for it.
        """
        source = self._source(tier)
        source.num_under_way -= num_blocks
        if num_there:
            source.rate.note(num_there, seconds, self._clock())

    def note_computed(self, num_blocks: float, seconds: float) -> None:
        """Notes that so many blocks' worth of tokens were computed in that time."""
        if num_blocks > 0:
            self._computing.note(num_blocks, seconds, self._clock())

    def fetching_s(self, tier: str) -> tuple[float, float] | None:
        """Returns the seconds for what is under way from a tier, and for each block more; None: not known."""
        source = self._source(tier)
        rate = source.rate.seconds_per_block(self._clock())
        return None if rate is None else (source.num_under_way * rate, rate)

    def computing_s(self) -> float | None:
        """Returns the seconds per block; None: not known."""
        return self._computing.seconds_per_block(self._clock())

    def _source(self, tier: str) -> _Source:
        return self._sources.setdefault(tier, _Source(_Rate()))
