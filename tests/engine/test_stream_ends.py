"""How streams over HTTP end: stop sequences, slow readers, failures, an engine that stops. A tiny model."""

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from engine_http_rig import PacedModel, ServedEngine, parse_event, served_engine
from engine_process import PATIENCE_S, official_client, until
from engine_rig import judge


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[ServedEngine]:
    with served_engine(tmp_path) as served:
        yield served
    served.rig.close()


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
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
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
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
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


def test_each_token_is_sent_before_the_next_one_is_computed(tmp_path: Path) -> None:
    model, tokens = PacedModel(), judge([1, 2, 3], 10)
    pieces: list[str] = []
    with served_engine(tmp_path, model) as tiny, ThreadPoolExecutor(1) as thread:

        def read() -> None:
            body = {"prompt": [1, 2, 3], "max_tokens": 10, "temperature": 0, "stream": True}
            with tiny.client.stream("POST", "/v1/completions", json=body) as response:
                events = (parse_event(line) for line in response.iter_lines() if line)
                pieces.extend(event["choices"][0]["text"] for event in events if event is not None)

        reading = thread.submit(read)
        for num_tokens in range(1, 11):
            model.permits.release()
            whole_characters = tiny.tokenizer.decode(tokens[:num_tokens]).rstrip("\ufffd")
            until(lambda text=whole_characters: "".join(pieces).startswith(text))  # type: ignore[misc]
        reading.result(PATIENCE_S)
        assert "".join(pieces) == tiny.tokenizer.decode(tokens)
    tiny.rig.close()


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
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        with contextlib.suppress(httpx.HTTPError):
            assert tiny.complete(prompt="abc", max_tokens=1)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    tiny.rig.close()
