"""What samples say, as plain values: what `kvtier stats --json` prints."""

from dataclasses import dataclass, field

from kvtier.cli.stats.requested import (
    POOL,
    FirstToken,
    HitRate,
    Saved,
    first_token_of,
    hit_rate_of,
    kind_of,
    nearest_first,
    saved_of,
)
from kvtier.cli.stats.samples import Samples
from kvtier.cli.stats.trouble import trouble_of

_TIER_PREFIX = "kvtier_tier_"


@dataclass(frozen=True, slots=True)
class CodecFacts:
    """What one codec did for one tier since its process started."""

    raw_bytes: float
    stored_bytes: float


@dataclass(frozen=True, slots=True)
class TierFacts:
    """One tier. None: not told."""

    looked_up: float | None
    """Blocks that it was asked about."""
    found: float | None
    """The blocks among them that were there."""
    read_hits: float | None
    read_misses: float | None
    """Blocks that were to be read and were not there, or not any more."""
    written: dict[str, float]
    """Blocks by answer: stored, exists, full, throttled, failed."""
    bytes_read: float | None
    bytes_written: float | None
    read_bytes_per_s: float | None
    """Bytes per second while reading, per call."""
    write_bytes_per_s: float | None
    held_blocks: float | None
    used_bytes: float | None
    capacity_bytes: float | None
    """What it may take; of a disk no more than its file system has."""
    evicted_blocks: float | None
    errors: dict[str, float]
    """The number of errors, by operation and name of the error."""
    open_breakers: float | None
    """Neighbours that are left alone at the moment because they failed."""
    queued_bytes: float | None
    """What waits to be written to it."""
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
    release: str | None
    """The release of kvtier; None where it is a plug-in of an engine."""
    started_s: float | None
    """When the process started, in seconds since 1970."""
    hit_rate: HitRate
    first_token: FirstToken
    saved: Saved | None
    """None for a pool."""
    requests: dict[str, float]
    """Engine: ended requests by reason."""
    waiting: dict[str, float]
    """What waits or is under way at this moment, in words."""
    connections: float | None
    """Pool: open connections of the block protocol."""
    calls: dict[str, dict[str, float]]
    """Pool: by protocol, block or grpc, calls by verb. Shared memory is announced over the block protocol."""
    moved_bytes: dict[str, float]
    """Pool: payload sent and received, and held by clients in shared memory at this moment."""
    tiers: dict[str, TierFacts]
    paths: dict[str, PathFacts]
    written: dict[str, float]
    """Pool: blocks received, by answer."""
    pages: dict[str, float]
    """SGLang: pages by what was asked for and what came of it."""
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
    kind = kind_of(samples)
    if kind is None:
        return None
    rate = hit_rate_of(kind, samples)
    return Facts(
        kind,
        release=samples.label("kvtier_build_info", "version"),
        started_s=samples.value("process_start_time_seconds"),
        hit_rate=rate,
        first_token=first_token_of(kind, samples),
        saved=saved_of(kind, samples, rate),
        requests=samples.by("kvtier_engine_requests_total", "reason"),
        waiting=_waiting(samples),
        connections=samples.value("kvtier_pool_block_connections"),
        calls=_calls(samples),
        moved_bytes=_moved_bytes(samples),
        tiers={tier: _tier(samples, tier) for tier in _tiers(samples)},
        paths=_paths(samples),
        written=samples.by("kvtier_pool_written_blocks_total", "status"),
        pages=_pages(samples),
        pinned=_pinned(samples),
        pins=samples.by("kvtier_pool_pins_total" if kind == POOL else "kvtier_pins_total", "status"),
        device_evictions=samples.by("kvtier_device_evictions_total", "state"),
        memory_bytes=samples.by("kvtier_memory_bytes", "kind"),
        trouble=trouble_of(samples),
    )


def _waiting(samples: Samples) -> dict[str, float]:
    names = {
        "requests running": ("kvtier_engine_running", "vllm:num_requests_running", "sglang:num_running_reqs"),
        "requests waiting": ("kvtier_engine_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs"),
        "bytes that the pool has not taken": ("kvtier_sglang_waiting_bytes",),
    }
    found = {words: _first(*map(samples.value, of)) for words, of in names.items()}
    return {words: value for words, value in found.items() if value is not None}


