"""The gateway before three real engines on one pool: right answers, whoever dies, hangs, comes or is restarted."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cache_pool import TOKENS, WAIT_S, CachePool, until
from engine_family import VOCABULARY, engine_family
from free_port import free_port
from gateway_rig import Gateway, gateway_file, running_gateway
from kvtier_bench.processes.engines_process import EngineProcess
from suspending import resume, suspend

ENGINE = """
gateway_tenants = ["red", "blue"]
[tenants.red]
secret = "env:RED_SECRET"
token = "env:RED_TOKEN"
[tenants.blue]
secret = "env:BLUE_SECRET"
token = "env:BLUE_TOKEN"
[engine]
model = "{model}"
listen = "127.0.0.1:0"
dtype = "float32"
kv_bytes = "4MiB"
num_threads = 1
[host]
capacity_bytes = "4MiB"
[cache]
io_process = false
lookup_deadline_s = 30
load_deadline_s = 30
fetch = "always"
[events]
endpoint = "tcp://127.0.0.1:{events}"
replay_endpoint = "tcp://127.0.0.1:{replay}"
[pool]
address = "{pool}"
connect_timeout_s = 30
call_timeout_s = 30
"""
PROMPT = "Once upon a time there was a cache that never lied. " * 4
SETTINGS = 'probe_timeout_s = 1\nprobe_failures = 2\nstrategy = "priced"\npool_lookup_timeout_s = 5\n'


class Site:
    """Three engines, of which the gateway begins with two."""

    def __init__(self, folder: Path, pool: CachePool, family: list[EngineProcess], ports: list[int]) -> None:
        self.folder, self.pool, self._ports = folder, pool, ports
        self.urls, self.pids = [each.url for each in family], [each.pid for each in family]

    def name_engines(self, *urls: str) -> Path:
        """Writes the gateway's file."""
        engines = []
        for url in urls:
            events, replay = self._ports[2 * self.urls.index(url) :][:2]
            places = f'events = "tcp://{{host}}:{events}", events_replay = "tcp://{{host}}:{replay}"'
            engines.append(f'{{url = "{url}", {places}}}')
        settings = f'{SETTINGS}tokenizer = "{self.folder / "tiny"}"\n[pool]\naddress = "{self.pool.address}"\n'
        return gateway_file(self.folder / "gateway.toml", engines, settings)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    environ = {f"{name.upper()}_SECRET": f"the secret of {name}, for tests" for name in TOKENS}
    environ |= {f"{name.upper()}_TOKEN": token for name, token in TOKENS.items()}
    ports = [free_port() for _ in range(6)]
    with CachePool(folder, TOKENS) as pool:
        configs = [folder / f"engine{number}.toml" for number in range(3)]
        for number, config in enumerate(configs):
            events, replay = ports[2 * number :][:2]
            config.write_text(ENGINE.format(model=folder / "tiny", pool=pool.address, events=events, replay=replay))
        with engine_family(folder / "tiny", configs, environ) as family:
            yield Site(folder, pool, family, ports)


def token_ids(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["kvtier"]["token_ids"]
    return found


def cached(answer: httpx.Response) -> dict[str, int]:
    found: dict[str, int] = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    return found


def streamed(gateway: Gateway, **body: Any) -> list[int]:
    """The tokens of a streamed answer."""
    answer = gateway.ask("alice", stream=True, **body)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    return next(found["kvtier"]["token_ids"] for found in map(json.loads, events[:-1]) if "kvtier" in found)


def test_engines_that_die_hang_and_come(site: Site) -> None:
    urls, pids = site.urls, site.pids
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8}
    named = {"kv_transfer_params": {"kvtier": {"tenant": "red"}}}
    direct = httpx.post(f"{urls[2]}/v1/completions", json={**body, **named, "temperature": 0}, timeout=WAIT_S)
    expected = token_ids(direct)
    with running_gateway(site.name_engines(*urls[:2])) as gateway:
        for url in urls[:2]:
            gateway.until_up(url)

        # Tokens are those of an engine that is asked directly; what it has saved is found by those of its tenant.
        until(lambda: site.pool.num_written() >= len(PROMPT) // 16, "the first engine has saved its blocks")
        answer = gateway.ask("alice", **body)
        assert (token_ids(answer), cached(answer)["pool"] > 0) == (expected, True)
        assert gateway.metric("kvtier_gateway_pool_lookups_total", 'outcome="answered"') >= 1
        assert streamed(gateway, **body) == expected
        assert not any(cached(gateway.ask("bob", **body)).values())
        assert not any(cached(httpx.post(f"{urls[0]}/v1/completions", json=body, timeout=WAIT_S)).values())

        # The strategy hears what engines hold, and goes by it.
        until(lambda: gateway.metric("kvtier_gateway_event_batches") > 0, "the gateway hears events")

        def follows_prefix() -> bool:
            assert token_ids(gateway.ask("alice", **body)) == expected
            return gateway.metric("kvtier_gateway_choices_total", 'reason="prefix"') >= 1

        until(follows_prefix, "a request goes where its prefix is")

        # A client that goes away ends its request in the engine. The answer is a long one: no token ends it early.
        long = {**body, "temperature": 0, "max_tokens": 1500, "logit_bias": {str(VOCABULARY - 1): -100}, "stream": True}
        with gateway.client("alice") as client, client.stream("POST", "/v1/completions", json=long) as answer:
            assert answer.status_code == 200, answer.read()
            next(answer.iter_raw())
        until(lambda: cancelled(urls) >= 1, "an engine has cancelled the request")

        # One that is stopped hangs: requests that wait for it go to the other one, and so do new ones.
        suspend(pids[0])
        answers: list[httpx.Response] = []
        asking = [threading.Thread(target=lambda: answers.append(gateway.ask("alice", **body))) for _ in range(4)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(WAIT_S)
        assert [token_ids(answer) for answer in answers] == [expected] * 4
        gateway.until_up(urls[0], False)
        resume(pids[0])
        gateway.until_up(urls[0])

        # One is added, and one dies.
        site.name_engines(*urls)
        gateway.service.process.send_signal(signal.SIGHUP)
        gateway.until_up(urls[2])
        os.kill(pids[1], signal.SIGKILL)
        assert [token_ids(gateway.ask("alice", **body)) for _ in range(6)] == [expected] * 6
        gateway.until_up(urls[1], False)

        # The pool dies: engines compute.
        site.pool.kill()
        other = {**body, "prompt": PROMPT[::-1]}
        assert token_ids(gateway.ask("alice", **other)) == token_ids(gateway.ask("bob", **other))
        assert gateway.metric("kvtier_gateway_event_gaps") == 0
        assert "KV events" not in gateway.log
    # Restarted, the gateway knows what it needs.
    with running_gateway(site.name_engines(*urls)) as gateway:
        gateway.until_up(urls[0])
        assert token_ids(gateway.ask("carol", **body)) == expected


def cancelled(urls: list[str]) -> float:
    """Requests that engines have ended because their clients went away."""
    lines = [line for url in urls for line in httpx.get(f"{url}/metrics", timeout=WAIT_S).text.splitlines()]
    wanted = 'kvtier_engine_requests_total{reason="cancelled"}'
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(wanted))
