"""What memory a rank takes, asked at every scrape."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.device.kv import MemoryUse


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
