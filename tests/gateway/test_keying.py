"""Tokens as engines make them, and what the gateway reads on engines' pages."""

import asyncio
import json
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from engine_family import make_tokenizer
from kvtier.config import parse_config
from kvtier.config.gateway import GatewayEngineConfig
from kvtier.identity.keys import BlockHasher, NamespaceId, PrefixHasher, tenant_id
from kvtier_engine.text.tokenizer import ChatTokenizer
from kvtier_gateway.engines.engine import Engine, KeyForm
from kvtier_gateway.engines.page import key_form_in, loads_in
from kvtier_gateway.engines.prices import LearnedPrices
from kvtier_gateway.keying import tokenising
from kvtier_gateway.keying.pool import PoolLookup
from kvtier_gateway.keying.prompts import Asked, Prompts
from kvtier_gateway.keying.tenants import ChainMemory, TenantHashers, short_keys
from kvtier_gateway.keying.tokenising import PromptTokens
from kvtier_gateway.metrics import GatewayMetrics
from kvtier_gateway.routing.values import Reads

LABELS = 'engine="0",model_name="m"'
ODD_CALLS: list[Any] = [5, [5], [{}], [{"function": 5}], [{"function": {}}], [{"function": {"name": "f"}}], {"a": 5}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.parametrize("most_bytes", [0, 500, 1 << 20])
def test_tokens_of_conversations_that_grow_are_those_of_an_engine(folder: Path, most_bytes: int) -> None:
    """Also where a message has what stands between messages, and whatever is forgotten meanwhile."""
    ours, engine = PromptTokens(folder, most_bytes), ChatTokenizer(folder)
    texts = ["hello", "", " é<|im_end|>\n<|im_start|>system\nx", "<|im_start|>", "hello", "<|im_end", "|>"]
    messages: list[dict[str, Any]] = []
    for number, text in enumerate(texts * 2):
        messages.append({"role": ("user", "assistant")[number % 2], "content": text})
        found = ours.of_request({"messages": messages})
        assert found is not None
        assert found.tolist() == engine.encode_chat(messages).tolist()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = ours.of_request({"messages": [{"role": "developer", "content": parts}]})
    assert found is not None
    assert found.tolist() == engine.encode_chat([{"role": "system", "content": "a\nb"}]).tolist()
    plain = ours.of_request({"prompt": "hello"})
    assert plain is not None
    assert plain.tolist() == engine.encode("hello").tolist()


@pytest.mark.parametrize("most_bytes", [0, 20_000, 1 << 20])
def test_keys_of_prompts_that_go_on_or_part_are_those_of_an_engine(most_bytes: int) -> None:
    chains, rng = ChainMemory(most_bytes), np.random.default_rng(0)
    hashers = [BlockHasher(tenant_id(name), PrefixHasher(name.encode() * 8, "", 16)) for name in ("red", "blue")]
    head = rng.integers(0, 100, 100, dtype=np.int32)
    for round_ in range(40):
        tokens = np.concatenate([head[: rng.integers(0, 101)], rng.integers(0, 2, rng.integers(0, 300))]).astype(
            np.int32
        )
        if round_ % 3 == 0:
            head = tokens if len(tokens) > 64 else head
        for hasher in hashers:
            keys = hasher.hash_blocks(tokens)
            assert chains.keys_of(hasher, tokens) == keys
            assert short_keys(keys) == [int.from_bytes(key[-8:], "big") for key in keys]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": []},
        {"prompt": [-1]},
        {"prompt": [2**40]},
        {"prompt": [1, "a"]},
        {"prompt": [True]},
        {"messages": ["a"]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"content": "a"}]},
        *({"messages": [{"role": "assistant", "content": "a", "tool_calls": calls}]} for calls in ODD_CALLS),
        {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
    ],
)
def test_prompts_that_nobody_knows_the_tokens_of(folder: Path, fields: dict[str, Any]) -> None:
    assert PromptTokens(folder, 1 << 20).of_request(fields) is None
    assert PromptTokens(folder, 1 << 20).of_request({"prompt": [3, 5]}) is not None


def test_a_list_of_texts_takes_no_memory_for_each_as_long_as_the_longest(folder: Path) -> None:
    tokens = PromptTokens(folder, 1 << 20)
    tracemalloc.start()
    try:
        for prompt in (["x" * 10_000, *["a"] * 1000], [["x" * 10_000, *["a"] * 1000]]):
            assert tokens.of_request({"prompt": prompt}) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_texts_too_long_for_any_engine_are_not_tokenised(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenising, "_MOST_CHARACTERS", 100)
    tokens = PromptTokens(folder, 1 << 20)
    assert tokens.of_request({"prompt": "a" * 100}) is not None
    assert tokens.of_request({"prompt": "a" * 101}) is None
    assert tokens.of_request({"messages": [{"role": "user", "content": "a"}]}) is not None
    assert tokens.of_request({"messages": [{"role": "user", "content": "a" * 100}]}) is None


@pytest.fixture
def prompts(folder: Path) -> Iterator[Prompts]:
    """Of a tenant "red"."""
    data = {"tenants": {"red": {"secret": "env:SECRET"}}}
    config = parse_config(data, source="test", folder=folder, environ={"SECRET": "a secret of the test"})
    pool = PoolLookup(config, GatewayMetrics(CollectorRegistry()), 1.0)
    prompts = Prompts(PromptTokens(folder, 1 << 20), TenantHashers(config), pool)
    yield prompts
    prompts.close()
    pool.close()


