"""What the hierarchy counts. One instance per registry and scheduler."""

from prometheus_client import CollectorRegistry, Counter

from kvtier.tiers.common.admission_gate import declined_blocks


class HierarchyMetrics:
    """Counters of one engine's hierarchy; incremented by the scheduler thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvtier_{name}", text, labels, registry=registry)

        self.blocks_loaded = counter(
            "blocks_loaded", "Blocks that loads asked for, by the tier they came from; 'none' failed", "tier"
        )
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
        self.declined_blocks = declined_blocks(registry)
        self.evictions_waited = counter("evictions_waited", "Allocations that had to wait because blocks were copied")
