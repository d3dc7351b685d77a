"""Streams and stop sequences over HTTP: what comes piece by piece is what comes whole, and ends as it should."""

import contextlib
import json
import signal
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine_http_rig import PacedModel, ServedEngine, parse_event, served_engine
from engine_process import FRANCE, NO_KEEP_ALIVE, PATIENCE_S, EngineProcess, engine_process, until
from engine_rig import judge

COUNT = "Count to a million: 1, 2, 3,"
MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    # One thread: these tests ask for little, and several threads wait for each other on a busy machine.
    with engine_process(tmp_path_factory.mktemp("engine"), KVTIER__ENGINE__NUM_THREADS="1") as running:
        yield running


@pytest.fixture(scope="module")
def official(engine: EngineProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with official_client(str(engine.client.base_url)) as client:
        yield client


def official_client(url: str) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(limits=NO_KEEP_ALIVE, timeout=PATIENCE_S)
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none needed", max_retries=0, http_client=http)


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[ServedEngine]:
    with served_engine(tmp_path) as served:
        yield served
    served.rig.close()


def test_a_streamed_chat(official: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL_NAME, "messages": FRANCE, "temperature": 0}
    whole = official.chat.completions.create(**ask)
    chunks = list(official.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    *with_choice, last = chunks
    deltas = [chunk.choices[0].delta for chunk in with_choice]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in with_choice] == [None] * (len(deltas) - 1) + ["stop"]
    assert {(chunk.id, chunk.created, chunk.object) for chunk in chunks} == {
        (last.id, last.created, "chat.completion.chunk")
    }
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 8
    assert last.usage.prompt_tokens == 42
    assert all(chunk.usage is None for chunk in with_choice)
    extra = with_choice[-1].model_extra
    assert extra is not None
    assert len(extra["kvtier"]["token_ids"]) == 8


def test_a_streamed_completion(official: openai.OpenAI, engine: EngineProcess) -> None:
    ask: dict[str, Any] = {"model": MODEL_NAME, "prompt": COUNT, "temperature": 0, "max_tokens": 20}
    whole = engine.complete(**ask)
    chunks = list(official.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert all(chunk.object == "text_completion" and chunk.usage is None for chunk in chunks)
    assert len(chunks) > 10, "piece by piece"


def test_the_real_tokenizer_streams_what_it_decodes(engine: EngineProcess) -> None:
    """Where most characters are several tokens."""
    ask = {
        "prompt": "東京は日本の首都です。東京は日本の首都です。東京は日",
        "temperature": 0.4,
        "seed": 1,
        "max_tokens": 30,
    }
    whole = engine.complete(**ask)["choices"][0]["text"]
    with engine.client.stream("POST", "/v1/completions", json={**ask, "stream": True}) as response:
        events = [parse_event(line) for line in response.iter_lines() if line]
    assert events.pop() is None
    assert "".join(event["choices"][0]["text"] for event in events) == whole
    assert sum(len(character.encode()) > 1 for character in whole) > 10


def test_a_stop_sequence_ends_an_answer(official: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL_NAME, "prompt": COUNT, "temperature": 0, "max_tokens": 30, "stop": " 7, 8"}
    whole = official.completions.create(**ask)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (" 4, 5, 6,", "stop")
    chunks = list(official.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " 4, 5, 6,"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens < 20


def test_a_chat_stops_too(engine: EngineProcess) -> None:
    answer = engine.chat(stop=["of Fr"])
    assert answer["choices"][0]["message"]["content"] == "The capital "
    assert answer["usage"]["completion_tokens"] == len(answer["kvtier"]["token_ids"]) == 4


def test_streams_in_parallel(engine: EngineProcess) -> None:
    prompts = [f"{COUNT} {i}," for i in range(6)]

    def stream(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "stream": True}
        with engine.client.stream("POST", "/v1/completions", json=body) as response:
            events = [parse_event(line) for line in response.iter_lines() if line]
        return "".join(event["choices"][0]["text"] for event in events[:-1])

    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(stream, prompts))
    assert together == [engine.complete(prompt=p, max_tokens=12)["choices"][0]["text"] for p in prompts]


def test_a_reader_that_goes_away_ends_its_request(engine: EngineProcess) -> None:
    cancelled = 'kvtier_engine_requests_total{reason="cancelled"}'
    before = engine.metric(cancelled)
    body = {"prompt": COUNT, "max_tokens": 1200, "temperature": 0, "stream": True}
    with engine.client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    until(lambda: engine.metric(cancelled) == before + 1)
    engine.chat(max_tokens=1)


def test_errors_are_openai_s(official: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL_NAME, "prompt": "a", "max_tokens": 1}
    with pytest.raises(openai.NotFoundError) as unknown:
        official.completions.create(**ask | {"model": "gpt-4"}, stream=True)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="1 prompt tokens and max_tokens 100000") as too_long:
        official.completions.create(**ask | {"max_tokens": 100_000}, stream=True)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match="this engine supports False only") as unsupported:
        official.completions.create(**ask, logprobs=3)
    assert unsupported.value.param == "logprobs"
    assert official.models.retrieve(MODEL_NAME).id == official.models.list().data[0].id == MODEL_NAME
    with pytest.raises(openai.NotFoundError):
        official.models.retrieve("gpt-4")


