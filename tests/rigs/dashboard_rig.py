"""What the tests of the dashboard and of Prometheus share."""

import json
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"
sys.path.insert(0, str(ROOT / "tools"))
import dashboard as tool  # noqa: E402 - from tools/, which is no package
import metrics_page  # noqa: E402

__all__ = [
    "DASHBOARD",
    "FOLDER",
    "GRAPHS",
    "ROOT",
    "check_against_docs",
    "known",
    "metrics_page",
    "of_engines",
    "ours_in_vllm",
    "plain",
    "tool",
]
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana" / "kvtier.json").read_text())
GRAPHS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def known() -> set[str]:
    """The names of all metrics that the page tells of."""
    return {row.name for rows in metrics_page.sections().values() for row in rows}


def of_engines() -> set[str]:
    """The names of those of kvtier's metrics that engines of all kinds have."""
    rows = [row for title, rows in metrics_page.sections().items() if title.startswith("Engines") for row in rows]
    return {row.name for row in rows if row.name.startswith("kvtier_")}


def ours_in_vllm(page: str) -> str:
    """The part of vLLM's page that is kvtier's, with the names that it has elsewhere, without times of creation."""
    lines = [line for line in page.splitlines() if "vllm:kvtier_" in line and "_created" not in line]
    return "\n".join(line.replace("vllm:", "") for line in lines)


def check_against_docs(page: str, *, silent: Collection[str] = ()) -> None:
    """Holds a process's page of metrics against docs/metrics.md, and every metric on it has a sample.

    :param silent: metrics that have none before something has happened.
    """
    shown = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE ")}
    assert shown - known() == set(), "docs/metrics.md lacks these"
    sampled = {re.split("[{ ]", line)[0] for line in page.splitlines() if line and not line.startswith("#")}
    assert {name for name in shown if sampled.isdisjoint({name, f"{name}_count"})} == {*silent}


def plain(query: str) -> str:
    """A query as Grafana sends it."""
    return query.replace("$__rate_interval", "5m").replace("$instance", ".*")
