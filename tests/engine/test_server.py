"""The engine as users run it: a real process on the real model, spoken to over HTTP."""

import contextlib
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine_process import CONFIG, PATIENCE_S, EngineProcess, engine_process, official_client, start_engine, until
from kvtier_engine.demo.demo_model import demo_model_path

MODEL = "SmolLM2-135M-Instruct.Q4_1"
DOCUMENT = "Our fleet: " + " ".join(f"ship {i} carries {7 * i % 31} crates;" for i in range(20))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with engine_process(tmp_path_factory.mktemp("engine")) as running:
        yield running


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


HELLO = [{"role": "user", "content": "hello"}]
BAD_BODIES: dict[str, tuple[str, dict[str, Any], int, str | None, str]] = {
    "no prompt": ("/v1/completions", {}, 400, "prompt", "required"),
    "stream as text": ("/v1/completions", {"prompt": "a", "stream": "yes"}, 400, "stream", "boolean"),
    "options without stream": (
        "/v1/completions", {"prompt": "a", "stream_options": {}}, 400, "stream_options", "only with stream = true"
    ),
    "unknown option": (
        "/v1/completions", {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x",
        "leave it out",
    ),
    "unknown parameter": ("/v1/completions", {"prompt": "a", "top_k": 5}, 400, "top_k", "leave it out"),
    "unknown and null": ("/v1/completions", {"prompt": "a", "top_k": None}, 400, "top_k", "leave it out"),
    "another endpoint's": ("/v1/completions", {"prompt": "a", "tools": []}, 400, "tools", "leave it out"),
    "log probabilities": ("/v1/completions", {"prompt": "a", "logprobs": 6}, 400, "logprobs", "equal to 5"),
    "bias": ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 101}}, 400, "logit_bias.5", "equal to 100"),
    "bias of text": ("/v1/completions", {"prompt": "a", "logit_bias": {"a": 1}}, 400, "logit_bias.a", "valid integer"),
    "bias of no token": ("/v1/completions", {"prompt": "a", "logit_bias": {"50000": 1}}, 400, "logit_bias", "to 49151"),
    "penalty": (
        "/v1/completions", {"prompt": "a", "frequency_penalty": 2.1}, 400, "frequency_penalty", "or equal to 2"
    ),
    "five stop sequences": ("/v1/completions", {"prompt": "a", "stop": list("abcde")}, 400, "stop", "at most 4 texts"),
    "empty stop sequence": ("/v1/completions", {"prompt": "a", "stop": ["a", ""]}, 400, "stop", "of 1 to 1024"),
    "stop number": ("/v1/completions", {"prompt": "a", "stop": 7}, 400, "stop", "must be text"),
    "many answers": ("/v1/completions", {"prompt": "a", "n": 129}, 400, "n", "less than or equal to 128"),
    "more answers than run": ("/v1/completions", {"prompt": "a", "n": 17}, 400, "n", "up to 16 answers at once"),
    "n is true": ("/v1/completions", {"prompt": "a", "n": True}, 400, "n", "valid integer"),
    "best of fewer": ("/v1/completions", {"prompt": "a", "n": 3, "best_of": 2}, 400, "best_of", "at least n"),
    "the best in a stream": (
        "/v1/completions", {"prompt": "a", "best_of": 2, "stream": True}, 400, "best_of", "leave out stream"
    ),
    "top_p 0": ("/v1/completions", {"prompt": "a", "top_p": 0}, 400, "top_p", "greater than 0"),
    "top_p above 1": ("/v1/completions", {"prompt": "a", "top_p": 1.01}, 400, "top_p", "less than or equal to 1"),
    "no tokens wanted": ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "1"),
    "empty prompt": ("/v1/completions", {"prompt": ""}, 400, "prompt", "empty"),
    "foreign token": ("/v1/completions", {"prompt": [3, 10**6]}, 400, "prompt", "49151"),
    "half a token": ("/v1/completions", {"prompt": [1.5]}, 400, "prompt", "must be text or a list of token ids"),
    "too long": ("/v1/completions", {"prompt": "a " * 2000}, 400, "prompt", "engine.kv_bytes"),
    "too long chat": (
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 2000}]}, 400, "messages",
        "more than the 1456 tokens",
    ),
    "hot": ("/v1/completions", {"prompt": "a", "temperature": 3}, 400, "temperature", "2"),
    "another model": ("/v1/completions", {"prompt": "a", "model": "gpt-4"}, 404, "model", "gpt-4"),
    "seed": ("/v1/completions", {"prompt": "a", "seed": 2**64}, 400, "seed", "9223372036854775807"),
    "text as number": ("/v1/completions", {"prompt": "a", "max_tokens": "5"}, 400, "max_tokens", "valid integer"),
    "truth as number": ("/v1/completions", {"prompt": "a", "max_tokens": True}, 400, "max_tokens", "valid integer"),
    "prompts of two kinds": ("/v1/completions", {"prompt": ["a", [1]]}, 400, "prompt", "a list of 1 to 128 of either"),
    "functions": ("/v1/chat/completions", {"messages": HELLO, "functions": [{}]}, 400, "functions", "[] only"),
    "another format": (
        "/v1/chat/completions", {"messages": HELLO, "response_format": {"type": "xml"}}, 400, "response_format.type",
        '"json_object" or "json_schema"',
    ),
    "no schema": (
        "/v1/chat/completions", {"messages": HELLO, "response_format": {"type": "json_schema"}}, 400,
        "response_format.json_schema", "needed",
    ),
    "a schema that is none": (
        "/v1/chat/completions",
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
        400, "response_format", "Invalid type: foo",
    ),
    "pictures": (
        "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
        "messages[0].content", "valid string",
    ),
    "audio": ("/v1/chat/completions", {"messages": HELLO, "audio": {}}, 400, "audio", "no value only"),
    "a picture beside text": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
        400, "messages[0].content", "valid string",
    ),
    "likeliest tokens of a chat": (
        "/v1/chat/completions", {"messages": HELLO, "top_logprobs": 2}, 400, "top_logprobs", "only with logprobs = true"
    ),
    "no messages": ("/v1/chat/completions", {"messages": []}, 400, "messages", "at least 1"),
    "unknown role": (
        "/v1/chat/completions", {"messages": [{"role": "x", "content": ""}]}, 400, "messages[0].role",
        '"system", "user", "assistant" or'
    ),
}  # fmt: skip


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
            model=MODEL, prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "mine.1"}
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
        (engine.client.get("/v1/completions"), 405),
        (engine.client.get("/v2"), 404),
        (engine.client.post("/v1/completions/", json={"prompt": "a"}), 404),
    ):
        assert response.status_code == status
        assert response.json()["error"]["message"]


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
        assert "engine.allowed_hosts" in response.json()["error"]["message"]


