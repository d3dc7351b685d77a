"""What simulated engines and pools can do."""

from dataclasses import dataclass
from enum import Enum

from kvtier_gateway.routing.values import DEFAULT_PRICES, Prices

GIB = 2**30


@dataclass(frozen=True, slots=True)
class EngineModel:
    """An engine: an 8 B model (32 layers, 8 KV heads of 128, bf16) on one H200, as docs/gpu-results.md has measured it.

    `compute` is of 2,048 tokens after 16,384 in 96.8 ms, of which 41 ms are attention in 32 layers; host memory reads
    52 GB/s; a decode step takes 6.3 ms, and reads KV at 4.0 TB/s.
    """

    compute: Prices = DEFAULT_PRICES
    """Pool bandwidth is none of its business."""
    step_s: float = 6.3e-3
    """A step of decodes without their KV; a chunk's own computation comes on top."""
    kv_byte_s: float = 1 / 4.0e12
    chunk_tokens: int = 2048
    """Tokens of prompts in one step, beside one for each decode."""
    device_bytes: int = 96 * GIB
    host_bytes: int = 256 * GIB
    event_delay_s: float = 0.05
    metrics_every_s: float = 1.0


class PoolSpeed(Enum):
    """Presets of `--pool`."""

    NONE = "none"
    SLOW = "slow"
    FAST = "fast"


@dataclass(frozen=True, slots=True)
class PoolModel:
    """The shared pool. Its bandwidth is that of all engines' links together, four times oversubscribed."""

    link_bytes_per_s: float
    """The bandwidth of one engine to the pool; 0: there is no pool."""
    capacity_bytes: int = 8192 * GIB
    lookup_s: float = 2e-3
    written_after_s: float = 0.1
    """Seconds from computed to readable."""
    oversubscription: float = 4.0


POOLS = {
    PoolSpeed.NONE: PoolModel(0.0),
    PoolSpeed.SLOW: PoolModel(1.25e9),
    PoolSpeed.FAST: PoolModel(25e9),
}
"""Slow is 10 Gbit/s for each engine, slower than computing; fast is 200 Gbit/s, seven times as fast."""
