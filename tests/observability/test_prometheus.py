"""A real Prometheus scrapes a real pool with our files, answers the dashboard's queries, and raises alerts."""

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboard_rig import FOLDER, GRAPHS, check_against_docs, plain
from free_port import free_port
from pool_rig import WAIT_S, PoolProcess, connect, items, pool_process, until
from promtool import check_page, found

OF_CLIENTS = ["kvtier_path_bytes_total", "kvtier_path_seconds_total", "kvtier_pins_total"]
IF_CONFIGURED = ["kvtier_tier_declined_blocks_total", "kvtier_pool_tenant_delays_total"]
"""Conditions of admission, and rates of tenants."""
RULES = "/etc/prometheus/alerts.yml"


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PoolProcess]:
    """With a disk, and a Redis that nobody has started."""
    with pool_process(f"--disk-dir={tmp_path / 'disk'}", f"--redis-url=redis://127.0.0.1:{free_port()}") as running:
        yield running


class Prometheus:
    """With the rules that we ship; what they wait for before they fire is left out."""

    def __init__(self, folder: Path, target: str) -> None:
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())
        for group in rules["groups"]:
            for rule in group["rules"]:
                rule.pop("for", None)
        (folder / "alerts.yml").write_text(json.dumps(rules))
        assert config["rule_files"] == [RULES]
        config["rule_files"] = [str(folder / "alerts.yml")]
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        (folder / "prometheus.yml").write_text(json.dumps(config))
        self.url = f"127.0.0.1:{free_port()}"
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [found("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--web.listen-address={self.url}",
                 f"--storage.tsdb.path={folder / 'data'}"],
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def get(self, path: str, **query: str) -> Any:
        url = f"http://{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            return json.load(answer)["data"]

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return bool(self.get("query", query="up == 1")["result"])
        except OSError:
            return False

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.get("alerts")["alerts"] if alert["state"] == "firing"}


def test_alerts_of_a_real_pool_fire(tmp_path: Path, pool: PoolProcess) -> None:
    (tmp_path / "prometheus").mkdir()
    prometheus = Prometheus(tmp_path / "prometheus", pool.http)
    try:
        until(prometheus.is_ready, 60.0)
        page = urllib.request.urlopen(f"http://{pool.http}/metrics", timeout=WAIT_S).read().decode()
        check_page(page)
        check_against_docs(page, silent=[*OF_CLIENTS, *IF_CONFIGURED])
        tier = connect(pool.block)
        for first in range(0, 80, 8):  # each is offered to the Redis, which does not answer
            tier.write(items(range(first, first + 8)))
        tier.close()
        until(lambda: {"KvtierBreakerOpen", "KvtierIoErrors"} <= prometheus.firing(), 60.0)
        for panel in GRAPHS:
            for target in panel["targets"]:
                prometheus.get("query", query=plain(target["expr"]))
        assert prometheus.get("query", query='kvtier_tier_blocks_total{tier="memory",op="write",status="stored"}')[
            "result"
        ]
        pool.kill()
        until(lambda: "KvtierPoolDown" in prometheus.firing(), 60.0)
    finally:
        prometheus.process.kill()
        prometheus.process.wait(timeout=WAIT_S)
