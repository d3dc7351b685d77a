"""What an engine as users run it answers: a real process on the real model, spoken to over HTTP."""

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from engine_process import MODEL_NAME, PATIENCE_S, EngineProcess, official_client, until
from refused_bodies import BAD_BODIES

DOCUMENT = "Our fleet: " + " ".join(f"ship {i} carries {7 * i % 31} crates;" for i in range(20))


def test_chat_answers_and_the_second_time_from_the_cache(engine: EngineProcess) -> None:
    first = engine.chat(seed=1)
    assert first["choices"][0]["message"] == {"role": "assistant", "content": "The capital of France is Paris."}
    assert first["choices"][0]["finish_reason"] == "stop"
    usage = first["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (42, 8, 50)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["prompt_tokens_details"]["cached_tokens_by_tier"] == {"device": 0, "host": 0, "disk": 0, "pool": 0}
    second = engine.chat(return_prompt_token_ids=True)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]["device"] == 41, "all but the last token"
    assert second["kvtier"]["token_ids"] == first["kvtier"]["token_ids"]
    assert len(second["kvtier"]["token_ids"]) == 8
    assert len(second["kvtier"]["prompt_token_ids"]) == 42
    assert "prompt_token_ids" not in first["kvtier"]
    assert 0 < second["kvtier"]["ttft_s"] < PATIENCE_S


def test_completions_take_text_or_token_ids(engine: EngineProcess) -> None:
    text = engine.complete(prompt=DOCUMENT, max_tokens=5, return_prompt_token_ids=True)
    assert text["object"] == "text_completion"
    assert text["choices"][0]["finish_reason"] == "length"
    assert text["usage"]["completion_tokens"] == 5
    ids = engine.complete(prompt=text["kvtier"]["prompt_token_ids"], max_tokens=5)
    assert ids["choices"][0]["text"] == text["choices"][0]["text"]
    assert engine.complete(prompt=DOCUMENT)["usage"]["completion_tokens"] == 16


