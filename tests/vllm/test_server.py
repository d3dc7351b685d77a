"""vLLM's OpenAI server with the connector: salts of clients and tenants that a gateway names part their KV."""

import json
from itertools import count
from typing import Any

import httpx
import pytest
from engine_lab import Lab
from prometheus_client.parser import text_string_to_metric_families
from vllm_rig import NUM_TOKENS, Answer, all_hit, cached_of, make_prompts, none_hit, settings, tokens_of, transfer

from cache_pool import CachePool, until
from dashboard_rig import check_against_docs, ours_in_vllm
from otlp_receiver import OtlpReceiver, otlp_receiver

PROMPTS = make_prompts(2)
WHOSE = [("red", None), ("red", "one"), ("red", "blue"), ("blue", None), ("blue", "one")]
"""Tenant that the gateway names, salt that the client sends."""


def _complete(
    client: httpx.Client, prompt: list[int], tenant: str | None, salt: str | None, trace: str | None = None
) -> Answer:
    """:param trace: the trace that the request belongs to, as 32 hex digits."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True} | ({"cache_salt": salt} if salt is not None else {})
    if tenant is not None:
        body["kv_transfer_params"] = {"kvtier": {"tenant": tenant}}
    headers = {} if trace is None else {"traceparent": f"00-{trace}-{9:016x}-01"}
    response = client.post("/v1/completions", json=body, headers=headers)
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


def test_salts_tenants_traces_and_figures(
    lab: Lab, expected: list[Answer], pool: CachePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server, since it takes long to start."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    with otlp_receiver() as receiver:
        tables = {"pool": {"address": [pool.address]}, "tracing": {"endpoint": receiver.url}, "log": {"format": "json"}}
        options = {"enable_prompt_tokens_details": True, "otlp_traces_endpoint": f"{receiver.url}/v1/traces"}
        with lab.server(transfer(settings(gateway=["blue"], **tables)), **options) as client:
            _begins_at_zero(client)
            _never_meet(client, expected)
            _logs_whose_request_it_was(lab)
            _tells_what_was_found(client)
            _is_traced(client, receiver)
            pool.kill()
            _tells_that_the_pool_is_gone(client, lab)


def _begins_at_zero(client: httpx.Client) -> None:
    check_against_docs(ours_in_vllm(client.get("/metrics").text))
    errors = {"tier": "pool", "error": "UnavailableError"}
    for name, labels in (("io_errors_total", errors), ("open_breakers", {}), ("corrupt_blocks_total", {})):
        assert _value(client, name, **labels) == 0, f"nothing has happened yet, and {name} has to say so"


def _never_meet(client: httpx.Client, expected: list[Answer]) -> None:
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


def _logged(lab: Lab) -> list[dict[str, Any]]:
    log = max(lab.home.glob("server-*.log"), key=lambda path: path.stat().st_mtime).read_text()
    return [json.loads(line) for line in log.splitlines() if line.startswith('{"time"')]


def _logs_whose_request_it_was(lab: Lab) -> None:
    (warning,) = [line for line in _logged(lab) if "a request uses no cache" in line["message"]]
    assert warning["request_id"].startswith("cmpl-")


def _tells_what_was_found(client: httpx.Client) -> None:
    num_tokens = len(WHOSE) * sum(all_hit(PROMPTS))
    for name in ("hit_tokens_total", "fetched_tokens_total"):
        assert _value(client, name) == num_tokens, name
    assert _value(client, "recomputed_tokens_total") == 0
    assert (_value(client, "tier_used_bytes", tier="host") or 0) > 0
    assert (_value(client, "tier_batch_seconds_count", tier="pool", op="write") or 0) > 0
    assert (_value(client, "path_bytes_total", op="write") or 0) > 0, "its I/O process wrote to the pool"


def _is_traced(client: httpx.Client, receiver: OtlpReceiver) -> None:
    """vLLM's span of a request and kvtier's of its lookup and its fetch are of the trace that the client has named."""
    trace = f"{7:032x}"
    until(lambda: _reset(client), "vLLM's prefix cache could be reset")
    _complete(client, PROMPTS[0], "red", None, trace)
    wanted = {"llm_request", "lookup", "fetch", "copy to device"}
    until(lambda: wanted <= {span.name for span in receiver.spans(trace)}, "spans of vLLM and of kvtier came")
    by_id = {span.id: span.name for span in receiver.spans(trace)}
    inside = {(span.name, by_id.get(span.parent)) for span in receiver.spans(trace)}
    assert inside >= {("llm_request", None), ("lookup", None), ("fetch", None), ("copy to device", "fetch")}


def _tells_that_the_pool_is_gone(client: httpx.Client, lab: Lab) -> None:
    """In figures, and in a line of the log with the request whose lookup failed last."""
    first_tokens = count(1)

    def failed() -> bool:
        _complete(client, [next(first_tokens), *PROMPTS[0][1:]], "red", None)  # one that the host does not have
        lines = [line for line in _logged(lab) if "left alone for now" in line["message"]]
        whose = [line["request_id"] for line in lines if "request_id" in line]
        told = _value(client, "io_errors_total", tier="pool") and _value(client, "open_breakers", tier="pool")
        return bool(told and whose and whose[0].startswith("cmpl-"))

    until(failed, "vLLM's page tells that the pool is gone")
