"""Two vLLM engines with kvtier and a pool behind the gateway, beside one without kvtier, which is fenced off."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_lab import Lab
from vllm_rig import BLOCK, NUM_TOKENS, all_hit, make_prompts, settings, transfer

from cache_pool import TOKENS, WAIT_S, CachePool, until
from free_port import free_port
from gateway_rig import Gateway, gateway_file, running_gateway
from kvtier_gateway.engines.prices import LearnedPrices

PROMPTS = [" ".join(f"w{token - 3}" for token in prompt) for prompt in make_prompts(2)]
"""Texts of which vLLM and the gateway make the same tokens, or no key of the gateway's would be found anywhere."""
(ALL_HIT, _) = all_hit(make_prompts(2))
SETTINGS = 'probe_timeout_s = 10\nstrategy = "priced"\npool_lookup_timeout_s = 10\nrequest_timeout_s = 120\n'
SECRETS = {f"{name.upper()}_SECRET": f"the secret of {name}, for tests" for name in TOKENS}
BODY: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


class Site:
    """The servers' URLs, the last without kvtier, and files of gateways."""

    def __init__(self, lab: Lab, pool: CachePool, folder: Path, urls: list[str]) -> None:
        self.pool, self.urls = pool, urls
        self._lab, self._folder = lab, folder

    def file(self, name: str, *, draining: str = "", with_pool: bool = True) -> Path:
        """The configuration of a gateway before all three.

        :param draining: the URL of one that gets no requests.
        """
        engines = [
            f'{{url = "{url}", draining = {str(url == draining).lower()}, events = "{_address(self._folder, number)}", '
            f'events_replay = "{_address(self._folder, number)}-replay"}}'
            for number, url in enumerate(self.urls)
        ]
        place = f'[pool]\naddress = "{self.pool.address}"\n' if with_pool else ""
        return gateway_file(self._folder / name, engines, f'{SETTINGS}tokenizer = "{self._lab.model}"\n{place}')


def _address(folder: Path, number: int) -> str:
    return f"ipc://{folder}/events-{number}"


@pytest.fixture(scope="module")
def site(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    ports = [free_port() for _ in range(3)]
    with CachePool(folder, TOKENS) as pool, pytest.MonkeyPatch.context() as patch:
        shared = settings(None, gateway=list(TOKENS), pool={"address": [pool.address]})
        for name in TOKENS:
            patch.setenv(f"{name.upper()}_SECRET", SECRETS[f"{name.upper()}_SECRET"])
            shared["tenants"][name]["secret"] = f"env:{name.upper()}_SECRET"
        wanted = []
        for number, port in enumerate(ports):
            address = _address(folder, number)
            events = {"enable_kv_cache_events": True, "endpoint": address, "replay_endpoint": f"{address}-replay"}
            options = {"enable_prompt_tokens_details": True, "served_model_name": "tiny"}
            wanted.append(
                (transfer(shared) if number < 2 else None, options | {"port": port, "kv_events_config": events})
            )
        with lab.servers(wanted):
            yield Site(lab, pool, folder, [f"http://127.0.0.1:{port}" for port in ports])


def token_ids(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def cached(answer: httpx.Response) -> int:
    details = answer.json()["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
    return int(details["cached_tokens"])


def choices(gateway: Gateway, reason: str) -> float:
    return gateway.metric("kvtier_gateway_choices_total", f'reason="{reason}"')


def answered(gateway: Gateway, url: str) -> float:
    return gateway.metric("kvtier_gateway_attempts_total", f'engine="{url}"', 'outcome="answered"')


def test_engines_share_what_they_compute_and_the_gateway_knows_where_it_is(site: Site) -> None:
    first, second, without = site.urls
    body = BODY | {"prompt": PROMPTS[0], "model": "tiny"}
    direct = httpx.post(f"{first}/v1/completions", json=body, timeout=WAIT_S)
    expected = token_ids(direct)
    with running_gateway(site.file("gateway.toml", draining=second)) as gateway:
        for url in site.urls:
            gateway.until_up(url)
        assert [gateway.engines()[url]["fenced"] for url in site.urls] == [False, False, True]

        # A request without a tenant left nothing behind; what the first engine computes of a tenant goes to the pool.
        answer = gateway.ask("alice", **body)
        assert (token_ids(answer), cached(answer)) == (expected, 0)
        site.pool.await_written((len(make_prompts(1)[0]) + NUM_TOKENS - 1) // BLOCK)
        answer = gateway.ask("bob", **body)
        assert (token_ids(answer), cached(answer)) == (expected, 0), "another tenant's blocks"

        # The second one has never seen it. The gateway's keys are those that vLLM's connector has stored.
        site.file("gateway.toml", draining=first)
        gateway.service.process.send_signal(signal.SIGHUP)
        until(lambda: gateway.engines()[first]["draining"], "the first engine is left alone")
        before = choices(gateway, "fetch")
        answer = gateway.ask("carol", **body)
        assert (token_ids(answer), cached(answer)) == (expected, ALL_HIT)
        assert gateway.metric("kvtier_gateway_pool_lookups_total", 'outcome="answered"') >= 1
        assert choices(gateway, "fetch") == before + 1
        assert [answered(gateway, url) for url in site.urls] == [2, 1, 0]
    prices = LearnedPrices()
    prices.learn(httpx.get(f"{first}/metrics", timeout=WAIT_S).content)
    assert prices.token_s
    assert prices.block_bytes

    # A gateway that was started later, and has no pool to ask, knows from vLLM's events alone whose is where.
    new = BODY | {"prompt": PROMPTS[1], "model": "tiny"}
    with running_gateway(site.file("gateway.toml", with_pool=False)) as gateway:
        for url in site.urls:
            gateway.until_up(url)
        until(lambda: gateway.metric("kvtier_gateway_event_batches") >= 2, "the gateway hears of both engines")
        answer = gateway.ask("alice", **body)
        assert (token_ids(answer), cached(answer), choices(gateway, "prefix")) == (expected, ALL_HIT, 1)
        answer = gateway.ask("bob", **body)
        assert (cached(answer), choices(gateway, "prefix")) == (ALL_HIT, 2)
        assert answered(gateway, first) >= 1, "the second engine has nothing of this tenant"
        assert (cached(gateway.ask("bob", **new)), choices(gateway, "backlog")) == (0, 1)
        assert gateway.metric("kvtier_gateway_event_gaps") == 0
        assert answered(gateway, without) == 0
        assert "KV events" not in gateway.log
