"""`docs/metrics.md`: every metric, its labels with their values, what it counts, and what to do with it.

python tools/metrics_page.py            whether the page is as the code is; exit status 1 if not
python tools/metrics_page.py --write    writes it
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from kvtier.build.key_info import describe_keys
from kvtier.codec.stored_form import Codec
from kvtier.device.kv import MemoryUse
from kvtier.metrics import LEVELS_HELP, Metrics
from kvtier.offload import HierarchyMetrics
from kvtier.store.metrics import StoreMetrics
from kvtier.store.tenant_counts import Counts
from kvtier.system.process_metrics import describe_process
from kvtier.tiers.common.gauges import MemoryGauges, RankMemory
from kvtier.tiers.common.metered import TierCounts, TimedCalls
from kvtier.tiers.common.packer import counted_forms
from kvtier.tiers.pool.path_counts import PathCounts
from kvtier.tiers.pool.tier import counted_pins
from kvtier_engine.scheduling.metrics import EngineMetrics
from kvtier_gateway.engines.gauges import EngineGauges
from kvtier_gateway.events.subscriptions import EventCounts
from kvtier_gateway.metrics import OUTCOMES, GatewayMetrics
from kvtier_pool.metrics import PoolMetrics, UnwrittenBlocks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "metrics.md"
USES = ROOT / "tools" / "metrics_uses.txt"
"""A line for each metric: its name, and what to do with it."""
ENGINE_TIERS, POOL_TIERS = ("disk", "pool"), ("memory", "disk", "redis")
OPEN = {
    "op": "`lookup`, `read`, `write`, `discard`, `probe`, and others of a disk",
    "tier": "names of tiers",
    "error": "`BreakerOpen`, `UnavailableError`, `UnauthenticatedError`, `TierProcess`, `ENOSPC`, `EIO`, `ETIMEDOUT`, "
    "other names of errors",
    "tenant": "configured names; of a pool for operators only, of a gateway as its `metrics_access` says",
    "condition": "names of conditions ([policies.md](policies.md))",
    "limit": "`max_connections`, `num_threads`, `max_calls_in_flight`, `max_event_streams`, `max_requests_per_s`, "
    "`max_bytes_per_s`",
    "verb": "names of verbs",
    "code": "names of gRPC's codes",
    "result": "`ok`, names of errors, `lost`",
    "version": "of kvtier",
    "python_version": "of Python",
    "status": "`pinned`, `miss`, `full`, `not_offered`; of a gateway, HTTP's",
    "namespace": "32 hex digits",
    "tokens_per_block": "a number",
    "key": "names of `[api_keys]`, as `metrics_access` says",
    "engine": "URLs",
    "outcome": f"`{'`, `'.join(OUTCOMES)}`",
    "reason": "words of the strategy",
    "parameter": "names of parameters",
}
"""Values of labels that nothing lists at the start of a process."""
OPEN_OF = {
    "kvtier_gateway_refusals_total": {
        "code": "codes of errors ([gateway.md](gateway.md)), and HTTP's status for those without one"
    }
}
"""Texts of labels that mean something else in one metric."""
MARK = "<!-- What follows is written by `python tools/metrics_page.py --write`. -->"


_CHANGES = "Changes of weights while vLLM runs; after an unknown one, nothing is loaded or saved"


@dataclass(frozen=True, slots=True)
class Row:
    """A metric of one kind of process."""

    name: str
    kind: str
    help: str
    labels: dict[str, list[str]]
    """Values of each label that have a sample from the start."""


def sections() -> dict[str, list[Row]]:
    """The metrics by the processes that have them."""
    engine, pool = _engine(), _pool()
    names = {row.name for row in engine} & {row.name for row in pool}
    merged = [
        _merged(row, next(other for other in pool if other.name == row.name)) for row in engine if row.name in names
    ]
    return {
        "Engines and pools": merged,
        "Engines: ours, vLLM and SGLang": [r for r in engine if r.name not in names and "_engine_" not in r.name],
        "kvtier's own engine": [row for row in engine if "_engine_" in row.name],
        "vLLM": [
            Row(
                "kvtier_weight_changes_total",
                "counter",
                _CHANGES,
                {"weights": ["known", "unknown"]},
            )
        ],
        "Pools": [row for row in pool if row.name not in names],
        "Gateways": _gateway(),
    }


def _engine() -> list[Row]:
    registry = CollectorRegistry()
    describe_process(registry)
    metrics = Metrics(registry)
    hierarchy = HierarchyMetrics(metrics)
    hierarchy.begin(ENGINE_TIERS)
    engine = EngineMetrics(registry)
    keys = SimpleNamespace(info=describe_keys(registry, [], 0))
    MemoryGauges(registry, lambda: RankMemory(0, 0, MemoryUse()))
    for tier in ENGINE_TIERS:
        TimedCalls(tier, metrics)
        metrics.begin(tier)
    counted_pins("pool", metrics)
    for codec in Codec:
        counted_forms(codec, "disk", metrics)
    for path in ("shm", "unix", "tcp", "tls", "grpc"):
        PathCounts(path, metrics)
    metrics.levels.take({(name, tier): 0.0 for name in LEVELS_HELP for tier in ("host", *ENGINE_TIERS)})
    return _rows(registry, [metrics, hierarchy, hierarchy.prefix, engine, keys])


def _pool() -> list[Row]:
    registry = CollectorRegistry()
    describe_process(registry)
    metrics = Metrics(registry)
    store, pool = StoreMetrics(registry), PoolMetrics(registry)
    registry.register(UnwrittenBlocks(lambda: [("a tenant", Counts())]))
    TierCounts("memory", metrics, has_lookups=False)
    for tier in POOL_TIERS:
        metrics.begin(tier)
    for tier in POOL_TIERS[1:]:
        counted_forms(Codec.RAW, tier, metrics)
        TimedCalls(tier, metrics)
        store.prepare_tier(tier)
    metrics.levels.take({(name, tier): 0.0 for name in LEVELS_HELP for tier in POOL_TIERS})
    return _rows(registry, [metrics, store, pool])


def _gateway() -> list[Row]:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    EngineGauges(registry, list)
    EventCounts(registry, lambda: (0, 0))
    return _rows(registry, [metrics])


def _rows(registry: CollectorRegistry, holders: Iterable[object]) -> list[Row]:
    declared = {
        metric._name: metric._labelnames  # type: ignore[attr-defined]
        for holder in holders
        for metric in vars(holder).values()
        if isinstance(metric, MetricWrapperBase)
    }
    rows = []
    for family in registry.collect():
        labels: dict[str, list[str]] = {label: [] for label in declared.get(family.name, ())}
        for sample in family.samples:
            for label, value in sample.labels.items():
                if (
                    label != "le"
                    and value not in labels.setdefault(label, [])
                    and label not in ("version", "python_version")
                ):
                    labels[label].append(value)
        name = family.name + ("_total" if family.type == "counter" else "")
        rows.append(Row(name, family.type, family.documentation.rstrip("."), labels))
    return rows


def _merged(one: Row, other: Row) -> Row:
    labels = {
        label: list(dict.fromkeys([*values, *other.labels.get(label, [])])) for label, values in one.labels.items()
    }
    return Row(one.name, one.kind, one.help, labels)


def render() -> str:
    """The page. Raises `KeyError` where nobody has said what a metric is for."""
    uses = dict(line.split(" ", 1) for line in USES.read_text().splitlines() if line)
    told = [row.name for rows in sections().values() for row in rows]
    if stale := uses.keys() - set(told):
        raise KeyError(f"{USES.name}: there are no metrics {sorted(stale)}")
    head = PAGE.read_text().split(MARK)[0]
    return f"{head}{MARK}\n\n" + "\n".join(_section(title, rows, uses) for title, rows in sections().items())


def _section(title: str, rows: Iterable[Row], uses: dict[str, str]) -> str:
    lines = [f"## {title}", "", "| metric | labels | what it says | what to do with it |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{row.name}` ({row.kind}) | {'; '.join(_labels(row)) or 'none'} | {row.help} | {uses[row.name]} |"
        for row in rows
    ]
    return "\n".join([*lines, ""])


def _labels(row: Row) -> Iterator[str]:
    for label, values in row.labels.items():
        is_open = not values or label == "tenant" or (row.name == "kvtier_io_errors_total" and label != "tier")
        known = ", ".join(f"`{value}`" for value in values)
        told = (OPEN | OPEN_OF.get(row.name, {})).get(label, "") if is_open else known
        yield f"`{label}`: {told}"


def main() -> int:
    """Writes or compares the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    page = render()
    if parser.parse_args().write:
        PAGE.write_text(page)
    elif PAGE.read_text() != page:
        print("docs/metrics.md is not what the code has: python tools/metrics_page.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
