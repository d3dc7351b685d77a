"""How full tiers are, and what memory a rank takes, asked at every scrape."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.device.kv import MemoryUse
from kvtier.errors import KvtierError
from kvtier.tiers.base import Usage


class TierGauges(Collector):
    """Gauges `kvtier_tier_held_blocks`, `_used_bytes` and `_capacity_bytes`, by tier.

    Any thread. A scrape takes as long as the tiers' answers do: name only those that answer without a network.
    """

    def __init__(self, registry: CollectorRegistry, *, usages: Mapping[str, Callable[[], Usage]]) -> None:
        """Registers itself.

        :param usages: by name of the tier, its `usage`. Called until the registry is gone; a `KvtierError`
            leaves the tier out of that scrape.
        """
        self._usages = dict(usages)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yields the gauges of all tiers for one scrape, asking each tier how full it is."""
        held = GaugeMetricFamily("kvtier_tier_held_blocks", "Blocks that a tier holds", labels=["tier"])
        used = GaugeMetricFamily("kvtier_tier_used_bytes", "Bytes that a tier's blocks take", labels=["tier"])
        capacity = GaugeMetricFamily("kvtier_tier_capacity_bytes", "Bytes that a tier may take", labels=["tier"])
        for tier, ask in self._usages.items():
            with contextlib.suppress(KvtierError):
                usage = ask()
                held.add_metric([tier], usage.num_blocks)
                used.add_metric([tier], usage.used_bytes)
                capacity.add_metric([tier], usage.capacity_bytes)
        yield from (held, used, capacity)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory that one rank of an engine takes for its tiers."""

    arena_bytes: int
    """Host memory, `host.capacity_bytes`."""
    leased_bytes: int
    """Memory of the pool that is mapped here."""
    copies: MemoryUse

    def by_kind(self) -> dict[str, int]:
        """Bytes under the names that metrics have for them. What is pinned is part of arena and leased memory."""
        return {
            "arena": self.arena_bytes,
            "leased": self.leased_bytes,
            "pinned": self.copies.pinned_bytes,
            "staging": self.copies.staging_bytes,
        }


class MemoryGauges(Collector):
    """Gauges `kvtier_memory_bytes`, by kind, and `kvtier_pinning_seconds`, of one rank. Any thread."""

    def __init__(self, registry: CollectorRegistry, memory_use: Callable[[], RankMemory]) -> None:
        """Registers itself.

        :param memory_use: called until the registry is gone.
        """
        self._memory_use = memory_use
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yields the gauges of the rank's memory, and of the time that page-locking has taken, for one scrape."""
        use = self._memory_use()
        memory = GaugeMetricFamily(
            "kvtier_memory_bytes",
            "Memory that the engine takes for its tiers: the host's (arena), the pool's as mapped (leased), what of "
            "both is page-locked (pinned), and the device's for copies (staging)",
            labels=["kind"],
        )
        for kind, nbytes in use.by_kind().items():
            memory.add_metric([kind], nbytes)
        seconds = GaugeMetricFamily(
            "kvtier_pinning_seconds", "Time that page-locking has taken", value=use.copies.pinning_s
        )
        yield from (memory, seconds)