def test_a_reset_over_http(engine: EngineProcess) -> None:
    engine.complete(prompt=COUNT * 5, max_tokens=1)
    assert _cached(engine.complete(prompt=COUNT * 5, max_tokens=1)) > 0
    answer = engine.post("/v1/cache/reset", {})
    assert answer["scope"] == "engine"
    assert answer["forgotten_blocks"]["device"] > 0
    assert _cached(engine.complete(prompt=COUNT * 5, max_tokens=1)) == 0
    assert engine.client.post("/v1/cache/reset").json()["forgotten_blocks"]["device"] > 0, "no body needed"
    refused = engine.client.post("/v1/cache/reset", json={"scope": "shared"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "scope")
    assert engine.client.get("/v1/cache/reset").status_code == 405


def _cached(answer: dict[str, Any]) -> int:
    num_tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return num_tokens


def test_sigterm_in_the_middle_of_a_stream_says_so_and_exits_with_0(tmp_path: Path) -> None:
    with engine_process(tmp_path, grace_s=1, KVTIER__ENGINE__NUM_THREADS="1") as engine:
        body = {"prompt": COUNT, "max_tokens": 1200, "temperature": 0, "stream": True}
        with engine.client.stream("POST", "/v1/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            assert parse_event(next(lines))["choices"]
            engine.process.send_signal(signal.SIGTERM)
            *_, last = lines
        assert parse_event(last)["error"]["code"] == "unavailable"
        assert engine.process.wait(PATIENCE_S) == 0


def test_streams_of_broken_text_are_together_the_whole(tiny: ServedEngine) -> None:
    """The tiny model writes bytes that hardly ever are characters."""
    num_broken = 0
    for seed in range(4):
        ask = {"prompt": "abc", "temperature": 1.5, "max_tokens": 80, "seed": seed}
        whole = tiny.complete(**ask)
        *events, last = tiny.stream(**ask, stream_options={"include_usage": True})
        assert last is None
        text = "".join(event["choices"][0]["text"] for event in events[:-1])
        assert text == whole["choices"][0]["text"]
        assert text == tiny.tokenizer._tokenizer.decode(whole["kvtier"]["token_ids"])
        assert events[-2]["kvtier"]["token_ids"] == whole["kvtier"]["token_ids"]
        assert events[-1]["usage"]["completion_tokens"] == 80
        num_broken += text.count("\ufffd")
    assert num_broken > 0


def test_stop_sequences_over_http(tiny: ServedEngine) -> None:
    full = tiny.complete(prompt="abc", max_tokens=60)["choices"][0]["text"]
    assert tiny.complete(prompt="abc", max_tokens=60, stop=None)["choices"][0]["text"] == full
    for stop in (full[30:33], [full[40:41], full[20:24]], ["never there", full[50:55]], [], ["never there"]):
        found = [full.find(each) + len(each) for each in ([stop] if isinstance(stop, str) else stop) if each in full]
        ask = {"prompt": "abc", "max_tokens": 60, "stop": stop}
        whole = tiny.complete(**ask)["choices"][0]
        assert whole["finish_reason"] == ("stop" if found else "length")
        if found:
            assert full.startswith(whole["text"])
            assert len(whole["text"]) < min(found) <= len(whole["text"]) + 5
        else:
            assert whole["text"] == full
        *events, last = tiny.stream(**ask)
        assert last is None
        assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
        assert events[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


def test_no_more_is_computed_than_until_the_stop_sequence(tmp_path: Path) -> None:
    model = PacedModel()
    with served_engine(tmp_path, model) as tiny, ThreadPoolExecutor(1) as thread:
        tokens = judge([1, 2, 3], 20)
        text = tiny.tokenizer.decode(tokens)
        stop = text[8:10]
        num_needed = next(n for n in range(21) if stop in tiny.tokenizer.decode(tokens[:n]))
        answer = thread.submit(tiny.complete, prompt=[1, 2, 3], max_tokens=400, stop=stop)
        model.permits.release(num_needed)
        # The engine may be in the next step when it hears of the match.
        until(lambda: _ended(tiny, "stop") or model.permits.release() or False)
        assert model.num_steps < 100
        whole = answer.result(PATIENCE_S)
        assert whole["choices"][0]["text"] == text[: text.index(stop)]
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert whole["kvtier"]["token_ids"] == list(tokens[:num_needed])
        assert whole["usage"]["completion_tokens"] == num_needed
    tiny.rig.close()


def _ended(tiny: ServedEngine, reason: str) -> bool:
    return tiny.rig.counter("engine_requests", reason=reason) > 0


def test_a_slow_reader_holds_up_nobody(tmp_path: Path) -> None:
    """It reads nothing until its answer and another one are computed, though chunks are larger than any buffer."""
    with served_engine(tmp_path, name="m" * 30_000) as tiny, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(PATIENCE_S)
        slow.connect(tiny.address)
        body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 450, "temperature": 0, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: e\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        slow.sendall(head.encode() + body)
        until(lambda: _ended(tiny, "length"))
        assert tiny.complete(prompt=[7], max_tokens=3)["usage"]["completion_tokens"] == 3
        with slow.makefile("r", encoding="utf-8", newline="\n") as lines:
            events = [parse_event(line.strip()) for line in lines if line.startswith("data: ")]
        assert events.pop() is None
        text = "".join(event["choices"][0]["text"] for event in events)
        assert text == tiny.tokenizer.decode(judge([1, 2, 3], 450))
        assert len(events) < 400, "what waited comes in fewer pieces"
    tiny.rig.close()


def test_a_slow_reader_that_resets_its_connection_is_forgotten(tmp_path: Path) -> None:
    with served_engine(tmp_path, PacedModel(), name="m" * 30_000) as tiny:
        model = tiny.rig.scheduler._model
        assert isinstance(model, PacedModel)
        with socket.create_connection(tiny.address, timeout=PATIENCE_S) as slow:
            body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 450, "temperature": 0, "stream": True}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(body)}\r\n\r\n"
            slow.sendall(head.encode() + body)
            model.permits.release(200)
            until(lambda: model.num_steps == 200)
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: _ended(tiny, "cancelled") or (model.num_steps < 400 and model.permits.release()) or False)
    tiny.rig.close()


