"""What the tests of the dashboard and of Prometheus share."""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"
sys.path.insert(0, str(ROOT / "tools"))
import dashboard as tool  # noqa: E402 - from tools/, which is no package
import metrics_page  # noqa: E402

__all__ = ["DASHBOARD", "FOLDER", "GRAPHS", "ROOT", "known", "metrics_page", "plain", "tool"]
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana" / "kvtier.json").read_text())
GRAPHS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def known() -> set[str]:
    """The names of all metrics that the page tells of."""
    return {row.name for rows in metrics_page.sections().values() for row in rows}


def plain(query: str) -> str:
    """A query as Grafana sends it."""
    return query.replace("$__rate_interval", "5m").replace("$instance", ".*")
