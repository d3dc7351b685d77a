"""What the hierarchy counts. One instance per registry and scheduler."""

from collections.abc import Sequence

from prometheus_client import Counter

from kvtier.metrics import Metrics
from kvtier.offload.messages import HOST
from kvtier.offload.prefix_tokens import PrefixTokens
from kvtier.tiers.common.admission_gate import declined_blocks


class HierarchyMetrics:
    """Counters of one engine's hierarchy; incremented by the scheduler thread."""

    def __init__(self, metrics: Metrics) -> None:
        """:param metrics: of the tiers, whose registry the counters join."""

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvtier_{name}", text, labels, registry=metrics.registry)

        self.host_evicted = metrics.evicted_blocks.labels(HOST)
        self.loaded_blocks = counter(
            "loaded_blocks", "Blocks that loads have brought to the device, by their tier", "tier"
        )
        self.failed_blocks = counter("failed_blocks", "Blocks that loads did not bring: computed after all")
        self.saved_blocks = counter("saved_blocks", "Blocks copied from the device to host memory, which lacked them")
        self.prefix = PrefixTokens(metrics.registry)
        self.previous_blocks = counter(
            "previous_secret_blocks", "Blocks that loads have found under a previous secret of their tenant"
        )
        self.degraded_fetches = counter(
            "degraded_fetches", "Loads in which at least one block failed and had to be computed after all"
        )
        self.saves_dropped = counter("saves_dropped", "Blocks not saved because too much was queued already")
        self.lookups_skipped = counter("lookups_skipped", "Lookups answered without the shared tier: too many pending")
        self.deadlines_missed = counter("deadlines_missed", "Lookups and loads given up at their deadline", "verb")
        self.device_evictions = counter(
            "device_evictions", "Blocks evicted from the device: 'clean' were copied before, 'dropped' not", "state"
        )
        self.evicted_unwritten = counter(
            "evicted_unwritten",
            "Blocks that host memory lost and that a tier should have had: it refused them, or was not asked yet",
            "tier",
        )
        self.declined_blocks = declined_blocks(metrics.registry)
        self.evictions_waited = counter("evictions_waited", "Allocations that had to wait because blocks were copied")
        for verb in ("lookup", "load"):
            self.deadlines_missed.labels(verb)
        for state in ("clean", "dropped"):
            self.device_evictions.labels(state)

    def begin(self, below: Sequence[str]) -> None:
        """Makes the samples of host memory and of the tiers below it, so that they read 0 before anything happened."""
        self.loaded_blocks.labels(HOST)
        self.prefix.begin([HOST, *below])
        for tier in below:
            self.loaded_blocks.labels(tier)
            self.evicted_unwritten.labels(tier)
