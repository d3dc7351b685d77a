"""The audit log, and logins that fail: noted, counted, slowed down, and no tenant locked out for them."""

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from audit_rig import lines
from kvtier.clock import MONOTONIC
from kvtier.config.credentials import AcceptedToken, Role
from kvtier.errors import UnauthenticatedError
from kvtier.net.address import Address
from kvtier.protocol import pool_pb2
from kvtier.protocol.block import VERSIONS, encode_head
from kvtier.tiers.pool.connection import PoolConnection
from kvtier_pool.administration import Administration
from kvtier_pool.audit import AuditLog
from kvtier_pool.auth import Authenticator, LoginRefusedError
from kvtier_pool.logins import Logins
from kvtier_pool.metrics import PoolMetrics
from pool_rig import RED, TENANTS, TOKENS, WAIT_S, dial, pool_config, running_pool, until

WRONG = "a-wrong-token-of-nobody"
WRONG_ID = hashlib.sha256(WRONG.encode()).hexdigest()[:8]
RED_ID = hashlib.sha256(TOKENS["red"].encode()).hexdigest()[:8]


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
