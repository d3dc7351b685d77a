"""Grafana's dashboard of pools and engines, `deploy/observability/grafana/kvtier.json`.

python tools/dashboard.py            whether the file is as made here; exit status 1 if not
python tools/dashboard.py --write    writes it
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "deploy" / "observability" / "grafana" / "kvtier.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, PER_ROW = 8, 8, 3

Query = tuple[str, str]
"""An expression and its legend."""


def both(name: str, more: str = "") -> str:
    """The selector of a metric that engines in vLLM have under their prefix."""
    return f'{{__name__=~"(vllm:)?{name}", instance=~"$instance"{more}}}'


def only(name: str, more: str = "") -> str:
    """The selector of a metric that pools, or our own engine, have."""
    return f'{name}{{instance=~"$instance"{more}}}'


def rate(selector: str, by: str) -> str:
    """A rate a second, added up."""
    return f"sum by ({by}) (rate({selector}[$__rate_interval]))"


def quantile(part: float, selector: str, by: str) -> str:
    """A quantile of a histogram's buckets."""
    return f"histogram_quantile({part}, {rate(selector, f'le, {by}')})"


HIT, ASKED = both("kvtier_hit_tokens_total"), both("kvtier_requested_tokens_total")
BATCH = both("kvtier_tier_batch_seconds_bucket", ', op=~"read|write"')
POOL_READS = only("kvtier_pool_read_blocks_total")

ROWS: list[tuple[str, list[tuple[str, str, list[Query]]]]] = [
    (
        "Does it help?",
        [
            (
                "Hit rate below the device, by tier",
                "percentunit",
                [(f"{rate(HIT, 'tier')} / ignoring(tier) group_left sum({rate(ASKED, 'job')})", "{{tier}}")],
            ),
            ("Prompt tokens not computed", "short", [(rate(both("kvtier_fetched_tokens_total"), "tier"), "{{tier}}")]),
            (
                "Hits computed all the same",
                "short",
                [(rate(both("kvtier_recomputed_tokens_total"), "reason"), "{{reason}}")],
            ),
            (
                "Pool: where blocks were found",
                "short",
                [(rate(POOL_READS, "source"), "{{source}}")],
            ),
            (
                "Time to first token",
                "s",
                [
                    (
                        quantile(part, only("kvtier_engine_ttft_seconds_bucket"), "instance"),
                        f"{{{{instance}}}} p{part:.0%}",
                    )
                    for part in (0.5, 0.99)
                ],
            ),
            (
                "Requests of kvtier's engine",
                "short",
                [(rate(only("kvtier_engine_requests_total"), "reason"), "{{reason}}")],
            ),
        ],
    ),
    (
        "Tiers",
        [
            ("Bytes a second by tier", "Bps", [(rate(both("kvtier_tier_bytes_total"), "tier, op"), "{{tier}} {{op}}")]),
            ("Bytes a second by path", "Bps", [(rate(both("kvtier_path_bytes_total"), "path, op"), "{{path}} {{op}}")]),
            (
                "Time of a batch, median and p99",
                "s",
                [(quantile(part, BATCH, "tier, op"), f"{{{{tier}}}} {{{{op}}}} p{part:.0%}") for part in (0.5, 0.99)],
            ),
            (
                "How full",
                "percentunit",
                [
                    (
                        f"sum by (instance, tier) ({both('kvtier_tier_used_bytes')})"
                        f" / sum by (instance, tier) ({both('kvtier_tier_capacity_bytes')})",
                        "{{instance}} {{tier}}",
                    )
                ],
            ),
            ("Evictions", "short", [(rate(both("kvtier_tier_evicted_blocks_total"), "tier"), "{{tier}}")]),
            ("Memory of engines", "bytes", [(f"sum by (kind) ({both('kvtier_memory_bytes')})", "{{kind}}")]),
        ],
    ),
    (
        "Trouble",
        [
            (
                "Open breakers",
                "short",
                [(f"max by (instance, tier) ({both('kvtier_open_breakers')})", "{{instance}} {{tier}}")],
            ),
            ("Errors", "short", [(rate(both("kvtier_io_errors_total"), "tier, error"), "{{tier}} {{error}}")]),
            (
                "Corrupt and unopened blocks",
                "short",
                [
                    (rate(both("kvtier_corrupt_blocks_total"), "tier"), "{{tier}} corrupt"),
                    (rate(both("kvtier_unopened_blocks_total"), "tier, reason"), "{{tier}} {{reason}}"),
                ],
            ),
            (
                "Refusals",
                "short",
                [
                    (
                        rate(only("kvtier_pool_written_blocks_total", ', status=~"full|throttled|failed"'), "status"),
                        "write {{status}}",
                    ),
                    (rate(only("kvtier_pool_logins_refused_total"), "reason"), "login {{reason}}"),
                    (rate(only("kvtier_pool_strangers_refused_total"), "door, reason"), "{{door}} wrong {{reason}}"),
                    (rate(only("kvtier_pool_block_connections_refused_total"), "job"), "max_connections"),
                    (rate(both("kvtier_tier_declined_blocks_total"), "tier, condition"), "{{tier}} {{condition}}"),
                ],
            ),
            ("Deadlines missed", "short", [(rate(both("kvtier_deadlines_missed_total"), "verb"), "{{verb}}")]),
            (
                "Disk: what it may do",
                "short",
                [(f"sum by (instance, state) ({both('kvtier_tier_state')})", "{{instance}} {{state}}")],
            ),
        ],
    ),
    (
        "Tenants, disk and Redis of pools",
        [
            (
                "Tenants refused",
                "short",
                [(rate(only("kvtier_pool_tenant_refusals_total"), "tenant, limit"), "{{tenant}} {{limit}}")],
            ),
            (
                "Tenants delayed",
                "short",
                [(rate(only("kvtier_pool_tenant_delays_total"), "tenant, limit"), "{{tenant}} {{limit}}")],
            ),
            ("Connections of engines", "short", [(only("kvtier_pool_block_connections"), "{{instance}}")]),
            (
                "Written down by result",
                "short",
                [(rate(only("kvtier_pool_written_down_blocks_total"), "tier, result"), "{{tier}} {{result}}")],
            ),
            (
                "Waiting to be written down",
                "bytes",
                [(f"sum by (instance, tier) ({only('kvtier_pool_write_down_queue_bytes')})", "{{instance}} {{tier}}")],
            ),
            (
                "Lost on the way down",
                "short",
                [
                    (rate(only("kvtier_pool_evicted_unwritten_total"), "tier"), "pool, {{tier}}"),
                    (rate(both("kvtier_evicted_unwritten_total"), "tier"), "engines, {{tier}}"),
                ],
            ),
            (
                "Disk: bytes written, new and moved",
                "Bps",
                [(rate(both("kvtier_disk_record_bytes_total"), "why"), "{{why}}")],
            ),
            (
                "Redis: time of a batch, p99",
                "s",
                [(quantile(0.99, only("kvtier_tier_batch_seconds_bucket", ', tier="redis"'), "op"), "{{op}}")],
            ),
            ("Releases", "short", [(f"count by (version) ({both('kvtier_build_info')})", "{{version}}")]),
        ],
    ),
]


