"""What engines and clients asked for, and what of it a cache had: by kind of process, from the names that each has."""

from dataclasses import dataclass, replace

from kvtier.cli.stats.samples import Samples

ENGINE, POOL, VLLM, SGLANG = "engine", "pool", "vllm", "sglang"
_ORDER = ("device", "memory", "host", "disk", "redis", "pool")
"""The nearest first; tiers of other names come last."""
_COLD = "kvtier_engine_cold_ttft_seconds"
_SOURCES_OF_VLLM = {"external_unspecified": "pool"}
"""vLLM has no name for a pool; the others are ours."""
_SOURCES_OF_SGLANG = {"storage": "pool", "total": "any"}


@dataclass(frozen=True, slots=True)
class HitRate:
    """How much of what was asked for a cache had."""

    unit: str
    """tokens or blocks."""
    way: str
    """What counts: tokens of `prompts`, blocks that were `looked up`, or, where nobody looks up, that were `read`."""
    asked: float
    by_tier: dict[str, float]

    @property
    def share(self) -> float | None:
        """0 to 1; None while nobody asked."""
        return sum(self.by_tier.values()) / self.asked if self.asked else None


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Seconds from a request's arrival to its first token, on average. None: there was none, or nobody tells."""

    all_s: float | None
    cold_s: float | None
    """Mean seconds to the first token of requests of which nothing was cached; None if there were none."""
    hit_s: float | None
    """Mean seconds to the first token of the other requests; None if there were none."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What an engine did not have to compute."""

    tokens: float
    seconds: float | None
    """About how long computing them would have taken, as long per token as those that were; None: not told."""


def nearest_first(tier: str) -> tuple[int, str]:
    """What tiers are sorted by."""
    return (_ORDER.index(tier) if tier in _ORDER else len(_ORDER), tier)


def kind_of(samples: Samples) -> str | None:
    """Returns what the page is of; None: of nothing that we know."""
    prefixes = (("kvtier_engine_", ENGINE), ("kvtier_pool_", POOL), ("vllm:", VLLM), ("sglang:", SGLANG))
    names = samples.names()
    found = next((kind for prefix, kind in prefixes if any(name.startswith(prefix) for name in names)), None)
    return SGLANG if found is None and any(name.startswith("kvtier_sglang_") for name in names) else found


def hit_rate_of(kind: str, samples: Samples) -> HitRate:
    """Returns the hit rate of the process: of prompts' tokens for an engine, of blocks for a pool."""
    rate = _hit_rate_of(kind, samples)
    return replace(rate, by_tier=dict(sorted(rate.by_tier.items(), key=lambda item: nearest_first(item[0]))))


def _hit_rate_of(kind: str, samples: Samples) -> HitRate:
    if kind == POOL:
        return _of_pool(samples)
    if kind == ENGINE:
        cached = samples.by("kvtier_engine_cached_tokens_total", "tier")
        return HitRate("tokens", "prompts", samples.total("kvtier_engine_prompt_tokens_total"), cached)
    if kind == VLLM:
        cached = samples.by("vllm:prompt_tokens_cached_by_source_total", "source")
        named = _SOURCES_OF_VLLM
    else:
        cached = samples.by("sglang:cached_tokens_total", "cache_source")
        named = _SOURCES_OF_SGLANG
    by_tier = {named.get(source, source): tokens for source, tokens in cached.items()}
    return HitRate("tokens", "prompts", samples.total(f"{kind}:prompt_tokens_total"), by_tier)


def _of_pool(samples: Samples) -> HitRate:
    """Blocks that were looked up: engines do not read what they did not find. Where nobody looks up, those read."""
    looked_up = samples.by("kvtier_pool_looked_up_blocks_total", "source")
    if looked_up:
        by_tier = {source: blocks for source, blocks in looked_up.items() if source != "miss"}
        return HitRate("blocks", "looked up", sum(looked_up.values()), by_tier)
    by_source = samples.by("kvtier_pool_read_blocks_total", "source")
    found: dict[str, float] = {}
    for source, blocks in by_source.items():
        if source != "miss":
            tier = source.removesuffix("_private")  # earlier releases: read without room in memory
            found[tier] = found.get(tier, 0.0) + blocks
    return HitRate("blocks", "read", sum(by_source.values()), found)


def first_token_of(kind: str, samples: Samples) -> FirstToken:
    """Returns the times to first token; engines other than ours do not tell hits from the others."""
    name = "kvtier_engine_ttft_seconds" if kind == ENGINE else f"{kind}:time_to_first_token_seconds"
    seconds, count = samples.total(f"{name}_sum"), samples.total(f"{name}_count")
    cold_s, num_cold = samples.total(f"{_COLD}_sum"), samples.value(f"{_COLD}_count")
    if num_cold is None:
        return FirstToken(_mean(seconds, count), None, None)
    return FirstToken(_mean(seconds, count), _mean(cold_s, num_cold), _mean(seconds - cold_s, count - num_cold))


def _mean(total: float, count: float) -> float | None:
    return total / count if count > 0 else None


def saved_of(kind: str, samples: Samples, rate: HitRate) -> Saved | None:
    """Returns what the cache saved an engine; None for a pool."""
    if kind == POOL:
        return None
    tokens = sum(rate.by_tier.values())
    spent_s, computed = 0.0, 0.0
    if kind == ENGINE:
        spent_s = samples.total("kvtier_engine_prompt_seconds_total")
        computed = samples.total("kvtier_engine_computed_prompt_tokens_total")
    elif kind == VLLM:
        spent_s = samples.total("vllm:request_prefill_time_seconds_sum")
        computed = rate.asked - tokens
    return Saved(tokens, tokens * spent_s / computed if computed > 0 and spent_s else None)