def one_engine() -> list[Engine]:
    table = GatewayEngineConfig(url="http://127.0.0.1:8000")
    form = KeyForm(4, frozenset([NamespaceId(bytes(16))]))
    return [Engine(table.url, table, key_form=form, adapters=frozenset(["lora"]))]


def asked(fields: dict[str, Any]) -> Asked:
    return Asked(fields, len(json.dumps(fields)), "red")


def test_who_asks_for_an_adapter_has_no_keys(prompts: Prompts) -> None:
    """Blocks that are computed with it have others."""
    for model, num_keys in (("base", 2), ("lora", None)):
        fields = {"model": model, "prompt": "nine bytes"}
        prompt = asyncio.run(prompts.read(asked(fields), Reads.KEYS, one_engine()))
        assert (None if prompt.keys is None else len(prompt.keys)) == num_keys


@pytest.mark.parametrize(
    ("fields", "by_the_loop"),
    [
        ({"prompt": "a" * 1000}, True),
        ({"prompt": "a" * 9000}, False),
        ({"prompt": [10_000] * 8000}, True),
        ({"prompt": [10_000] * 9000}, False),
        ({"messages": [{"role": "user", "content": "a" * 1000}]}, True),
        ({"messages": [{"role": "user", "content": "a" * 9000}]}, False),
        ({"messages": [{"role": "a" * 9000, "content": "a"}]}, False),
        ({"messages": [{"role": "user", "content": ""}] * 1000}, False),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {"arguments": "a" * 9000}}]}]},
            False,
        ),
        ({"messages": [{"role": "user", "content": "a" * 9000}], "tools": [{}]}, True),
    ],
)
def test_the_event_loop_tokenises_nothing_long(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], by_the_loop: bool
) -> None:
    threads = []
    monkeypatch.setattr(PromptTokens, "of_request", lambda _, fields: threads.append(threading.current_thread()))
    asyncio.run(prompts.read(asked(fields), Reads.KEYS, one_engine()))
    assert [thread is threading.current_thread() for thread in threads] == [by_the_loop]


def test_the_pages_of_engines() -> None:
    info = f'vllm:kvtier_namespace_info{{{LABELS},namespace="%s",tokens_per_block="%d"}} 1.0\n'
    page = (
        f"vllm:num_requests_running{{{LABELS}}} 3.0\nvllm:num_requests_running_total 9\n"
        f"vllm:num_requests_waiting{{{LABELS}}} 4.0\nvllm:kv_cache_usage_perc{{{LABELS}}} 0.5\n"
    )
    loads = loads_in(page.encode())
    assert (loads.num_running, loads.num_waiting, loads.kv_used) == (3, 4, 0.5)
    assert key_form_in(page.encode()) is None
    two = info % ("00" * 16, 16) + info % ("11" * 16, 16)
    form = key_form_in((page + two).encode())
    assert form is not None
    assert (form.tokens_per_block, sorted(form.namespaces)) == (16, [bytes(16), b"\x11" * 16])
    assert key_form_in((two + info % ("22" * 16, 32)).encode()) is None
    for namespace, size in (("xx" * 16, 16), ("00" * 15, 16), ("00" * 16, 0), ("00" * 16, 65_537)):
        assert key_form_in((info % (namespace, size)).encode()) is None


def test_prices_follow_what_engines_count() -> None:
    def page(seconds: float, tokens: int, fetch_s: float, nbytes: int) -> bytes:
        return (
            f"kvtier_engine_prompt_seconds_total {seconds}\nkvtier_engine_computed_prompt_tokens_total {tokens}\n"
            f'kvtier_path_seconds_total{{op="read",path="shm"}} {fetch_s}\n'
            f'kvtier_path_bytes_total{{op="read",path="shm"}} {nbytes}\n'
            f'kvtier_path_bytes_total{{op="write",path="shm"}} 1e12\n'
            'kvtier_tier_used_bytes{tier="host"} 64000\nkvtier_tier_held_blocks{tier="host"} 1000\n'
        ).encode()

    prices = LearnedPrices()
    prices.learn(page(0, 0, 0, 0))
    assert (prices.token_s, prices.pool_bytes_per_s, prices.block_bytes) == (None, None, 64)
    prices.learn(page(10, 1000, 1, 4 << 20))
    assert (prices.token_s, prices.pool_bytes_per_s) == (0.01, 4 << 20)
    prices.learn(page(10.5, 1001, 1, 4 << 20))  # too little to say anything
    assert prices.token_s == 0.01
    prices.learn(page(40, 2000, 1, 4 << 20))
    assert prices.token_s == pytest.approx(0.02)
    for wrong in (page(9e99, 9000, 9, 9 << 20), page(-9, 9000, 9, 9 << 20), page(9, 9000, float("1e999"), 9 << 20)):
        prices.learn(wrong.replace(b" inf", b" 1e999") + b'kvtier_tier_used_bytes{tier="host"} 5\n')
    assert (prices.token_s, prices.pool_bytes_per_s, prices.block_bytes) == (pytest.approx(0.02), 4 << 20, 64)
    prices.learn(page(4, 1000, 0, 0))  # an engine that was restarted
    assert prices.token_s == pytest.approx(0.012)
