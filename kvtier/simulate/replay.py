"""Replays a trace through tiers and counts hits."""

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.policies.base import Use
from kvtier.simulate.tier import SimulatedTier
from kvtier.traces.form import Request, Trace

Progress = Callable[[int], None]
"""Told how many more references were replayed."""

DEFINITIONS = {
    "block_hit_rate": "share of referenced blocks that were there",
    "prefix_hit_rate": "share of referenced blocks in the run from the first block on that was there",
    "token_hit_rate": "share of prompt tokens in that run; the last block of a prompt may be a part",
}


@dataclass(slots=True)
class HitCounts:
    """Sums of hits over all requests that count."""

    tier_hits: list[int]
    """Blocks that each tier had, and no tier above it."""
    num_blocks: int = 0
    block_hits: int = 0
    prefix_hits: int = 0
    num_tokens: int = 0
    token_hits: int = 0

    def add(self, request: Request, found: Sequence[Sequence[bool]], num_leading: int, tokens_per_block: int) -> None:
        """
        :param found: for each tier, by index in the request, whether it or a tier above has the block.
        :param num_leading: length of the run from the first block on that some tier has.
        """
        num_found = 0
        for tier, here in enumerate(found):
            self.tier_hits[tier] += sum(here) - num_found
            num_found = sum(here)
        self.num_blocks += len(request.keys)
        self.block_hits += num_found
        self.prefix_hits += num_leading
        self.num_tokens += request.num_tokens
        self.token_hits += min(request.num_tokens, num_leading * tokens_per_block)

    def rates(self) -> dict[str, float | None]:
        """The hit rates by the names of `DEFINITIONS`.

        None where nothing was asked for, and for tokens where nobody knows them.
        """
        return {
            "block_hit_rate": _share(self.block_hits, self.num_blocks),
            "prefix_hit_rate": _share(self.prefix_hits, self.num_blocks),
            "token_hit_rate": _share(self.token_hits, self.num_tokens),
        }


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How a trace is replayed."""

    warm_up: float = 0.0
    """The share of requests, from the first on, that fill the cache and do not count in hit rates."""
    head_first: bool = False
    """Blocks of a request are used from the first to the last. Otherwise last to first, as kvtier does."""
    block_bytes: int = 1
    """What policy and admission are told of the size of each block."""
    on_progress: Progress = lambda count: None


def replay(trace: Trace, tiers: Sequence[SimulatedTier], options: ReplayOptions) -> HitCounts:
    """Replays all requests through `tiers`, from the fastest to the slowest; they count their writes and evictions.

    A block is found where the first tier has it. After the request all its blocks are used: the first tier is told of
    all, a further one of those that no tier above had; and each tier is offered what it lacks. A reference takes
    about 1.5 us with one tier.
    """
    counts = HitCounts([0] * len(tiers))
    num_warm_up = int(len(trace.requests) * options.warm_up)
    for number, request in enumerate(trace.requests):
        found = _found_by(request.keys, tiers)
        num_leading = found[-1].index(False) if False in found[-1] else len(request.keys)
        if number >= num_warm_up and not request.is_write:
            counts.add(request, found, num_leading, trace.tokens_per_block or 0)
        _use(request, num_leading, tiers, found, options)
        options.on_progress(len(request.keys))
    return counts


def _found_by(keys: Sequence[int], tiers: Sequence[SimulatedTier]) -> list[list[bool]]:
    """Whether each tier, or a tier above it, has each block: a list for each tier, by index in the request."""
    found: list[list[bool]] = []
    for tier in tiers:
        here = list(map(tier.policy.__contains__, keys))
        found.append(list(map(operator.or_, here, found[-1])) if found else here)
    return found


def _use(
    request: Request,
    num_leading: int,
    tiers: Sequence[SimulatedTier],
    found: Sequence[Sequence[bool]],
    options: ReplayOptions,
) -> None:
    keys = request.keys
    count = len(keys)
    num_hits = -1 if request.is_write else num_leading
    parents = itertools.chain((None,), keys)
    same = itertools.repeat
    uses: list[Use[int]] = list(
        map(Use, parents, range(count), same(count), same(num_hits), same(0), same(options.block_bytes))
    )
    order = range(count) if options.head_first else range(count - 1, -1, -1)
    for number, tier in enumerate(tiers):
        tier.take(request, uses, order, found[number - 1] if number else None)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
