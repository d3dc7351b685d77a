"""vLLM's OpenAI server with the connector: salts of clients and tenants that a gateway names part their KV."""

from typing import Any

import httpx
from engine_lab import Lab
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


def _reset(client: httpx.Client) -> bool:
    response = client.post("/reset_prefix_cache")
    assert response.status_code == 200, response.text
    return bool(response.json()["success"])


def test_salts_and_tenants_never_meet(lab: Lab, expected: list[Answer], pool: CachePool) -> None:
    connector = transfer(settings(gateway=["blue"], pool={"address": [pool.address]}))
    with lab.server(connector, enable_prompt_tokens_details=True) as client:
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
