"""What the connector did, as vLLM logs it and shows it to Prometheus.

vLLM's own numbers count what was offered: a load that failed is a hit to them. These count what came of it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import prometheus_client
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.offload.jobs import JobResult

_LOADED, _FAILED, _SAVED = "loaded_blocks", "failed_blocks", "saved_blocks"
_GAINED = "gained_bytes"
_CHANGES = "weight_changes"
_SOURCES = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
"""The names that vLLM has for our tiers. It has none for the pool."""


def sources_of(tiers: Iterable[str], tokens_per_block: int) -> dict[CacheHitSource, int]:
    """Tokens by where their blocks are."""
    counts = Counter(_SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED) for tier in tiers)
    return {source: amount * tokens_per_block for source, amount in counts.items()}


@dataclass
class KvtierStats(KVConnectorStats):
    """Counts since the last look: blocks by what became of them, `loaded_blocks.TIER`, `failed_blocks`, `saved_blocks`;
    `weight_changes.known` or `.unknown`; and `gained_bytes.KIND`, how much more memory all ranks take for the tiers,
    which may be less than nothing."""

    def note(self, result: JobResult) -> None:
        """The end of a load or save."""
        if result.kind == "load":
            self._add(_FAILED, len(result.failed))
            for tier, amount in Counter(tier for tier in result.tiers if tier).items():
                self._add(f"{_LOADED}.{tier}", amount)
        else:
            self._add(_SAVED, len(result.tiers) - len(result.failed) - len(result.found))

    def note_memory(self, gained_bytes: Mapping[str, int]) -> None:
        """:param gained_bytes: by kind; see `kvtier.tiers.common.gauges.RankMemory`."""
        for kind, nbytes in gained_bytes.items():
            self._add(f"{_GAINED}.{kind}", nbytes)

    def note_weights(self, *, are_known: bool) -> None:
        """Weights, an adapter or the device have changed: whether blocks are kept from now on."""
        self._add(f"{_CHANGES}.{'known' if are_known else 'unknown'}", 1)

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, amount in other.data.items():
            self._add(name, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data

    def _add(self, name: str, amount: int) -> None:
        if amount:
            self.data[name] = self.data.get(name, 0) + amount


class KvtierPromMetrics(KVConnectorPromMetrics):
    """The numbers of `KvtierStats` as counters, and memory as a gauge.

    Names begin with `vllm:`, or vLLM would not take them back with an engine.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[prometheus_client.Counter]
        self._counters = {
            _LOADED: counter("vllm:kvtier_loaded_blocks", "Blocks loaded, by tier.", [*labelnames, "tier"]),
            _FAILED: counter("vllm:kvtier_failed_blocks", "Blocks offered that could not be loaded.", labelnames),
            _SAVED: counter(
                "vllm:kvtier_saved_blocks", "Blocks copied to host memory, which did not have them.", labelnames
            ),
            _CHANGES: counter(
                "vllm:kvtier_weight_changes",
                "Changes of weights while vLLM runs; after an unknown one, nothing is loaded or saved.",
                [*labelnames, "weights"],
            ),
        }

        self._memory = metric_types[prometheus_client.Gauge](
            "vllm:kvtier_memory_bytes",
            "Memory that all ranks take for the tiers: arena, leased from the pool, pinned of both, device staging.",
            [*labelnames, "kind"],
            multiprocess_mode="mostrecent",
        )
        self._taken_bytes: Counter[tuple[int, str]] = Counter()
        """The bytes taken, by engine and kind. They are kept here since a gauge on Ray can only be set."""

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Adds what `KvtierStats` has collected."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, amount in transfer_stats_data.items():
            kind, _, which = name.partition(".")
            if kind == _GAINED:
                self._taken_bytes[engine_idx, which] += amount
                self._memory.labels(*labels, which).set(self._taken_bytes[engine_idx, which])
            elif kind in self._counters:
                self._counters[kind].labels(*labels, *([which] if which else [])).inc(amount)
