"""The audit log, and logins that fail: noted, counted, slowed down, and no tenant locked out for them."""

import contextlib
import hashlib
import io
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from configured_pool import OLD, configuration, digest, running
from kvtier.clock import MONOTONIC
from kvtier.config.credentials import AcceptedToken, Role
from kvtier.errors import ConfigError, UnauthenticatedError
from kvtier.net.address import Address
from kvtier.protocol import pool_pb2
from kvtier.protocol.block import VERSIONS, encode_head
from kvtier.tiers.pool.connection import PoolConnection
from kvtier_pool.administration import Administration
from kvtier_pool.audit import AuditLog
from kvtier_pool.auth import Authenticator, LoginRefusedError
from kvtier_pool.logins import Logins
from kvtier_pool.metrics import PoolMetrics
from kvtier_pool.service import PoolService
from pool_rig import RED, TENANTS, TOKENS, WAIT_S, dial, pool_config, running_pool, until

WRONG = "a-wrong-token-of-nobody"
WRONG_ID = hashlib.sha256(WRONG.encode()).hexdigest()[:8]
RED_ID = hashlib.sha256(TOKENS["red"].encode()).hexdigest()[:8]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Desk:
    """Logins with a clock of the test's own, their metrics, and how long each refusal was late."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 100.0
        self.delays: list[float] = []
        self.registry = CollectorRegistry()
        metrics = PoolMetrics(self.registry)
        known = Authenticator(AcceptedToken(digest, Role.TENANT, name) for digest, name in TENANTS.items())
        self.path = folder / "audit.jsonl"
        self.audit = AuditLog(self.path, metrics, clock=lambda: self.now_s)
        self.logins = Logins(known, self.audit, metrics, clock=lambda: self.now_s, sleep=self.delays.append)
        self.audit.start()

    def fail(self, peer: str, door: str = "block", token: str = WRONG) -> None:
        with pytest.raises(LoginRefusedError):
            self.logins.at(door, peer).tenant(token)

    def written(self) -> list[dict[str, Any]]:
        """All lines, once the log has ended."""
        self.audit.stop()
        return lines(self.path)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.audit.stop()


def test_a_flood_of_refusals_is_counted_and_slowed_and_locks_nobody_out(desk: Desk) -> None:
    for port in range(1000):
        desk.fail(f"10.0.0.1:{port + 1}")
        assert desk.logins.at("block", f"10.0.0.1:{port}").tenant(TOKENS["red"]).name == "red"
    assert len(desk.delays) == 997, "the first three are answered at once, and no good login waits"
    assert desk.delays == sorted(desk.delays)
    assert desk.delays[-1] == 0.5
    desk.fail("10.0.0.2:1")
    assert len(desk.delays) == 997, "another address is none the worse"
    desk.now_s += 61
    desk.fail("10.0.0.1:1")
    assert len(desk.delays) == 997, "forgiven"
    found = desk.written()
    refused = [line for line in found if line["event"] == "login_refused" and line["address"].startswith("10.0.0.1:")]
    assert [line.get("repeated") for line in refused] == [None, 1000]
    assert refused[0]["token"] == WRONG_ID
    assert refused[0]["reason"] == "unknown_token"
    accepted = [line for line in found if line["event"] == "login"]
    assert [line.get("repeated") for line in accepted] == [None, 999]
    assert {(line["name"], line["role"], line["token"]) for line in accepted} == {("red", "tenant", RED_ID)}
    assert desk.registry.get_sample_value("kvtier_pool_logins_refused_total", {"reason": "unknown_token"}) == 1002


def test_many_addresses_are_counted_together(desk: Desk) -> None:
    for number in range(5000):
        desk.fail(f"10.{number >> 8}.{number & 255}.1:9")
    found = desk.written()
    assert len(found) <= 260
    assert sum(line.get("others", 0) for line in found) == 5000 - 256


def test_a_stranger_that_guesses_hides_no_login(desk: Desk) -> None:
    for number in range(1000):
        desk.fail("10.0.0.1:9", token=f"a-wrong-token-number-{number}")
    for number in range(1000):
        desk.fail(f"11.{number >> 8}.{number & 255}.1:9")
    desk.logins.at("block", "10.0.0.2:1").tenant(TOKENS["red"])
    found = desk.written()
    guessed = [line for line in found if line.get("address") == "10.0.0.1:9"]
    assert [line.get("repeated") for line in guessed] == [None, 999]
    assert [line["address"] for line in found if line["event"] == "login"] == ["10.0.0.2:1"]


def test_a_tenant_that_is_refused_often_gets_a_line_for_many(desk: Desk) -> None:
    administration = Administration(None, None, desk.audit, pool_config())  # type: ignore[arg-type] - refused first
    for _ in range(1000):
        with pytest.raises(LoginRefusedError, match="only operators may"):
            administration.purge(Role.TENANT, "red", "blue")
    assert [line.get("repeated") for line in desk.written()] == [None, 999]


def test_strangers_whose_answers_are_late_keep_no_tenant_out(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[str] = []

    def delay_s(logins: Logins, host: str) -> float:
        late.append(host)
        return 2 * WAIT_S

    monkeypatch.setattr(Logins, "_delay_s", delay_s)
    with running_pool(max_connections=4) as pool, contextlib.ExitStack() as strangers:
        hello = {"id": 1, "verb": "hello", "versions": list(VERSIONS), "client": "a stranger", "token": WRONG}
        host, _, port = pool.block[0].rpartition(":")
        for number in range(8):
            stranger = strangers.enter_context(socket.create_connection((host, int(port)), WAIT_S))
            stranger.sendall(encode_head(hello))
            until(lambda number=number: len(late) > number)  # type: ignore[misc]
        dial(pool.block[0]).close()


def test_no_line_has_a_token_in_it(desk: Desk) -> None:
    for token in (WRONG, "too-short", "long" * 1000):
        with pytest.raises(LoginRefusedError) as error:
            desk.logins.at("http", "a Unix socket").log_in(token)
        assert token not in str(error.value)
    desk.logins.at("http", "a Unix socket").log_in(TOKENS["red"])
    desk.audit.stop()
    text = desk.path.read_text()
    assert not [token for token in (WRONG, "longlong", TOKENS["red"]) if token in text]
    reasons = {line.get("reason") for line in lines(desk.path)}
    assert reasons == {None, "unknown_token", "short_token", "long_token"}


def test_a_medium_that_hangs_holds_nobody_up_and_what_is_lost_is_said(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    log = AuditLog(tmp_path / "audit.jsonl", PoolMetrics(registry))
    log.start()
    writing, may_write = threading.Event(), threading.Event()
    write = log._handler.emit

    def hang(record: Any) -> None:
        writing.set()
        assert may_write.wait(WAIT_S)
        write(record)

    log._handler.emit = hang  # type: ignore[method-assign]
    log.note("first")
    assert writing.wait(WAIT_S)
    for number in range(1500):
        log.note("next", number=number)
    assert registry.get_sample_value("kvtier_pool_audit_lines_lost_total") == 1500 - 1024
    may_write.set()
    until(lambda: any(line["event"] == "audit_lines_lost" for line in lines(tmp_path / "audit.jsonl")))
    log.stop()
    (lost,) = [line["count"] for line in lines(tmp_path / "audit.jsonl") if line["event"] == "audit_lines_lost"]
    assert lost == 1500 - 1024


def test_the_file_is_bounded_and_private(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", PoolMetrics(CollectorRegistry()), max_bytes=4096)
    log.start()
    for number in range(1000):
        log.note("event", number=number)
    log.stop()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2", "audit.jsonl.3"]
    for file in files:
        assert file.stat().st_size <= 4096
        assert file.stat().st_mode & 0o777 == 0o600
        assert lines(file)


@pytest.mark.parametrize("moved", [True, False])
def test_lines_go_to_the_file_that_has_the_name_whoever_moves_it(tmp_path: Path, moved: bool) -> None:
    path, old = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl-20261124"
    log = AuditLog(path, PoolMetrics(CollectorRegistry()))
    log.start()
    log.note("first")
    until(lambda: bool(path.read_text()))
    if moved:
        path.rename(old)
    else:
        path.unlink()
    log.note("second")
    log.stop()
    assert [line["event"] for line in lines(path)] == ["second"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert not moved or [line["event"] for line in lines(old)] == ["first"]


def test_a_signal_after_logrotate_has_moved_the_file_makes_a_new_one(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    path = configuration(tmp_path / "pool.toml", f'"{digest(OLD)}"')
    path.write_text(path.read_text().replace("[tenants.red]", 'audit_log = "audit.jsonl"\n[tenants.red]', 1))
    with running(path) as pool:
        audit.rename(tmp_path / "audit.jsonl.old")
        pool.service.process.send_signal(signal.SIGHUP)
        until(lambda: audit.exists() and "reload" in [line["event"] for line in lines(audit)])


def test_a_file_whose_folder_is_gone_loses_lines_and_says_so(tmp_path: Path) -> None:
    registry, folder = CollectorRegistry(), tmp_path / "folder"
    folder.mkdir()
    log = AuditLog(folder / "audit.jsonl", PoolMetrics(registry))
    log.start()
    folder.rename(tmp_path / "gone")
    log.note("lost")
    until(lambda: registry.get_sample_value("kvtier_pool_audit_lines_lost_total") == 1)
    folder.mkdir()
    log.note("kept")
    log.stop()
    assert [line["event"] for line in lines(folder / "audit.jsonl")] == ["kept"]


@pytest.mark.parametrize("door", ["grpc", "http"])
def test_a_few_refusals_are_late_at_a_time_and_others_hold_no_thread(desk: Desk, door: str) -> None:
    held, may_end = threading.Semaphore(0), threading.Event()

    def sleep(seconds: float) -> None:
        held.release()
        assert may_end.wait(WAIT_S)

    for _ in range(4):
        desk.fail("192.0.2.1:5", door)
    desk.logins._sleep = sleep
    late = [threading.Thread(target=desk.fail, args=("192.0.2.1:5", door)) for _ in range(4)]
    for thread in late:
        thread.start()
    for _ in late:
        assert held.acquire(timeout=WAIT_S)
    for _ in range(100):
        desk.fail("192.0.2.1:5", door)  # comes back at once
    may_end.set()
    for thread in late:
        thread.join(WAIT_S)
    assert not held.acquire(blocking=False)


def test_a_pool_says_who_was_let_in_and_refused_at_all_its_doors(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    unix = f"unix:{tmp_path}/pool.sock"
    with running_pool(audit_log=path, listen=["127.0.0.1:0", unix]) as pool:
        assert path.stat().st_mode & 0o777 == 0o600, "from the start"
        for address in pool.block:
            with pytest.raises(UnauthenticatedError):
                PoolConnection.open(Address.parse(address), WRONG, RED, MONOTONIC() + WAIT_S)
            dial(address).close()
        with grpc.insecure_channel(pool.grpc[0]) as channel:
            usage = channel.unary_unary("/kvtier.pool.v1.Pool/Usage")
            metadata = [("authorization", f"Bearer {TOKENS['red']}")]
            for _ in range(3):
                usage(pool_pb2.UsageRequest().SerializeToString(), metadata=metadata, timeout=WAIT_S)
            with pytest.raises(grpc.RpcError, match="not known to this pool"):
                usage(b"", metadata=[("authorization", f"Bearer {WRONG}")], timeout=WAIT_S)
    noted = lines(path)
    found = [(line["event"], line["door"], line["address"].rpartition(":")[0], line.get("name")) for line in noted]
    tcp = "127.0.0.1"
    for door, host in (("block", tcp), ("block", ""), ("grpc", tcp)):
        assert found.count(("login_refused", door, host, None)) == 1
        assert found.count(("login", door, host, "red")) == 1
    assert f"a Unix socket, user {os.geteuid()}" in {line["address"] for line in noted}


def test_a_file_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pool_service\.audit_log: .* cannot be written"):
        PoolService(pool_config(audit_log=tmp_path / "nowhere" / "audit.jsonl")).start()
    os.mkfifo(tmp_path / "nobody-reads")
    with pytest.raises(ConfigError, match="nobody-reads cannot be written"):
        PoolService(pool_config(audit_log=tmp_path / "nobody-reads")).start()


def test_lines_that_a_full_medium_refuses_are_counted() -> None:
    registry = CollectorRegistry()
    log = AuditLog(Path("/dev/full"), PoolMetrics(registry))
    log.start()
    log.note("first")
    until(lambda: registry.get_sample_value("kvtier_pool_audit_lines_lost_total") == 1)
    log.stop()


def test_a_log_that_filled_its_disk_goes_on_in_the_next_file(tmp_path: Path) -> None:
    """What the full one refused is refused once more when the log lets go of it."""
    registry, path = CollectorRegistry(), tmp_path / "audit.jsonl"
    path.symlink_to("/dev/full")
    log = AuditLog(path, PoolMetrics(registry))
    log.start()
    log.note("lost")
    until(lambda: registry.get_sample_value("kvtier_pool_audit_lines_lost_total") == 1)
    path.unlink()
    log.note("kept")
    log.note("kept, too")
    log.stop()
    assert [line["event"] for line in lines(path)] == ["kept", "kept, too"]
    assert registry.get_sample_value("kvtier_pool_audit_lines_lost_total") == 1


def test_a_log_goes_on_after_a_rotation_that_failed(tmp_path: Path) -> None:
    """A disk that is full when the file is closed for its new name leaves it closed."""
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, PoolMetrics(CollectorRegistry()))
    log.start()
    log.note("first")
    until(lambda: bool(path.read_text()))
    log._handler.stream.close()  # type: ignore[attr-defined]
    log.note("second")
    log.stop()
    assert [line["event"] for line in lines(path)] == ["first", "second"]


@pytest.mark.parametrize("medium", ["a file", "standard error"])
def test_whatever_happens_to_a_line_the_next_one_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], medium: str
) -> None:
    registry, path = CollectorRegistry(), tmp_path / "audit.jsonl"
    log = AuditLog(path if medium == "a file" else None, PoolMetrics(registry))
    log.start()
    emit = log._handler.emit

    def fail_once(record: Any) -> None:
        log._handler.emit = emit  # type: ignore[method-assign]
        raise ValueError("of no kind that anybody expects")

    log._handler.emit = fail_once  # type: ignore[method-assign]
    log.note("lost")
    until(lambda: registry.get_sample_value("kvtier_pool_audit_lines_lost_total") == 1)
    log.note("kept")
    log.stop()
    written = path.read_text() if medium == "a file" else capsys.readouterr().err
    assert '"kept"' in written
    assert '"lost"' not in written


def test_a_standard_error_that_is_closed_loses_lines_and_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, closed = CollectorRegistry(), io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    log = AuditLog(None, PoolMetrics(registry))
    log.start()
    for number in range(1, 3):
        log.note("lost")
        until(lambda number=number: registry.get_sample_value("kvtier_pool_audit_lines_lost_total") == number)  # type: ignore[misc]
    log.stop()
