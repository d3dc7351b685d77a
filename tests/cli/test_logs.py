"""What processes log: text or JSON lines, from which level on, whose peer and tenant, and no secrets."""

import contextlib
import io
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.config import token_sha256
from kvtier.errors import KvtierError, UnavailableError
from kvtier.identity.keys import tenant_id
from kvtier.memory.arena import Arena
from kvtier.metrics import Metrics
from kvtier.system.logs import (
    OURS,
    bind_log_fields,
    current_request_id,
    log_fields,
    set_up_logs,
    set_up_logs_within,
    within_request,
)
from kvtier.system.processes import Service
from kvtier.system.tracing import tracing
from kvtier.testing.contract import make_key
from kvtier.tiers.pool.socket_transport import SocketTransport
from kvtier.tiers.sidecar import ProcessSettings, SharedMemory, SidecarTier, TierProcess
from pool_rig import until

TOKEN = "of-red-0123456789abcdef"


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in map(logging.getLogger, OURS)]
    of_root, hooks = (root.handlers[:], root.level), (sys.excepthook, threading.excepthook)
    yield
    sys.excepthook, threading.excepthook = hooks
    logging.captureWarnings(False)
    root.handlers[:], root.level = of_root
    for logger, handlers, level, propagate in before:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
    root.setLevel(of_root[1])
    bind_log_fields()


@pytest.mark.usefixtures("logging_as_before")
def test_one_format_as_text_and_as_json() -> None:
    written = io.StringIO()
    set_up_logs("debug", "json", written)
    log = logging.getLogger("kvtier_pool.block")
    bind_log_fields(peer="10.0.0.1:5", tenant="red")
    with tracing.within(f"00-{'ab' * 16}-{'cd' * 8}-01"), log_fields(request_id="r1"):
        log.warning("tier %s:\nleft alone", "pool", extra={"tier": "pool"})
    try:
        raise ValueError("of a test")
    except ValueError:
        log.exception("a request failed")
    logging.getLogger("redis").debug("AUTH secret")
    first, second = map(json.loads, written.getvalue().splitlines())
    for of_all in ("time", "pid"):
        assert of_all in first
    assert {name: value for name, value in first.items() if name not in ("time", "pid")} == {
        "level": "warning",
        "logger": "kvtier_pool.block",
        "message": "tier pool:\nleft alone",
        "peer": "10.0.0.1:5",
        "tenant": "red",
        "request_id": "r1",
        "tier": "pool",
        "trace_id": "ab" * 16,
    }
    assert first["time"].endswith("+00:00")
    assert "ValueError: of a test" in second["traceback"]
    assert second.keys().isdisjoint(("trace_id", "request_id"))
    written.truncate(0)
    set_up_logs(stream=written)
    log.debug("not from info on")
    log.info("something")
    assert written.getvalue().endswith(" INFO kvtier_pool.block: something [peer=10.0.0.1:5 tenant=red]\n")
    assert "not from info on" not in written.getvalue()


