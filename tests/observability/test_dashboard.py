"""The dashboard: Grafana's model of it holds together, and every query is of metrics that exist."""

import importlib.metadata
import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboard_rig import DASHBOARD, FOLDER, GRAPHS, ROOT, known, metrics_page, plain, tool
from promtool import promtool

NAME = re.compile(r"\b(?:\(vllm:\)\?)?kvtier_[a-z_()?]+")
SUFFIXES = re.compile(r"_(bucket|sum|count)$")


def names_in(query: str) -> set[str]:
    """The metrics that a query selects; `(pool_)?` stands for both."""
    found: set[str] = set()
    for name in NAME.findall(query):
        plain = name.removeprefix("(vllm:)?")
        found |= {plain.replace("(pool_)?", "pool_"), plain.replace("(pool_)?", "")}
    return found


def test_pages_and_dashboard_are_as_the_code_has_them() -> None:
    assert metrics_page.PAGE.read_text() == metrics_page.render(), "run: python tools/metrics_page.py --write"
    (refusals,) = (row for row in metrics_page.sections()["Gateways"] if row.name == "kvtier_gateway_refusals_total")
    assert any("`code`: codes of errors" in label for label in metrics_page._labels(refusals)), "gRPC's are of pools"
    assert tool.dashboard() == DASHBOARD, "run: python tools/dashboard.py --write"


def test_the_model_holds_together() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] <= 24 - place["w"]
    for one, other in combinations(DASHBOARD["panels"], 2):
        assert not overlap(one["gridPos"], other["gridPos"]), f"{one['title']} lies on {other['title']}"
    assert len({panel["title"] for panel in GRAPHS}) == len(GRAPHS)
    for panel in GRAPHS:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        used = set(re.findall(r"\$(\w+)", " ".join(target["expr"] for target in panel["targets"])))
        assert used <= {*variables, "__rate_interval"}


def test_grafanas_own_model_has_every_key() -> None:
    """Read into it and written again, the dashboard is what it was, with defaults beside."""
    register_default_plugins()
    version = importlib.metadata.version("grafana-foundation-sdk").partition("!")[2].rpartition(".")[0]
    assert f"grafana/grafana:{version}." in (ROOT / "docker-compose.yml").read_text(), "the model is of another release"
    assert list(lost(DASHBOARD, json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD))))) == []
    wrong = {**DASHBOARD, "tittle": "kvtier"}
    assert list(lost(wrong, json.loads(JSONEncoder().encode(Dashboard.from_json(wrong))))) == ["/tittle"]


def lost(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """The places of values that are other ones afterwards, or none."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after.get(key), f"{place}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from lost(one, other, f"{place}/{number}")
    elif before != after:
        yield place


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return (
        one["x"] < other["x"] + other["w"]
        and other["x"] < one["x"] + one["w"]
        and one["y"] < other["y"] + other["h"]
        and other["y"] < one["y"] + one["h"]
    )


@pytest.mark.parametrize("file", ["alerts.yml", "grafana/kvtier.json"])
def test_queries_are_of_metrics_that_exist(file: str) -> None:
    names = names_in((FOLDER / file).read_text())
    assert len(names) > 10
    assert {SUFFIXES.sub("", name) for name in names} <= known() | {"kvtier_"}


def test_the_compose_profile_mounts_what_is_there_and_listens_on_loopback() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    profile = {name: service for name, service in services.items() if service.get("profiles") == ["observability"]}
    assert profile.keys() == {"prometheus", "grafana"}
    for service in profile.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        files = [volume.split(":")[0] for volume in service["volumes"] if volume.startswith("./")]
        assert files
        assert all((ROOT / file).is_file() for file in files)
    source = yaml.safe_load((FOLDER / "grafana" / "datasource.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((FOLDER / "grafana" / "dashboards.yml").read_text())["providers"]
    assert f"kvtier.json:{provider['options']['path']}/kvtier.json:ro" in " ".join(profile["grafana"]["volumes"])


def test_prometheus_parses_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"dashboard:{panel['id']}:{target['refId'].lower()}", "expr": plain(target["expr"])}
        for panel in GRAPHS
        for target in panel["targets"]
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", path)
