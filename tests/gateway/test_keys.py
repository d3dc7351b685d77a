"""API keys: whom they let in, how often, and how many at a time."""

import asyncio
import hashlib
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from prometheus_client import CollectorRegistry

from kvtier.config import parse_config
from kvtier.config.gateway import GatewayConfig, GatewayEngineConfig
from kvtier_gateway import checks, protection
from kvtier_gateway.engines.engine import Engine
from kvtier_gateway.http.api_errors import ApiError
from kvtier_gateway.keys import ApiKeys, Client
from kvtier_gateway.metrics import GatewayMetrics
from kvtier_gateway.protection import shows_tenants
from kvtier_gateway.status import Status


def config(**tables: Any) -> Any:
    data = {"tenants": {"red": {}, "blue": {}}, "api_keys": tables}
    return parse_config(data, source="k.toml", environ={})


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Time:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def refusal(keys: ApiKeys, *headers: str) -> ApiError:
    with pytest.raises(ApiError) as refused:
        keys.client_of(headers)
    assert refused.value.status == 401
    assert refused.value.headers["WWW-Authenticate"] == "Bearer"
    return refused.value


def too_many(client: Client) -> ApiError:
    with pytest.raises(ApiError) as refused, client.admitted():
        pass
    assert refused.value.status == 429
    return refused.value


def test_a_gateway_does_not_start_with_keys_that_cannot_be(tmp_path: Path) -> None:
    tables = (
        "[gateway]\nengines = ['http://127.0.0.1:1']\nlisten = '127.0.0.1:0'\nstatus_listen = '127.0.0.1:0'\n"
        f"[tenants.red]\n[tenants.blue]\n[api_keys.b]\ntenant = 'blue'\nkey_sha256 = ['{digest('key')}']\n"
    )
    file = tmp_path / "gateway.toml"
    for wrong, said in ((digest("key"), "the same token as client 'b'"), (digest(""), "the digest of an empty token")):
        file.write_text(f"{tables}[api_keys.c]\ntenant = 'red'\nkey_sha256 = ['{wrong}']\n")
        ended = subprocess.run(
            [sys.executable, "-m", "kvtier.cli.main", "gateway", "serve", "--config", str(file)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert (ended.returncode, said in ended.stderr, "Traceback" in ended.stderr) == (1, True, False), ended.stderr


def test_keys_are_of_tenants_and_end() -> None:
    clock = Time()
    ends = {"sha256": digest("ending"), "expires_at": "1970-01-01T00:20:00Z"}
    keys = ApiKeys(config(a={"tenant": "red", "key_sha256": [digest("key"), ends]}), clock)
    assert (keys.client_of(["Bearer key"]).tenant, keys.client_of(["bearer ending"]).tenant) == ("red", "red")
    clock.now_s = 1200.0
    assert "expired" in str(refusal(keys, "Bearer ending"))
    refusal(keys)
    refusal(keys, "Bearer key", "Bearer key")
    refusal(keys, "Basic key")
    refusal(keys, "Bearer ")
    refusal(keys, "Bearer " + digest("key"))
    refusal(keys, "Bearer " + "k" * 100_000)


def test_a_reload_keeps_what_runs_and_ends_what_is_gone() -> None:
    table = {"tenant": "red", "key_sha256": [digest("key")], "max_concurrent": 1}
    keys = ApiKeys(config(a=table))
    client = keys.client_of(["Bearer key"])
    with client.admitted():
        keys.set(config(a=table | {"tenant": "blue"}, b={"tenant": "red", "key_sha256": [digest("other")]}))
        assert keys.client_of(["Bearer key"]) is client
        assert client.tenant == "blue"
        assert too_many(client).body["error"]["code"] == "concurrency_limit_exceeded"
    with client.admitted():
        keys.set(config(b={"tenant": "red", "key_sha256": [digest("other")]}))
    refusal(keys, "Bearer key")


def test_rates_and_requests_at_a_time() -> None:
    clock = Time()
    table = {"tenant": "red", "key_sha256": [digest("key")], "max_concurrent": 3, "max_requests_per_s": 0.25}
    client = ApiKeys(config(a=table), monotonic=clock).client_of(["Bearer key"])
    with client.admitted():
        refused = too_many(client)
    assert (refused.headers["Retry-After"], refused.body["error"]["type"]) == ("4", "rate_limit_error")
    with ExitStack() as running:
        for _ in range(3):
            clock.now_s += 4
            running.enter_context(client.admitted())
        clock.now_s += 4
        assert "3 requests at a time" in str(too_many(client))
    with client.admitted():
        assert client.num_running == 1


def test_each_answer_counts_as_a_request() -> None:
    table = {"tenant": "red", "key_sha256": [digest("key")], "max_concurrent": 8}
    client = ApiKeys(config(a=table)).client_of(["Bearer key"])
    with client.admitted() as count, client.admitted() as other:
        count(6)
        assert client.num_running == 7
        with pytest.raises(ApiError) as refused:
            other(3)
        assert refused.value.status == 429
        with pytest.raises(ApiError, match="it asks for 9 answers, and this key may have 8 at a time") as refused:
            other(9)
        assert (refused.value.status, refused.value.body["error"]["param"]) == (400, "n")
        other(2)
        assert "8 requests at a time" in str(too_many(client))
    assert client.num_running == 0


@pytest.mark.parametrize(
    ("listen", "access", "shown"),
    [("127.0.0.1:0", "totals", True), ("[::1]:0", "totals", True), ("0.0.0.0:0", "totals", False),
     ("gateway.example:0", "totals", False), ("0.0.0.0:0", "tenants", True)],
)  # fmt: skip
def test_figures_of_tenants_and_keys_are_not_for_whoever_reaches_the_status_port(
    listen: str, access: Literal["totals", "tenants"], shown: bool
) -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    metrics.requests.labels("red", "200").inc(2)
    metrics.requests.labels("blue", "200").inc(3)
    metrics.refusals.labels("alice", "429").inc()
    is_shown = shows_tenants(GatewayConfig(status_listen=listen, metrics_access=access))
    engine = Engine("http://127.0.0.1:1", GatewayEngineConfig(url="http://127.0.0.1:1", tenants=["red"]))
    fleet: Any = SimpleNamespace(engines=[engine])
    status = Status(metrics.registry, fleet, web.Response, shows_tenants=is_shown)
    answer: Any = asyncio.run(status.answer(make_mocked_request("GET", "/metrics")))
    page = answer.body.decode()
    assert ('tenant="red"' in page, 'key="alice"' in page, 'requests_total{status="200"} 5.0' in page) == (
        shown,
        shown,
        not shown,
    )
    answer = asyncio.run(status.answer(make_mocked_request("GET", "/engines")))
    assert ("red" in answer.body.decode()) == shown


@pytest.mark.parametrize(("files", "most"), [(65_536, 4096), (1024, 416), (100, 12)])
def test_no_more_clients_than_there_may_be_open_files(files: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checks, protection):
        monkeypatch.setattr(module, "reachable_open_files", lambda: files)
    config = parse_config({"gateway": {"engines": ["http://a:1"]}}, source="k.toml", environ={})
    assert protection.most_connections(config.gateway) == most
    told = [finding.text for finding in checks.setting_findings(config) if finding.key == "gateway.max_connections"]
    assert [f"no more than {most:,} are taken" in text for text in told] == [True] * (most < 4096)
