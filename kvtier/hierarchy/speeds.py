"""How long fetching and computing take here, as measured: what the planner weighs."""

from dataclasses import dataclass

from kvtier.clock import MONOTONIC, Clock

_FORGET_S = 60.0
"""After which a measurement says nothing any more: a tier that was slow is tried again."""
_ENOUGH_BLOCKS = 32
"""Before which it says nothing yet."""
_FADE = 0.8
"""What is left of earlier measurements' weight with each new one."""


@dataclass(slots=True)
class _Rate:
    """Seconds per block, recent blocks counting for more."""

    num_blocks: float = 0.0
    seconds: float = 0.0
    measured: float = 0.0
    """Blocks, without fading."""
    at_s: float = 0.0

    def note(self, num_blocks: float, seconds: float, now_s: float) -> None:
        if now_s - self.at_s > _FORGET_S:
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
    ended_s: float = 0.0
    """When blocks last arrived."""


class Speeds:
    """Scheduler thread only. Blocks are counted, not bytes: they are of one size.

    A tier's time for some blocks runs from their request, or from the arrival of those before them if that was later:
    so what waits behind others is not counted twice, and what is under way tells how long the next ones wait.
    """

    def __init__(self, clock: Clock = MONOTONIC) -> None:
        self._clock = clock
        self._sources: dict[str, _Source] = {}
        self._computing = _Rate()

    def fetch_begins(self, tier: str, num_blocks: int) -> float:
        """Blocks are asked for. Gives the time, for `fetch_ends`."""
        self._source(tier).num_under_way += num_blocks
        return self._clock()

    def fetch_ends(self, tier: str, num_blocks: int, begun_s: float) -> None:
        """They are there, or will not come."""
        source, now = self._source(tier), self._clock()
        source.num_under_way -= num_blocks
        source.rate.note(num_blocks, max(0.0, now - max(begun_s, source.ended_s)), now)
        source.ended_s = now

    def note_computed(self, num_blocks: float, seconds: float) -> None:
        """So many blocks' worth of tokens were computed in that time."""
        if num_blocks > 0:
            self._computing.note(num_blocks, seconds, self._clock())

    def fetching_s(self, tier: str) -> tuple[float, float] | None:
        """Seconds for what is under way from a tier, and for each block more; None: not known."""
        source = self._source(tier)
        rate = source.rate.seconds_per_block(self._clock())
        return None if rate is None else (source.num_under_way * rate, rate)

    def computing_s(self) -> float | None:
        """Seconds per block; None: not known."""
        return self._computing.seconds_per_block(self._clock())

    def _source(self, tier: str) -> _Source:
        return self._sources.setdefault(tier, _Source(_Rate()))