def test_what_is_not_http_gets_a_line_of_text(engine: EngineProcess) -> None:
    with socket.create_connection(_address(engine), timeout=PATIENCE_S) as connection:
        connection.sendall(b"\x16\x03\x01\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"text/plain" in answer


def test_idle_connections_take_no_more_descriptors_than_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -n 512\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with engine_process(tmp_path) as engine, contextlib.ExitStack() as idle:
        before = socket.create_connection(_address(engine), timeout=PATIENCE_S)
        idle.enter_context(before)
        for _ in range(400):
            idle.enter_context(socket.create_connection(_address(engine), timeout=PATIENCE_S))
        before.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert before.recv(4096).startswith(b"HTTP/1.1 200 ")
        # The last of them may have been accepted a moment ago, and are about to be refused.
        until(lambda: len(list(Path(f"/proc/{engine.process.pid}/fd").iterdir())) < 400)
        idle.close()
        until(lambda: _answers(engine))
        engine.process.send_signal(signal.SIGTERM)
        _, err = engine.process.communicate(timeout=PATIENCE_S)
    assert err.count("256 clients are connected: more are refused") == 1
    assert len(err.splitlines()) < 30
    assert "Traceback" not in err


def _address(engine: EngineProcess) -> tuple[str, int]:
    assert engine.client.base_url.port is not None
    return engine.client.base_url.host, engine.client.base_url.port


def _answers(engine: EngineProcess) -> bool:
    try:
        return engine.client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_the_limit_on_open_files_is_raised_as_far_as_it_goes() -> None:
    program = """
import resource
from kvtier.system.open_files import raise_open_files_limit
for soft, hard in ((200, 300), (300, 300)):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert raise_open_files_limit() == 300
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, 300)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)


def test_models_health_and_metrics(engine: EngineProcess) -> None:
    (model,) = engine.client.get("/v1/models").json()["data"]
    assert model["id"] == MODEL
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
    with socket.create_connection(_address(engine), timeout=PATIENCE_S) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        until(lambda: engine.metric("kvtier_engine_running") == 1)
    until(lambda: engine.metric(cancelled) == before + 1)
    engine.chat(max_tokens=1)
    assert engine.metric("kvtier_engine_waiting") == 0


def test_sigterm_finishes_requests_and_exits_with_0(tmp_path: Path) -> None:
    """And the log, in JSON, says of each request what became of it."""
    as_json = {"KVTIER__LOG__FORMAT": "json", "KVTIER__LOG__LEVEL": "debug"}
    with engine_process(tmp_path, **as_json) as engine, ThreadPoolExecutor(1) as thread:
        answer = thread.submit(engine.complete, prompt="Once", max_tokens=4)
        until(lambda: engine.metric("kvtier_engine_running") == 1 or answer.done())
        engine.process.send_signal(signal.SIGTERM)
        assert answer.result(PATIENCE_S)["usage"]["completion_tokens"] == 4
        assert engine.process.wait(PATIENCE_S) == 0
        assert engine.process.stderr is not None
        logged = map(json.loads, engine.process.stderr)
        about = [line for line in logged if f"cmpl-{line.get('request_id')}" == answer.result()["id"]]
        assert any("prompt tokens" in line["message"] and line["tenant"] == "red" for line in about), about
        with pytest.raises(httpx.ConnectError):
            engine.client.get("/health")


def test_sigterm_in_the_middle_of_a_long_answer_says_so_and_exits_with_0(tmp_path: Path) -> None:
    with engine_process(tmp_path, grace_s=1) as engine, ThreadPoolExecutor(1) as thread:
        body = {"prompt": "Count to a million: 1, 2, 3,", "max_tokens": 1200, "temperature": 0}
        answer = thread.submit(engine.client.post, "/v1/completions", json=body)
        until(lambda: engine.metric("kvtier_engine_running") == 1)
        engine.process.send_signal(signal.SIGTERM)
        response = answer.result(PATIENCE_S)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        assert engine.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("options", "secret", "words"),
    [
        (["--model", "/nonexistent"], "s" * 20, "no model at /nonexistent"),
        (["--model", "{folder}"], "s" * 20, "folder {folder} has no config.json, no tokenizer.json, no *.safetensors"),
        (["--port", "{taken}"], "s" * 20, "engine.listen: cannot listen on 127.0.0.1:{taken}"),
        ([], "", "RED_SECRET is missing or empty"),
        (["--config", "/nonexistent.toml"], "s" * 20, "/nonexistent.toml"),
    ],
    ids=["no model", "folder without weights", "port taken", "no secret", "no config"],
)  # fmt: skip
def test_what_cannot_start_says_why(tmp_path: Path, options: list[str], secret: str, words: str) -> None:
    config = tmp_path / "engine.toml"
    config.write_text(CONFIG.format(model=json.dumps(str(demo_model_path()))))
    empty = tmp_path / "empty"
    empty.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"folder": str(empty), "taken": str(taken.getsockname()[1])}
        process = start_engine(config, *(option.format(**values) for option in options), RED_SECRET=secret)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert out == ""
    assert words.format(**values) in err
    assert "Traceback" not in err


@pytest.mark.parametrize("size", [2**50, 10**26])
def test_more_kv_memory_than_there_is(tmp_path: Path, size: int) -> None:
    config = tmp_path / "engine.toml"
    config.write_text(CONFIG.format(model=json.dumps(str(demo_model_path()))))
    process = start_engine(config, RED_SECRET="s" * 20, KVTIER__ENGINE__KV_BYTES=str(size))
    assert "engine.kv_bytes" in (err := process.communicate(timeout=PATIENCE_S)[1])
    assert "Traceback" not in err
    assert process.returncode == 1