def _pages(samples: Samples) -> dict[str, float]:
    name = "kvtier_sglang_pages_total"
    return {
        f"{op} {status}": count
        for op in samples.by(name, "op")
        for status, count in samples.by(name, "status", op=op).items()
    }


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
    """Every tier that any sample tells something about, the nearest first."""
    found: set[str] = set()
    for name in samples.names():
        if name.startswith(_TIER_PREFIX) or name == "kvtier_io_errors_total":
            found |= samples.values_of(name, "tier")
    return sorted(found - {""}, key=nearest_first)


def _tier(samples: Samples, tier: str) -> TierFacts:
    def blocks(op: str, *statuses: str) -> float | None:
        name = "kvtier_tier_blocks_total"
        return _added(*(samples.value(name, tier=tier, op=op, status=status) for status in statuses))

    def moved(op: str) -> float | None:
        return samples.value("kvtier_tier_bytes_total", tier=tier, op=op)

    def bytes_per_s(op: str) -> float | None:
        seconds = samples.total("kvtier_tier_batch_seconds_sum", tier=tier, op=op)
        return _quotient(moved(op) or 0.0, seconds) or None  # nothing has gone that way

    states = [state for state, on in samples.by("kvtier_tier_state", "state", tier=tier).items() if on]
    # Pools of earlier releases count what memory and disk do by other names, or not at all.
    is_pools_memory = tier == "memory"
    asked = samples.by("kvtier_pool_looked_up_blocks_total", "source") if is_pools_memory else {}  # it is the first
    sent, received = (samples.value(f"kvtier_pool_{way}_bytes_total") for way in ("sent", "received"))
    on_disk = samples.value("kvtier_disk_record_bytes_total", tier=tier, why="new")
    return TierFacts(
        looked_up=_first(blocks("lookup", "hit", "miss", "pending"), sum(asked.values()) if asked else None),
        found=_first(blocks("lookup", "hit"), asked.get("memory", 0.0) if asked else None),
        read_hits=_first(
            blocks("read", "hit"),
            samples.value("kvtier_pool_read_blocks_total", source=tier),
            samples.value("kvtier_loaded_blocks_total", tier=tier),
        ),
        read_misses=blocks("read", "miss"),
        written=samples.by("kvtier_tier_blocks_total", "status", tier=tier, op="write"),
        bytes_read=_first(moved("read"), sent if is_pools_memory else None),
        bytes_written=_first(moved("write"), received if is_pools_memory else None, on_disk),
        read_bytes_per_s=bytes_per_s("read"),
        write_bytes_per_s=bytes_per_s("write"),
        held_blocks=samples.value("kvtier_tier_held_blocks", tier=tier),
        used_bytes=samples.value("kvtier_tier_used_bytes", tier=tier),
        capacity_bytes=samples.value("kvtier_tier_capacity_bytes", tier=tier),
        evicted_blocks=samples.value("kvtier_tier_evicted_blocks_total", tier=tier),
        errors=_errors(samples, tier),
        open_breakers=samples.value("kvtier_open_breakers", tier=tier),
        queued_bytes=samples.value("kvtier_pool_write_down_queue_bytes", tier=tier),
        state=states[0] if len(states) == 1 else None,
        codecs=_codecs(samples, tier),
    )


def _errors(samples: Samples, tier: str) -> dict[str, float]:
    name = "kvtier_io_errors_total"
    return {
        f"{op} {error}": count
        for op in samples.by(name, "op", tier=tier)
        for error, count in samples.by(name, "error", tier=tier, op=op).items()
    }


def _first(*values: float | None) -> float | None:
    """The first value that is told, which may be 0; None if none is."""
    return next((value for value in values if value is not None), None)


def _added(*values: float | None) -> float | None:
    told = [value for value in values if value is not None]
    return sum(told) if told else None


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


def _quotient(amount: float, by: float) -> float | None:
    return amount / by if by else None
