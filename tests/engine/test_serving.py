"""The process of an engine: how it starts, how it ends, and how many clients it takes."""

import contextlib
import json
import shlex
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from engine_http_rig import parse_event
from engine_process import CONFIG, PATIENCE_S, engine_process, start_engine, until
from kvtier_engine.demo.demo_model import demo_model_path


def test_idle_connections_take_no_more_descriptors_than_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -n 512\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with engine_process(tmp_path) as engine, contextlib.ExitStack() as idle:
        # A request under way stays, whoever comes; those that are idle make room for new ones.
        ask = {"prompt": [1, 2, 3], "max_tokens": 150, "temperature": 0, "stream": True}
        with engine.client.stream("POST", "/v1/completions", json=ask) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            for _ in range(400):
                idle.enter_context(socket.create_connection(engine.address, timeout=PATIENCE_S))
            newcomer = idle.enter_context(socket.create_connection(engine.address, timeout=PATIENCE_S))
            newcomer.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert newcomer.recv(4096).startswith(b"HTTP/1.1 200 ")
            assert [line for line in lines if line][-1] == "data: [DONE]"
        upgrade = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Key": "a2V5",
            "Sec-WebSocket-Version": "13",
        }
        assert engine.client.get("/health", headers=upgrade).status_code == 200, "an offer that a server may leave"
        with socket.create_connection(engine.address, timeout=PATIENCE_S) as over_tls:
            over_tls.sendall(b"\x16\x03\x01\x02\x00 and the rest of a ClientHello\r\n\r\n")
            assert over_tls.recv(4096).startswith(b"HTTP/1.1 400 ")
        # The last of them may have been accepted a moment ago, and are about to be cut.
        until(lambda: len(list(Path(f"/proc/{engine.process.pid}/fd").iterdir())) < 400)
        engine.process.send_signal(signal.SIGTERM)
        _, err = engine.process.communicate(timeout=PATIENCE_S)
    assert err.count("256 clients of the engine are connected: idle ones are cut, or new ones refused") == 1
    assert len(err.splitlines()) < 30
    assert "Traceback" not in err
    assert "a client speaks TLS to a port of HTTP: have it ask http://, or set tls_certificate here" in err
    assert "pip install" not in err, "uvicorn's advice for WebSockets, which nothing here speaks"


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


def test_sigterm_in_the_middle_of_answers_says_so_and_exits_with_0(tmp_path: Path) -> None:
    with engine_process(tmp_path, grace_s=1) as engine, ThreadPoolExecutor(1) as thread:
        body = {"prompt": "Count to a million: 1, 2, 3,", "max_tokens": 1200, "temperature": 0}
        answer = thread.submit(engine.client.post, "/v1/completions", json=body)
        until(lambda: engine.metric("kvtier_engine_running") == 1)
        with engine.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as streamed:
            lines = (line for line in streamed.iter_lines() if line)
            assert parse_event(next(lines))["choices"]
            engine.process.send_signal(signal.SIGTERM)
            *_, last = lines
        assert parse_event(last)["error"]["code"] == "unavailable"
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
