"""What samples say, as plain values: what `kvtier stats --json` prints."""

from dataclasses import dataclass, field

from kvtier.cli.stats.samples import Samples

ENGINE, POOL = "engine", "pool"
_TIER_PREFIX = "kvtier_tier_"
_TROUBLE = (
    ("kvtier_corrupt_blocks_total", "tier", "blocks of {} found damaged; each was a miss"),
    ("kvtier_degraded_fetches_total", "", "fetches in which a block failed and was computed after all"),
    ("kvtier_deadlines_missed_total", "verb", "deadlines of a {} missed"),
    ("kvtier_lookups_skipped_total", "", "lookups without the shared tier: too many were pending"),
    ("kvtier_saves_dropped_total", "", "blocks not saved: too much was queued"),
    ("kvtier_evictions_waited_total", "", "allocations that waited for a copy"),
    ("kvtier_evicted_unwritten_total", "tier", "blocks that host memory lost before {} had them"),
    ("kvtier_engine_preemptions_total", "", "requests that lost their blocks and started again"),
    ("kvtier_pool_evicted_unwritten_total", "tier", "blocks that memory lost before {} had them"),
    ("kvtier_pool_block_connections_refused_total", "", "connections refused: max_connections were open"),
    ("kvtier_pool_tenant_refusals_total", "limit", "refusals: a tenant had its part of {}"),
    ("kvtier_pool_expired_leases_total", "", "leases that ended by their deadline"),
)
"""Counter, the label that its words need, and those words."""


@dataclass(frozen=True, slots=True)
class HitRate:
    """How much of what was asked for a cache had."""

    unit: str
    """tokens or blocks."""
    asked: float
    by_tier: dict[str, float]

    @property
    def share(self) -> float | None:
        """0 to 1; None while nobody asked."""
        return sum(self.by_tier.values()) / self.asked if self.asked else None


@dataclass(frozen=True, slots=True)
class CodecFacts:
    """What one codec did for one tier since its process started."""

    raw_bytes: float
    stored_bytes: float


@dataclass(frozen=True, slots=True)
class TierFacts:
    """One tier. None: not told."""

    read_hits: float
    read_misses: float
    written: dict[str, float]
    """Blocks by answer: stored, exists, full, throttled, failed."""
    bytes_read: float
    bytes_written: float
    read_bytes_per_s: float | None
    """Bytes per second while reading, per call."""
    write_bytes_per_s: float | None
    held_blocks: float | None
    used_bytes: float | None
    capacity_bytes: float | None
    evicted_blocks: float | None
    errors: dict[str, float]
    """The number of errors, by operation and name of the error."""
    state: str | None
    """What its medium lets it do: writable, read_only, off."""
    codecs: dict[str, CodecFacts]
    """What was packed, by the codec that it was stored with."""


@dataclass(frozen=True, slots=True)
class PinFacts:
    """What tenants keep in a pool's memory at this moment."""

    blocks: float
    payload_bytes: float
    slab_bytes: float
    """Memory that this keeps from all other blocks: whole slabs, which `pin_share` bounds."""


@dataclass(frozen=True, slots=True)
class PathFacts:
    """One way to the pool."""

    bytes_by_op: dict[str, float]
    calls_by_op: dict[str, float]


@dataclass(frozen=True, slots=True)
class Facts:
    """One engine or one pool."""

    kind: str
    hit_rate: HitRate
    ttft_mean_s: float | None
    requests: dict[str, float]
    """Engine: ended requests by reason."""
    calls: dict[str, dict[str, float]]
    """Pool: by protocol, block or grpc, calls by verb. Shared memory is announced over the block protocol."""
    moved_bytes: dict[str, float]
    """Pool: payload sent and received, and held by clients in shared memory at this moment."""
    tiers: dict[str, TierFacts]
    paths: dict[str, PathFacts]
    written: dict[str, float]
    """Pool: blocks received, by answer."""
    pinned: PinFacts | None
    """Pool: None while nothing is."""
    pins: dict[str, float]
    """Blocks that a pool was asked to pin, by answer."""
    device_evictions: dict[str, float]
    """Engine: blocks evicted from the device, by whether they were copied before."""
    memory_bytes: dict[str, float]
    """Engine: memory that it takes for its tiers: arena, leased, pinned (of these two), staging."""
    trouble: dict[str, float] = field(default_factory=dict)
    """What went wrong, in words, and how often."""


def facts_of(samples: Samples) -> Facts | None:
    """None when the samples are neither an engine's nor a pool's."""
    names = samples.names()
    if any(name.startswith("kvtier_engine_") for name in names):
        kind, hit_rate = ENGINE, _token_hit_rate(samples)
    elif any(name.startswith("kvtier_pool_") for name in names):
        kind, hit_rate = POOL, _block_hit_rate(samples)
    else:
        return None
    return Facts(
        kind,
        hit_rate,
        ttft_mean_s=_quotient(
            samples.total("kvtier_engine_ttft_seconds_sum"), samples.total("kvtier_engine_ttft_seconds_count")
        ),
        requests=samples.by("kvtier_engine_requests_total", "reason"),
        calls=_calls(samples),
        moved_bytes=_moved_bytes(samples),
        tiers={tier: _tier(samples, tier) for tier in _tiers(samples)},
        paths=_paths(samples),
        written=samples.by("kvtier_pool_written_blocks_total", "status"),
        pinned=_pinned(samples),
        pins=samples.by("kvtier_pool_pins_total" if kind == POOL else "kvtier_pins_total", "status"),
        device_evictions=samples.by("kvtier_device_evictions_total", "state"),
        memory_bytes=samples.by("kvtier_memory_bytes", "kind"),
        trouble=_trouble(samples),
    )


