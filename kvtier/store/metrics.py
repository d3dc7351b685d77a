"""What a store counts. Tiers count their own reads and writes (`kvtier.metrics`)."""

from collections import Counter as Counting
from collections.abc import Iterable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvtier.tiers.base import WriteStatus
from kvtier.tiers.common.admission_gate import declined_blocks

WRITE_DOWN_RESULTS = ("stored", "exists", "full", "failed", "dropped", "cancelled", "abandoned", "declined")


class StoreMetrics:
    """Owns nothing but the counters; `registry` is the caller's. Any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.read_blocks = counter("kvtier_pool_read_blocks", "Blocks asked for, by where they were found.", ["source"])
        self.unadmitted_blocks = counter(
            "kvtier_pool_unadmitted_blocks",
            "Blocks read from a tier below into a buffer, for their reader alone: memory had no room.",
            ["tier"],
        )
        self.looked_up_blocks = counter(
            "kvtier_pool_looked_up_blocks",
            "Blocks that clients looked up, by the first tier that had them; miss: none had.",
            ["source"],
        )
        self.unread_blocks = counter(
            "kvtier_pool_unread_blocks",
            "Blocks that a tier below had and that were a miss: neither memory nor the buffers beside it had room.",
            ["tier"],
        )
        self.sent_bytes = counter("kvtier_pool_sent_bytes", "Payload bytes handed to readers.")
        self.written_blocks = counter("kvtier_pool_written_blocks", "Blocks received, by answer.", ["status"])
        self.received_bytes = counter("kvtier_pool_received_bytes", "Payload bytes stored.")
        self.pins = counter("kvtier_pool_pins", "Blocks asked to be pinned in memory, by answer.", ["status"])
        self.pinned_blocks = gauge("kvtier_pool_pinned_blocks", "Blocks that are pinned in memory.")
        self.pinned_bytes = gauge("kvtier_pool_pinned_bytes", "Payload bytes of those.")
        self.pinned_slab_bytes = gauge(
            "kvtier_pool_pinned_slab_bytes", "Memory of slabs with pinned blocks, which is what pin_share bounds."
        )
        self.written_down_blocks = counter(
            "kvtier_pool_written_down_blocks",
            "Blocks on their way from memory to a tier below, by end; dropped: the queue was full or memory needed its "
            "room; declined: the tier's admission kept them out.",
            ["tier", "result"],
        )
        self.write_down_queue_bytes = gauge(
            "kvtier_pool_write_down_queue_bytes", "Payload bytes pinned until the tier has them.", ["tier"]
        )
        self.evicted_unwritten = counter(
            "kvtier_pool_evicted_unwritten",
            "Blocks that left memory while a tier that should have had them did not: forgotten by it.",
            ["tier"],
        )
        self.declined_blocks = declined_blocks(registry)
        for source in ("memory", "miss"):
            self.read_blocks.labels(source)
            self.looked_up_blocks.labels(source)
        for status in WriteStatus:
            self.written_blocks.labels(status.name.lower())

    def count_looked_up(self, found: Mapping[str, int], num_blocks: int) -> None:
        """Counts blocks that were looked up: those found, by tier, and the rest of all of them as misses."""
        for source, amount in (*found.items(), ("miss", num_blocks - sum(found.values()))):
            if amount:
                self.looked_up_blocks.labels(source).inc(amount)

    def count_read(self, sources: Iterable[str], nbytes: int) -> None:
        """Counts blocks that were asked for, by where they were found, and the payload bytes of all that were."""
        for source, amount in Counting(sources).items():
            self.read_blocks.labels(source).inc(amount)
        self.sent_bytes.inc(nbytes)

    def count_written(self, status: WriteStatus, nbytes: int, num_blocks: int) -> None:
        """Counts blocks that were to be written, by answer, and the payload bytes of those that are stored."""
        self.written_blocks.labels(status.name.lower()).inc(num_blocks)
        self.received_bytes.inc(nbytes)

    def prepare_tier(self, tier: str) -> None:
        """Makes the samples of a tier below memory, so that they read 0 before anything happened."""
        for result in WRITE_DOWN_RESULTS:
            self.written_down_blocks.labels(tier, result)
        self.read_blocks.labels(tier)
        self.unadmitted_blocks.labels(tier)
        self.looked_up_blocks.labels(tier)
        self.unread_blocks.labels(tier)
        self.write_down_queue_bytes.labels(tier)
        self.evicted_unwritten.labels(tier)