@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_before_the_first_token_is_an_error_response(tmp_path: Path, stream: bool) -> None:
    model = PacedModel()
    model.fail_from = 0
    model.free()
    with served_engine(tmp_path, model) as tiny:
        response = tiny.client.post("/v1/completions", json={"prompt": "abc", "stream": stream})
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        response = tiny.client.post("/v1/completions", json={"prompt": "abc", "stream": stream})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        assert tiny.client.post("/v1/cache/reset").status_code == 503
        assert tiny.client.get("/health").status_code == 503


def _model_that_fails_after(num_steps: int) -> PacedModel:
    """It waits before the failure, until the test has seen the stream begin and calls `free`."""
    model = PacedModel()
    model.fail_from = num_steps
    model.permits.release(num_steps)
    return model


def test_what_fails_later_is_an_error_event(tmp_path: Path) -> None:
    model = _model_that_fails_after(5)
    with served_engine(tmp_path, model) as tiny:
        body = {"prompt": "abc", "max_tokens": 30, "temperature": 0, "stream": True}
        with tiny.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = (line for line in response.iter_lines() if line)
            assert parse_event(next(lines))["choices"]
            model.free()
            *_, last = lines
        error = parse_event(last)["error"]
        assert error["type"] == "server_error"
        assert "the engine failed" in error["message"]


def test_official_client_hears_of_a_late_failure(tmp_path: Path) -> None:
    model = _model_that_fails_after(5)
    with served_engine(tmp_path, model) as tiny, official_client(str(tiny.client.base_url)) as client:
        stream = client.completions.create(model="tiny", prompt="abc", max_tokens=30, temperature=0, stream=True)
        assert next(stream).choices
        model.free()
        with pytest.raises(openai.APIError, match="the engine failed"):
            list(stream)


def test_an_engine_that_stops_ends_its_streams(tmp_path: Path) -> None:
    model = PacedModel()
    with served_engine(tmp_path, model) as tiny:
        body = {"prompt": "abc", "max_tokens": 30, "stream": True}
        model.permits.release(1)
        with tiny.client.stream("POST", "/v1/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            assert parse_event(next(lines))["choices"]
            tiny.running.engine.stop()
            model.free()
            *_, last = lines
        assert parse_event(last)["error"]["code"] == "unavailable"
    tiny.rig.close()


def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served_engine(tmp_path) as tiny:
        with socket.create_connection(tiny.address, timeout=PATIENCE_S) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: e\r\nContent-Length: 1000\r\n\r\n{")
        with contextlib.suppress(httpx.HTTPError):
            assert tiny.complete(prompt="abc", max_tokens=1)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    tiny.rig.close()
