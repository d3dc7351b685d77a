"""vLLM's OpenAI server with the connector: salts of clients and tenants that a gateway names part their KV."""

from itertools import count
from typing import Any

import httpx
from engine_lab import Lab
from prometheus_client.parser import text_string_to_metric_families
from vllm_rig import NUM_TOKENS, Answer, all_hit, cached_of, make_prompts, none_hit, settings, tokens_of, transfer

from cache_pool import CachePool, until

PROMPTS = make_prompts(2)
WHOSE = [("red", None), ("red", "one"), ("red", "blue"), ("blue", None), ("blue", "one")]
"""Tenant that the gateway names, salt that the client sends."""


def _complete(client: httpx.Client, prompt: list[int], tenant: str | None, salt: str | None) -> Answer:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True} | ({"cache_salt": salt} if salt is not None else {})
    if tenant is not None:
        body["kv_transfer_params"] = {"kvtier": {"tenant": tenant}}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    details = answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
    return Answer(answer["choices"][0]["token_ids"], details["cached_tokens"])


def _value(client: httpx.Client, name: str, **labels: str) -> float | None:
    """What vLLM's own page says of one of kvtier's numbers, its own labels aside."""
    response = client.get("/metrics")
    assert response.status_code == 200, response.text
    samples = [
        sample
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if sample.name == f"vllm:kvtier_{name}" and labels.items() <= sample.labels.items()
    ]
    return sum(sample.value for sample in samples) if samples else None


def _reset(client: httpx.Client) -> bool:
    response = client.post("/reset_prefix_cache")
    assert response.status_code == 200, response.text
    return bool(response.json()["success"])


def test_salts_and_tenants_never_meet(lab: Lab, expected: list[Answer], pool: CachePool) -> None:
    connector = transfer(settings(gateway=["blue"], pool={"address": [pool.address]}))
    errors = {"tier": "pool", "error": "UnavailableError"}
    with lab.server(connector, enable_prompt_tokens_details=True) as client:
        for name, labels in (("io_errors_total", errors), ("open_breakers", {}), ("corrupt_blocks_total", {})):
            assert _value(client, name, **labels) == 0, f"nothing has happened yet, and {name} has to say so"
        for tenant, salt in WHOSE:
            answers = [_complete(client, prompt, tenant, salt) for prompt in PROMPTS]
            assert tokens_of(answers) == tokens_of(expected[:2])
            assert cached_of(answers) == none_hit(PROMPTS), f"{tenant}, {salt} met what is another's"
        assert _complete(client, PROMPTS[0], None, None).num_cached == 0, "who names no tenant meets nobody"
        until(lambda: _reset(client), "vLLM's prefix cache could be reset")
        for tenant, salt in reversed(WHOSE):
            answers = [_complete(client, prompt, tenant, salt) for prompt in PROMPTS]
            assert tokens_of(answers) == tokens_of(expected[:2])
            assert cached_of(answers) == all_hit(PROMPTS)
        num_tokens = len(WHOSE) * sum(all_hit(PROMPTS))
        for name, labels in (("hit_tokens_total", {}), ("fetched_tokens_total", {}), ("recomputed_tokens_total", {})):
            found = _value(client, name, **labels)
            assert found == (0 if name == "recomputed_tokens_total" else num_tokens), name
        assert (_value(client, "tier_used_bytes", tier="host") or 0) > 0
        assert (_value(client, "tier_batch_seconds_count", tier="pool", op="write") or 0) > 0
        assert (_value(client, "path_bytes_total", op="write") or 0) > 0, "its I/O process wrote to the pool"
        pool.kill()
        first_tokens = count(1)

        def failed() -> bool:
            _complete(client, [next(first_tokens), *PROMPTS[0][1:]], "red", None)  # one that the host does not have
            return bool(_value(client, "io_errors_total", tier="pool") and _value(client, "open_breakers", tier="pool"))

        until(failed, "vLLM's page tells that the pool is gone")
