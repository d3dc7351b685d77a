"""What the tier did, as vLLM's native offloading shows it to Prometheus: beside vLLM's own counters of jobs."""

from collections import Counter

from prometheus_client import Counter as PrometheusCounter
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingMetricMetadata

from kvtier.clock import MONOTONIC, Clock
from kvtier.metrics import Metrics

_BLOCKS = "vllm:kvtier_tier_blocks"
_CORRUPT = "vllm:kvtier_tier_corrupt_blocks"
_ERRORS = "vllm:kvtier_tier_io_errors"
_LOOK_S = 1.0
"""How often the tier's counters are looked at when no job ends: a look takes a tenth of a millisecond."""

DEFINITIONS: dict[str, OffloadingMetricMetadata] = {
    _BLOCKS: OffloadingCounterMetadata(
        "Chunks by what was asked of the cache pool and what it answered; "
        "`late` and `dropped` are those that were not waited for.",
        ("op", "status"),
    ),
    _CORRUPT: OffloadingCounterMetadata("Chunks that came garbled or swapped; each was a miss."),
    _ERRORS: OffloadingCounterMetadata("Calls to the cache pool that failed, by error.", ("op", "error")),
}


class TierStats:
    """Collects for vLLM, which takes after each step. Scheduler thread only."""

    def __init__(self, metrics: Metrics, *, clock: Clock = MONOTONIC) -> None:
        """:param metrics: those of the tier."""
        self._sources: tuple[tuple[str, PrometheusCounter, tuple[str, ...]], ...] = (
            (_BLOCKS, metrics.tier_blocks, ("op", "status")),
            (_CORRUPT, metrics.corrupt_blocks, ()),
            (_ERRORS, metrics.io_errors, ("op", "error")),
        )
        self._clock = clock
        self._look_at = clock()
        self._known: Counter[tuple[str, tuple[str, ...]]] = Counter()
        """What of the tier's counters vLLM has."""
        self._collected = OffloadingConnectorStats()

    def note(self, op: str, status: str, amount: int = 1) -> None:
        """Counts chunks of which the tier does not know."""
        self._collected.increase_counter(_BLOCKS, amount, (op, status))

    def look_next(self) -> None:
        """Jobs have ended: what they did is told at once, since no step may follow for long."""
        self._look_at = self._clock()

    def take(self) -> OffloadingConnectorStats | None:
        """What came since the last call; None when nothing did."""
        if self._clock() >= self._look_at:
            self._look_at = self._clock() + _LOOK_S
            self._look()
        if self._collected.is_empty():
            return None
        collected, self._collected = self._collected, OffloadingConnectorStats()
        return collected

    def _look(self) -> None:
        totals: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for name, source, labels in self._sources:
            for sample in (sample for family in source.collect() for sample in family.samples):
                if sample.name.endswith("_total"):
                    totals[name, tuple(sample.labels[label] for label in labels)] += int(sample.value)
        for (name, labels), amount in (totals - self._known).items():
            self._collected.increase_counter(name, amount, labels)
        self._known = totals