def test_parallel_requests_answer_as_if_alone(engine: EngineProcess) -> None:
    prompts = [f"{DOCUMENT[: 150 + 40 * i]} Therefore" for i in range(6)]
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(lambda p: engine.complete(prompt=p, max_tokens=12), prompts))
    alone = [engine.complete(prompt=p, max_tokens=12) for p in prompts]
    assert [a["kvtier"]["token_ids"] for a in together] == [a["kvtier"]["token_ids"] for a in alone]
    assert all(a["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for a in alone)


def test_top_p_of_next_to_nothing_takes_the_likeliest(engine: EngineProcess) -> None:
    likeliest = engine.complete(prompt="Once", max_tokens=6)["kvtier"]["token_ids"]
    assert engine.complete(prompt="Once", max_tokens=6, temperature=1, top_p=1e-9)["kvtier"]["token_ids"] == likeliest


def test_seeded_sampling_repeats(engine: EngineProcess) -> None:
    answers = [engine.complete(prompt="Once", max_tokens=12, temperature=1.0, seed=s)["kvtier"] for s in (4, 4, 5)]
    assert answers[0]["token_ids"] == answers[1]["token_ids"] != answers[2]["token_ids"]


def test_text_in_parts_and_developers_are_understood(engine: EngineProcess) -> None:
    parts = [{"type": "text", "text": text} for text in ("one", "two")]
    whole = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one\ntwo"}]
    cut = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": parts},
    ]
    body = {"max_tokens": 1, "temperature": 0, "return_prompt_token_ids": True}
    answers = [
        engine.client.post("/v1/chat/completions", json=body | {"messages": messages}).json()
        for messages in (whole, cut)
    ]
    assert answers[0]["kvtier"]["prompt_token_ids"] == answers[1]["kvtier"]["prompt_token_ids"]


@pytest.mark.parametrize(("path", "body", "status", "param", "words"), BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_bad_requests_get_openai_errors(
    engine: EngineProcess, path: str, body: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    response = engine.client.post(path, json=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


def test_penalties_and_bias_change_answers(engine: EngineProcess) -> None:
    ask: dict[str, Any] = {"prompt": "la la la la la la la la", "max_tokens": 8}
    plain = engine.complete(**ask)["kvtier"]["token_ids"]
    assert len(set(plain)) < 8
    assert len(set(engine.complete(**ask, frequency_penalty=2, presence_penalty=2)["kvtier"]["token_ids"])) == 8
    assert engine.complete(**ask, repetition_penalty=5)["kvtier"]["token_ids"] != plain
    assert engine.complete(**ask, logit_bias={str(plain[0]): 100})["kvtier"]["token_ids"] == plain[:1] * 8


def test_parameters_that_ask_for_nothing_pass(engine: EngineProcess) -> None:
    both: dict[str, Any] = {
        "n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "user": "me", "metadata": {"a": "b"},
        "store": False, "stream": False, "stop": [], "top_p": 1, "max_tokens": 1, "service_tier": "auto",
    }  # fmt: skip
    text: dict[str, Any] = {"best_of": 1, "echo": False, "logprobs": None, "suffix": ""}
    chat: dict[str, Any] = {
        "logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "none", "parallel_tool_calls": True,
        "response_format": {"type": "text"}, "modalities": ["text"], "reasoning_effort": None,
    }  # fmt: skip
    completion = engine.complete(prompt="Once", **both, **text)
    assert completion["choices"][0]["text"] == engine.complete(prompt="Once", max_tokens=1)["choices"][0]["text"]
    assert engine.chat(**both, **chat)["usage"]["completion_tokens"] == 1
    nothing = dict.fromkeys([*both, *text, "temperature", "seed", "model", "stream_options"])
    assert engine.complete(prompt="Once", **nothing)["usage"]["completion_tokens"] == 16
    nothing = dict.fromkeys([*both, *chat, "max_completion_tokens"], None) | {"max_tokens": 1}
    assert engine.chat(**nothing)["usage"]["completion_tokens"] == 1


def test_each_answer_has_the_id_of_its_request(engine: EngineProcess) -> None:
    with official_client(str(engine.client.base_url)) as client:
        named = client.completions.create(
            model=MODEL_NAME, prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "mine.1"}
        )
        assert (named.id, named._request_id) == ("cmpl-mine.1", "mine.1")
        with pytest.raises(openai.NotFoundError) as refused:
            client.completions.create(model="another", prompt="a", extra_headers={"X-Request-Id": "two\twords"})
        assert refused.value.request_id is not None
        assert re.fullmatch("[0-9a-f]{32}", refused.value.request_id)
    with engine.client.stream(
        "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 1, "stream": True}
    ) as stream:
        first = next(line for line in stream.iter_lines() if line)
    assert json.loads(first.removeprefix("data: "))["id"] == f"cmpl-{stream.headers['X-Request-Id']}"


def test_bad_json_says_where(engine: EngineProcess) -> None:
    response = engine.client.post("/v1/completions", content=b'{"prompt": "a",\n "n": }')
    assert response.status_code == 400
    assert "line 2 column 7" in response.json()["error"]["message"]


def test_what_is_no_request_at_all(engine: EngineProcess) -> None:
    for response, status in (
        (engine.client.post("/v1/completions", content=b"{"), 400),
        (engine.client.post("/v1/completions", content=b"\xff"), 400),
        (engine.client.post("/v1/completions", json=[1]), 400),
        (engine.client.post("/v1/completions", content=b"[" * 100_000), 400),
        (engine.client.post("/v1/completions", content=b'{"prompt": "half a surrogate: \\ud800"}'), 400),
        (engine.client.post("/v1/completions", json={"prompt": "a" * 2**23}), 413),
        (engine.client.post("/v1/completions", json={"prompt": "a"}, headers={"Content-Encoding": "gzip"}), 415),
        (engine.client.get("/v1/completions"), 405),
        (engine.client.get("/v2"), 404),
        (engine.client.post("/v1/completions/", json={"prompt": "a"}), 404),
    ):
        assert response.status_code == status
        assert response.json()["error"]["message"]


def test_a_body_whose_length_is_wrong_is_refused_before_its_end(engine: EngineProcess) -> None:
    chunk = b"%x\r\n%s\r\n" % (2**20, b"a" * 2**20)
    for headers, beginning, status in (
        (f"Content-Length: {2**40}", b"", 413),
        (f"Content-Length: {2**40}\r\nExpect: 100-continue", b"", 413),
        ("Transfer-Encoding: chunked", chunk, 413),
        ("Content-Length: 4\r\nTransfer-Encoding: chunked", chunk, 400),
    ):
        with socket.create_connection(engine.address, timeout=PATIENCE_S) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n"
            connection.sendall(head.encode() + beginning)
            answer = b""
            while not answer.endswith(b"}}"):
                piece = connection.recv(4096)
                assert piece, answer
                answer += piece
            assert not beginning or connection.recv(1) == b""
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_web_pages_may_not_reset_the_cache(engine: EngineProcess) -> None:
    engine.chat(max_tokens=1)
    for origin in ("https://example.org", str(engine.client.base_url), "null"):
        response = engine.client.post("/v1/cache/reset", headers={"Origin": origin})
        assert response.status_code == 403
        assert "Origin" in response.json()["error"]["message"]
    assert engine.chat(max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


def test_web_pages_do_not_reach_an_engine_on_loopback(engine: EngineProcess) -> None:
    port = engine.client.base_url.port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "LOCALHOST", f"[::1]:{port}", "demo.localhost", "a.proxy"):
        assert engine.client.get("/v1/models", headers={"Host": host}).status_code == 200
    assert engine.client.get("/health", headers={"Origin": "http://localhost:3000"}).status_code == 200
    rebound = ("rebound.example", f"rebound.example:{port}", "127.0.0.1.example.org", "0.0.0.0", "[::", "a.proxy.org")
    for headers in (
        *({"Host": host} for host in rebound),
        *({"Origin": origin} for origin in ("https://example.org", "null", "", "http://[")),
    ):
        response = engine.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
        assert response.status_code == 403, headers
        assert "call it localhost" in response.json()["error"]["message"]


def test_what_is_not_http_gets_a_line_of_text(engine: EngineProcess) -> None:
    with socket.create_connection(engine.address, timeout=PATIENCE_S) as connection:
        connection.sendall(b"\x16\x03\x01\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"text/plain" in answer


def test_models_health_and_metrics(engine: EngineProcess) -> None:
    (model,) = engine.client.get("/v1/models").json()["data"]
    assert model["id"] == MODEL_NAME
    assert engine.chat(model=model["id"])["model"] == model["id"]
    assert engine.client.get("/health").json() == {"status": "ok"}
    for name in ("engine_prompt_tokens_total", "engine_step_seconds_total", "engine_cache_seconds_total"):
        assert engine.metric(f"kvtier_{name}") > 0
    num_all, num_cold = (engine.metric(f"kvtier_engine_{kind}ttft_seconds_count") for kind in ("", "cold_"))
    assert num_all >= num_cold > 0
    page = engine.client.get("/metrics").text
    assert "kvtier_build_info{" in page
    assert "process_resident_memory_bytes" in page
    assert "_created" not in page


def test_a_client_that_goes_away_cancels_its_request(engine: EngineProcess) -> None:
    cancelled = 'kvtier_engine_requests_total{reason="cancelled"}'
    before = engine.metric(cancelled)
    body = json.dumps({"prompt": "Count to a million: 1, 2, 3,", "max_tokens": 1200, "temperature": 0}).encode()
    with socket.create_connection(engine.address, timeout=PATIENCE_S) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        until(lambda: engine.metric("kvtier_engine_running") == 1)
    until(lambda: engine.metric(cancelled) == before + 1)
    engine.chat(max_tokens=1)
    assert engine.metric("kvtier_engine_waiting") == 0
