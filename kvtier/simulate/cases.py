"""What is simulated: a policy and an admission, for each of one or more tiers, and what came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.policies.admission_text import parse_admission
from kvtier.policies.registry import by_name
from kvtier.simulate.belady import belady_hit_rate
from kvtier.simulate.replay import DEFINITIONS, ReplayOptions, replay
from kvtier.simulate.tier import SimulatedTier
from kvtier.traces.form import Trace

BELADY = "belady"
"""Named like a policy, and none: it knows the future. It has a block hit rate and nothing else."""


@dataclass(frozen=True, slots=True)
class Level:
    """A tier of a case."""

    name: str
    capacity_blocks: int


@dataclass(frozen=True, slots=True)
class Case:
    """One cache. Its admission guards all levels but the first, or the only one."""

    policy: str
    levels: Sequence[Level]
    admission: str | None = None

    @property
    def capacity_blocks(self) -> int:
        return sum(level.capacity_blocks for level in self.levels)


@dataclass(frozen=True, slots=True)
class TierResult:
    """What came of a level."""

    name: str
    capacity_blocks: int
    hit_rate: float | None
    """Share of referenced blocks that this tier had, and no tier above it."""
    writes: int
    evictions: int
    declined: int


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case."""

    case: Case
    rates: Mapping[str, float | None]
    """The hit rates by the names of `DEFINITIONS`; None where there is none."""
    tiers: Sequence[TierResult] = ()

    @property
    def writes(self) -> int | None:
        """Blocks that were put into tiers, over the whole trace; None where nobody counts."""
        return sum(tier.writes for tier in self.tiers) if self.tiers else None

    def plain(self) -> dict[str, Any]:
        """The result as a dict that can be written as JSON."""
        return {
            "policy": self.case.policy,
            "admission": self.case.admission,
            "capacity_blocks": self.case.capacity_blocks,
            **self.rates,
            "writes": self.writes,
            "tiers": [
                {name: getattr(tier, name) for name in ("name", "capacity_blocks", "hit_rate", "writes", "evictions")}
                for tier in self.tiers
            ],
        }


def open_tiers(case: Case, block_bytes: int) -> list[SimulatedTier]:
    """The empty tiers of a case. Raises `ConfigError` for a policy or an admission that there is not."""
    tiers = []
    for number, level in enumerate(case.levels):
        admission = None
        if case.admission is not None and (number or len(case.levels) == 1):
            admission = parse_admission(case.admission, level.capacity_blocks * block_bytes)
        policy = by_name(case.policy, num_blocks=level.capacity_blocks)
        tiers.append(SimulatedTier(level.name, level.capacity_blocks, policy, admission))
    return tiers


def simulate(trace: Trace, case: Case, options: ReplayOptions) -> Result:
    """Replays the trace once. 1.5 us a reference with LRU, up to 10 us with other policies and a second tier."""
    if case.policy == BELADY:
        best = belady_hit_rate(trace, case.capacity_blocks, warm_up=options.warm_up, on_progress=options.on_progress)
        return Result(case, {**dict.fromkeys(DEFINITIONS), "block_hit_rate": best})
    tiers = open_tiers(case, options.block_bytes)
    counts = replay(trace, tiers, options)
    results = [
        TierResult(
            name=tier.name,
            capacity_blocks=tier.capacity,
            hit_rate=num_hits / counts.num_blocks if counts.num_blocks else None,
            writes=tier.num_writes,
            evictions=tier.num_evicted,
            declined=tier.num_declined,
        )
        for tier, num_hits in zip(tiers, counts.tier_hits, strict=True)
    ]
    return Result(case, counts.rates(), results)