def _token_hit_rate(samples: Samples) -> HitRate:
    cached = samples.by("kvtier_engine_cached_tokens_total", "tier")
    return HitRate("tokens", samples.total("kvtier_engine_prompt_tokens_total"), cached)


def _block_hit_rate(samples: Samples) -> HitRate:
    """Blocks read without room in memory count for the tier that they came from."""
    by_source = samples.by("kvtier_pool_read_blocks_total", "source")
    found: dict[str, float] = {}
    for source, blocks in by_source.items():
        if source != "miss":
            tier = source.removesuffix("_private")
            found[tier] = found.get(tier, 0.0) + blocks
    return HitRate("blocks", sum(by_source.values()), found)


def _calls(samples: Samples) -> dict[str, dict[str, float]]:
    by_protocol = {
        "block": samples.by("kvtier_pool_block_calls_total", "verb"),
        "grpc": samples.by("kvtier_pool_calls_total", "verb"),
    }
    return {protocol: calls for protocol, calls in by_protocol.items() if calls}


def _moved_bytes(samples: Samples) -> dict[str, float]:
    names = {"sent": "sent_bytes_total", "received": "received_bytes_total", "shared now": "shared_held_bytes"}
    found = {words: samples.total(f"kvtier_pool_{name}") for words, name in names.items()}
    return {words: amount for words, amount in found.items() if amount}


def _pinned(samples: Samples) -> PinFacts | None:
    names = ("blocks", "bytes", "slab_bytes")
    pinned = PinFacts(*(samples.total(f"kvtier_pool_pinned_{name}") for name in names))
    return pinned if pinned.blocks else None


def _tiers(samples: Samples) -> list[str]:
    """Every tier that any sample tells something about."""
    found: dict[str, None] = {}
    for name in samples.names():
        if name.startswith(_TIER_PREFIX) or name == "kvtier_io_errors_total":
            found |= dict.fromkeys(samples.by(name, "tier"))
    return [tier for tier in found if tier]


def _tier(samples: Samples, tier: str) -> TierFacts:
    def bytes_per_s(op: str) -> float | None:
        seconds = samples.total("kvtier_tier_batch_seconds_sum", tier=tier, op=op)
        return _quotient(samples.total("kvtier_tier_bytes_total", tier=tier, op=op), seconds)

    states = [state for state, on in samples.by("kvtier_tier_state", "state", tier=tier).items() if on]
    errors = {
        f"{op} {error}": count
        for op in samples.by("kvtier_io_errors_total", "op", tier=tier)
        for error, count in samples.by("kvtier_io_errors_total", "error", tier=tier, op=op).items()
    }
    return TierFacts(
        # A pool counts by where blocks were found: its own tiers are read without a call that could be counted.
        read_hits=samples.total("kvtier_tier_blocks_total", tier=tier, op="read", status="hit")
        or samples.total("kvtier_pool_read_blocks_total", source=tier),
        read_misses=samples.total("kvtier_tier_blocks_total", tier=tier, op="read", status="miss"),
        written=samples.by("kvtier_tier_blocks_total", "status", tier=tier, op="write"),
        bytes_read=samples.total("kvtier_tier_bytes_total", tier=tier, op="read"),
        bytes_written=samples.total("kvtier_tier_bytes_total", tier=tier, op="write"),
        read_bytes_per_s=bytes_per_s("read"),
        write_bytes_per_s=bytes_per_s("write"),
        held_blocks=samples.value("kvtier_tier_held_blocks", tier=tier),
        used_bytes=samples.value("kvtier_tier_used_bytes", tier=tier),
        capacity_bytes=samples.value("kvtier_tier_capacity_bytes", tier=tier),
        evicted_blocks=samples.value("kvtier_tier_evicted_blocks_total", tier=tier),
        errors=errors,
        state=states[0] if len(states) == 1 else None,
        codecs=_codecs(samples, tier),
    )


def _codecs(samples: Samples, tier: str) -> dict[str, CodecFacts]:
    def of(codec: str) -> CodecFacts:
        by_form = samples.by("kvtier_codec_bytes_total", "form", tier=tier, codec=codec)
        return CodecFacts(by_form.get("raw", 0.0), by_form.get("stored", 0.0))

    found = {codec: of(codec) for codec in samples.by("kvtier_codec_bytes_total", "codec", tier=tier)}
    return {codec: facts for codec, facts in found.items() if facts.raw_bytes}


def _paths(samples: Samples) -> dict[str, PathFacts]:
    names = samples.by("kvtier_path_bytes_total", "path") | samples.by("kvtier_path_calls_total", "path")
    return {
        path: PathFacts(
            samples.by("kvtier_path_bytes_total", "op", path=path),
            samples.by("kvtier_path_calls_total", "op", path=path),
        )
        for path in names
    }


def _trouble(samples: Samples) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, label, words in _TROUBLE:
        for value, count in samples.by(name, label).items():
            found[words.format(value)] = count
    return found


def _quotient(amount: float, by: float) -> float | None:
    return amount / by if by else None