@pytest.mark.usefixtures("logging_as_before")
def test_what_ends_a_thread_is_a_line_of_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: type[BaseException]) -> None:
        raise error("of a test")

    written = io.StringIO()
    set_up_logs(format="json", stream=written)
    for error in (ValueError, SystemExit):
        thread = threading.Thread(target=fail, args=(error,), name="kvtier-test")
        thread.start()
        thread.join()
    sys.excepthook(KeyError, KeyError("at last"), None)
    first, last = map(json.loads, written.getvalue().splitlines())
    assert "ended thread kvtier-test" in first["message"]
    assert "ValueError: of a test" in first["traceback"]
    assert (last["level"], "KeyError" in last["traceback"]) == ("critical", True)
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("logging_as_before")
def test_within_an_engine_only_what_is_asked_for_changes(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs_within(None, None)
    assert logging.getLogger("kvtier").propagate
    set_up_logs_within("error", "json")
    logging.getLogger("kvtier.tiers").warning("not this")
    logging.getLogger("kvtier.tiers").error("this")
    assert json.loads(capsys.readouterr().err)["message"] == "this"


def test_a_pool_says_in_json_whom_it_refuses(tmp_path: Path) -> None:
    """And that its Redis is away, and which setting does nothing. With everything logged there is: each line is an
    object, and none has a token."""
    log, port = tmp_path / "pool.log", _free_port()
    arguments = ["pool", "serve", "--listen", f"127.0.0.1:{port}", "--http-listen", "127.0.0.1:0"]
    environ = {
        "KVTIER__LOG__FORMAT": "json",
        "KVTIER__LOG__LEVEL": "debug",
        "KVTIER__TENANTS__RED__TOKEN_SHA256": json.dumps([_digest(TOKEN)]),
        "KVTIER__POOL_SERVICE__MAX_CONNECTIONS": "1",
        "KVTIER__POOL_SERVICE__GRPC_LISTEN": "[]",
        "KVTIER__POOL_SERVICE__MEMORY_BYTES": "16MiB",
    }
    environ["KVTIER__POOL_SERVICE__REDIS_URL"] = f"redis://127.0.0.1:{_free_port()}"
    environ["KVTIER__POOL_SERVICE__DISK_SYNC"] = "batch"
    with Service(arguments, log=log, environ=environ) as pool:
        address = pool.ready()["block"]
        with pytest.raises(KvtierError, match="not known to this pool"):
            _connect(address, "of-nobody-0123456789abcdef")
        with socket.create_connection(("127.0.0.1", port), 5) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert b"block protocol" in stranger.recv(1 << 16)
        first = _connect_when_there_is_room(address, TOKEN)  # the stranger's place is free a moment after it has left
        try:
            with pytest.raises(KvtierError, match="max_connections"):
                _connect(address, TOKEN)
        finally:
            first.close()
        until(lambda: "left alone for now" in log.read_text())  # the Redis, which nobody has asked for a block
    text = log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert TOKEN not in text
    assert "of-nobody" not in text
    assert _digest(TOKEN) not in text
    assert any(line["message"].startswith("configuration: pool_service.disk_sync: ") for line in lines)
    by_event = {line.get("event"): line for line in lines}
    assert by_event["login_refused"]["address"].startswith("127.0.0.1:")
    assert by_event["login_refused"]["reason"] == "unknown_token"
    assert by_event["connection_refused"]["limit"] == "max_connections"
    assert any(line["level"] == "info" and line.get("peer", "").startswith("127.0.0.1:") for line in lines), "stranger"


def test_nothing_of_grpc_precedes_what_a_pool_says(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        places = ("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--grpc-listen", f"127.0.0.1:{port}")
        tenant = ("--tenant", f"red={_digest(TOKEN)}", "--memory-bytes", "16MiB")
        answer = _kvtier("pool", "serve", *places, *tenant, "--log-format", "json")
    assert answer.returncode == 1
    lines = [json.loads(line) for line in answer.stderr.splitlines()]
    assert f"cannot listen on 127.0.0.1:{port}: is it in use" in lines[-1]["message"]
    assert lines[-1]["level"] == "critical"


def test_a_tier_process_logs_as_its_engine_is_told_to(capfd: pytest.CaptureFixture[str]) -> None:
    arena = Arena(1, 4096, shared=True)
    settings = ProcessSettings(factory="json:loads", settings="{}", log_format="json")  # takes other arguments
    try:
        with pytest.raises(KvtierError, match="failed in the tier process"):
            TierProcess(SharedMemory(arena.descriptor, arena.memory), settings, metrics=Metrics())
    finally:
        arena.close()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(line["logger"], line["message"]) for line in lines] == [("__main__", "open failed")]
    assert "TypeError" in lines[0]["traceback"]


def test_a_tier_process_says_whose_request_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    arena = Arena(1, 4096, shared=True)
    settings = ProcessSettings(factory="aside_rig:memory", settings=str(1 << 20), log_format="json")
    process = TierProcess(SharedMemory(arena.descriptor, arena.memory), settings, metrics=Metrics())
    try:
        with within_request("cmpl-7"), pytest.raises(KvtierError, match="lookup failed in the tier process"):
            SidecarTier("none of its tiers", process).lookup([make_key("a")])
        assert current_request_id() == ""
    finally:
        process.close()
        arena.close()
    (line,) = map(json.loads, capfd.readouterr().err.splitlines())
    assert (line["message"], line["request_id"]) == ("lookup failed", "cmpl-7")


def _connect(address: str, token: str) -> SocketTransport:
    transport = SocketTransport(address, token, tenant_id("red"), metrics=Metrics(), connect_timeout_s=5.0)
    try:
        transport.connect()
    except BaseException:
        transport.close()
        raise
    return transport


def _connect_when_there_is_room(address: str, token: str) -> SocketTransport:
    connected: list[SocketTransport] = []

    def is_let_in() -> bool:
        with contextlib.suppress(UnavailableError):
            connected.append(_connect(address, token))
        return bool(connected)

    until(is_let_in)
    return connected[0]


def _digest(token: str) -> str:
    return token_sha256(token)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _kvtier(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kvtier.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(os.environ))