def dashboard() -> dict[str, Any]:
    """Grafana's model of the dashboard."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, graphs in ROWS:
        panels.append(
            {
                "type": "row",
                "title": title,
                "id": len(panels) + 1,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
            }
        )
        y += 1
        for at, (name, unit, queries) in enumerate(graphs):
            place = {"x": at % PER_ROW * WIDTH, "y": y + at // PER_ROW * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_graph(len(panels) + 1, name, unit, queries, place))
        y += -(-len(graphs) // PER_ROW) * HEIGHT
    return {
        "uid": "kvtier",
        "title": "kvtier",
        "tags": ["kvtier"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                {
                    "name": "instance",
                    "type": "query",
                    "label": "Instance",
                    "datasource": SOURCE,
                    "query": {
                        "query": 'label_values({__name__=~"(vllm:)?kvtier_build_info"}, instance)',
                        "refId": "instance",
                    },
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                    "refresh": 2,
                },
            ]
        },
        "panels": panels,
    }


def _graph(number: int, title: str, unit: str, queries: list[Query], place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "id": number,
        "title": title,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for at, (expression, legend) in enumerate(queries)
        ],
    }


def main() -> int:
    """Writes or compares the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    text = json.dumps(dashboard(), indent=1) + "\n"
    if parser.parse_args().write:
        FILE.write_text(text)
    elif not FILE.exists() or FILE.read_text() != text:
        print(f"{FILE.name} is not what tools/dashboard.py makes: python tools/dashboard.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
