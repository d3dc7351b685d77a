"""What the connector did, as vLLM logs it and shows it to Prometheus.

vLLM's own numbers count what was offered: a load that failed is a hit to them. These count what came of it. They are
those that kvtier's own engine has (docs/metrics.md), added up over scheduler, workers and their I/O processes.
"""

import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.build.tiers import begin_metrics, names_of_tiers
from kvtier.config import Config
from kvtier.device.kv import MemoryUse
from kvtier.metrics import LEVELS, Levels, Metrics
from kvtier.offload import HierarchyMetrics
from kvtier.tiers.common.gauges import MemoryGauges, RankMemory
from kvtier.tiers.common.metered import TimedCalls
from kvtier_vllm.observe.relay import Reading, parse, readings
from kvtier_vllm.observe.replay import replay

_LOGGED = ("kvtier_loaded_blocks", "kvtier_failed_blocks", "kvtier_saved_blocks")
"""What vLLM's log has of it, without the prefix."""
_SOURCES = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
"""The names that vLLM has for our tiers. It has none for the pool."""


def sources_of(tiers: Iterable[str], tokens_per_block: int) -> dict[CacheHitSource, int]:
    """Tokens by where their blocks are."""
    counts = Counter(_SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED) for tier in tiers)
    return {source: amount * tokens_per_block for source, amount in counts.items()}


def weight_changes(registry: CollectorRegistry) -> prometheus_client.Counter:
    """The counter of changes of weights; one for each registry."""
    counter = prometheus_client.Counter(
        "kvtier_weight_changes",
        "Changes of weights while vLLM runs; after an unknown one, nothing is loaded or saved",
        ["weights"],
        registry=registry,
    )
    for weights in ("known", "unknown"):
        counter.labels(weights)
    return counter


@dataclass
class KvtierStats(KVConnectorStats):
    """What numbers have gained since the last look, by `Reading.key`."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, amount in other.data.items():
            self.data[key] = self.data.get(key, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """Blocks by what became of them, for a line of the log: the rest is for Prometheus."""
        totals: Counter[str] = Counter()
        for key, amount in self.data.items():
            _, name, labels = parse(key)
            if name in _LOGGED:
                totals[".".join([name.removeprefix("kvtier_"), *labels.values()])] += amount
        return dict(sorted(totals.items()))

    def is_empty(self) -> bool:
        return not self.data


def zero_registry(config: Config | None) -> CollectorRegistry:
    """All that the processes of an engine with this configuration count, at 0: what there is before anything has
    happened. None: of no tier below host memory."""
    metrics, tiers = Metrics(), [] if config is None else names_of_tiers(config)
    hierarchy = HierarchyMetrics(metrics)
    hierarchy.begin(tiers)
    if config is not None:
        begin_metrics(config, metrics)
    for tier in tiers:
        TimedCalls(tier, metrics)
    breakers, *usages = LEVELS
    levels: Levels = {(name, tier): 0.0 for name in usages for tier in ("host", "disk") if tier in ("host", *tiers)}
    if "pool" in tiers:
        levels[breakers, "pool"] = 0.0
    metrics.levels.take(levels)
    MemoryGauges(metrics.registry, lambda: RankMemory(0, 0, MemoryUse(0, 0, 0.0)))
    weight_changes(metrics.registry)
    return metrics.registry


class KvtierPromMetrics(KVConnectorPromMetrics):
    """The numbers of `KvtierStats` as metrics of vLLM's, with samples of 0 from the start.

    Names begin with `vllm:`, or vLLM would not take them back with an engine.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        *,
        config: Config | None,
    ) -> None:
        """:param config: of the engine that is shown; None: one without tiers below host memory."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        """The figures by name, without the prefix."""
        self._bounds: dict[str, list[float]] = {}
        """Upper bounds of the buckets of each histogram."""
        self._levels: Counter[tuple[int, str]] = Counter()
        """Values of gauges, by engine and key. They are kept here since a gauge on Ray can only be set."""
        self._help: dict[str, str] = {}
        zeros = zero_registry(config)
        self._help = {family.name: family.documentation for family in zeros.collect()}
        at_zero = list(readings(zeros))
        self._bounds = _bounds_of(at_zero)
        for engine_idx in per_engine_labelvalues:
            for reading in at_zero:
                self._add(reading.kind, reading.name, reading.labels, 0.0, engine_idx)
        self._say_release()

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Adds what `KvtierStats` has collected."""
        observed: dict[tuple[str, tuple[tuple[str, str], ...]], dict[str, float]] = {}
        for key, amount in transfer_stats_data.items():
            kind, name, labels = parse(key)
            if kind == "histogram":
                le = labels.pop("le", "sum")
                observed.setdefault((name, tuple(labels.items())), {})[le] = amount
            else:
                self._add(kind, name, labels, amount, engine_idx)
        for (name, labels_of), gains in observed.items():
            child = self._child("histogram", name, dict(labels_of), engine_idx)
            replay(child.observe, self._bounds[name], gains)

    def _add(self, kind: str, name: str, labels: Mapping[str, str], amount: float, engine_idx: int) -> None:
        child = self._child(kind, name, {label: v for label, v in labels.items() if label != "le"}, engine_idx)
        if kind == "gauge":
            level = (engine_idx, "\t".join([name, *labels.values()]))
            self._levels[level] += amount  # type: ignore[assignment]
            child.set(self._levels[level])
        elif kind == "counter" and amount:
            child.inc(amount)

    def _child(self, kind: str, name: str, labels: Mapping[str, str], engine_idx: int) -> Any:
        metric = self._metrics.get(name)
        if metric is None:
            metric = self._metrics[name] = self._make(kind, name, list(labels))
        return metric.labels(*self.per_engine_labelvalues[engine_idx], *labels.values())

    def _make(self, kind: str, name: str, labels: list[str]) -> Any:
        text, labelnames = self._help.get(name, name), [*self._labelnames, *labels]
        if kind == "gauge":
            return self._gauge_cls(f"vllm:{name}", text, labelnames, multiprocess_mode="mostrecent")
        if kind == "histogram":
            return self._histogram_cls(f"vllm:{name}", text, labelnames, buckets=self._bounds[name])
        return self._counter_cls(f"vllm:{name}", text, labelnames)

    def _say_release(self) -> None:
        release = {"version": version("kvtier"), "python_version": platform.python_version()}
        for engine_idx in self.per_engine_labelvalues:
            self._child("gauge", "kvtier_build_info", release, engine_idx).set(1)


def _bounds_of(at_zero: Iterable[Reading]) -> dict[str, list[float]]:
    bounds: dict[str, dict[float, None]] = {}
    for reading in at_zero:
        if (le := reading.labels.get("le", "+Inf")) != "+Inf":
            bounds.setdefault(reading.name, {})[float(le)] = None
    return {name: list(found) for name, found in bounds.items()}
