"""A Redis that dies, hangs, refuses, or is none: every call ends in time, with nothing wrong in it, and heals."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from free_port import free_port
from kvtier.metrics import Metrics
from kvtier.testing.contract import make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import Status, Usage, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.redis import RedisTier
from redis_rig import (
    BLOCK_BYTES,
    KEYS,
    MIB,
    PAYLOADS,
    WAIT_S,
    RedisServer,
    all_errors,
    connect,
    errors,
    items,
    poll,
    running_redis,
)
from suspending import resume, suspend
from transfers_rig import kill_during_transfers


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path) as server:
        yield server


def assert_heals(tier: RedisTier) -> None:
    poll(lambda: tier.write(items(2)) in ([WriteStatus.STORED] * 2, [WriteStatus.EXISTS] * 2))
    assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == PAYLOADS[:2]


@pytest.mark.parametrize("verb", ["read", "write"])
def test_kill_minus_9_during_transfers_heals_by_itself(server: RedisServer, verb: str) -> None:
    metrics = Metrics()
    tier = connect(server.url, metrics=metrics)
    assert tier.write(items(16)) == [WriteStatus.STORED] * 16
    kill_during_transfers(tier, verb, items(16), server.kill)
    assert errors(metrics, verb, "UnavailableError") > 0
    assert tier.usage() == Usage(0, 0, 0)
    server.start()
    assert_heals(tier)
    assert tier.lookup(KEYS) == [Status.HIT] * 2 + [Status.MISS] * 14, "it came back empty"
    tier.close()


def test_a_restart_between_two_calls_goes_unnoticed(server: RedisServer) -> None:
    """Connections kept from before are found closed."""
    metrics = Metrics()
    tier = connect(server.url, metrics=metrics)
    assert tier.write(items(2)) == [WriteStatus.STORED] * 2
    server.kill()
    server.start()
    assert tier.write(items(2)) == [WriteStatus.STORED] * 2
    assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == PAYLOADS[:2]
    assert all_errors(metrics) == []
    tier.close()


def test_a_stopped_server_costs_a_deadline_and_its_late_answers_reach_nobody(server: RedisServer) -> None:
    metrics = Metrics()
    tier, patient = connect(server.url, metrics=metrics, call_timeout_s=0.4), connect(server.url)
    assert patient.write(items(16)) == [WriteStatus.STORED] * 16
    patient.close()
    poll(lambda: tier.lookup(KEYS) == [Status.HIT] * 16)  # it has a connection
    into = [memoryview(bytearray(BLOCK_BYTES)) for _ in KEYS]
    with server.stopped():
        start = time.monotonic()
        assert tier.read(KEYS, into) == [Status.MISS] * 16
        assert tier.lookup(KEYS) == [Status.MISS] * 16
        assert tier.write([summed(make_key("new"), make_payload("new", 8 * MIB))]) == [WriteStatus.FAILED]
        assert tier.discard(KEYS) == 0
        assert tier.usage() == Usage(0, 0, 0)
        assert time.monotonic() - start < WAIT_S
        before = [bytes(buffer) for buffer in into]
        assert errors(metrics, "read", "UnavailableError") == 1
    # The server executes what it had received: the reads, and perhaps the discard. None of it may confuse a call.
    poll(lambda: tier.write(items(16)) in ([WriteStatus.STORED] * 16, [WriteStatus.EXISTS] * 16))
    for order in (KEYS, KEYS[::-1]):
        wanted = {key: payload for key, payload, _ in items(16)}
        loaded = read_blocks(tier, order, BLOCK_BYTES)
        assert all(block in (None, wanted[key]) for key, block in zip(order, loaded, strict=True))
    assert [bytes(buffer) for buffer in into] == before
    tier.close()


def test_stopped_in_the_middle_of_a_large_read(server: RedisServer) -> None:
    """What was verified before is a hit; the buffers of the rest are the caller's, whatever comes after."""
    tier = connect(server.url, call_timeout_s=3.0)
    patient = connect(server.url)
    keys = [make_key(("big", i)) for i in range(64)]
    payload = make_payload("big", 2 * MIB)
    assert patient.write([summed(key, payload) for key in keys]) == [WriteStatus.STORED] * 64
    into = [memoryview(bytearray(2 * MIB)) for _ in keys]

    def stop_after_some() -> None:
        poll(lambda: into[1][-1] != 0)
        suspend(server.process.pid)

    with ThreadPoolExecutor(1) as executor:
        stopping = executor.submit(stop_after_some)
        try:
            statuses = tier.read(keys, into)
            stopping.result(WAIT_S)
        finally:
            before = [bytes(buffer) for buffer in into]
            resume(server.process.pid)
    assert statuses[0] is Status.HIT
    assert all(status is Status.MISS or into[i] == payload for i, status in enumerate(statuses))
    poll(lambda: read_blocks(tier, keys[:2], 2 * MIB) == [payload] * 2)
    assert [bytes(buffer) for buffer in into] == before
    tier.close()
    patient.close()


def test_a_slow_server_is_left_alone_and_asked_again_later(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    now = [0.0]
    breaker = CircuitBreaker(2, 10.0, clock=lambda: now[0])
    tier, patient = connect(server.url, metrics=metrics, breaker=breaker, call_timeout_s=0.2), connect(server.url)
    assert patient.write(items(1)) == [WriteStatus.STORED]
    patient.close()
    with server.stopped():
        for _ in range(2):
            assert tier.lookup(KEYS[:1]) == [Status.MISS]
        for _ in range(5):
            assert tier.write(items(1)) == [WriteStatus.FAILED]
        assert errors(metrics, "lookup", "UnavailableError") == 2
        assert errors(metrics, "write", "BreakerOpen") == 5

    def probe_hits() -> bool:
        now[0] += 11.0
        return tier.lookup(KEYS[:1]) == [Status.HIT]

    poll(probe_hits)
    lines = [r.getMessage() for r in caplog.records]
    assert len([line for line in lines if "left alone" in line]) == 1
    assert len([line for line in lines if "answers again" in line]) == 1
    tier.close()


def test_a_server_that_has_become_a_replica_refuses_writes_only(server: RedisServer) -> None:
    """As after a failover that nobody told us about."""
    metrics = Metrics()
    tier = connect(server.url, metrics=metrics)
    assert tier.write(items(2)) == [WriteStatus.STORED] * 2
    with server.client() as client:
        client.replicaof("127.0.0.1", str(free_port()))
        assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == PAYLOADS[:2]
        assert tier.write(items(3)[2:]) == [WriteStatus.FAILED]
        assert tier.discard(KEYS[:1]) == 0
        assert errors(metrics, "write", "UnavailableError") == 1
        client.config_set("replica-serve-stale-data", "no")
        assert tier.lookup(KEYS[:1]) == [Status.MISS]
        assert errors(metrics, "lookup", "UnavailableError") == 1
        client.replicaof("NO", "ONE")
    assert tier.write(items(3)[2:]) == [WriteStatus.STORED]
    assert read_blocks(tier, KEYS[:3], BLOCK_BYTES) == [None, *PAYLOADS[1:3]], "discarded as soon as it could be"
    with server.client() as client:
        assert client.dbsize() == 2
    tier.close()


def test_a_write_of_what_is_still_to_be_discarded_has_failed(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has the block, but it is hidden here and about to go: neither there nor stored."""
    monkeypatch.setattr("kvtier.tiers.redis.tier._DISCARDS_AT_ONCE", 1)
    tier = connect(server.url)
    assert tier.write(items(3)) == [WriteStatus.STORED] * 3
    with server.client() as client:
        client.replicaof("127.0.0.1", str(free_port()))
        assert tier.discard(KEYS[:3]) == 0
        client.replicaof("NO", "ONE")
    assert tier.write(items(3)) == [WriteStatus.STORED, WriteStatus.FAILED, WriteStatus.FAILED]
    assert tier.lookup(KEYS[:3]) == [Status.HIT, Status.MISS, Status.MISS]
    assert tier.write(items(3)) == [WriteStatus.EXISTS, WriteStatus.STORED, WriteStatus.STORED]
    assert read_blocks(tier, KEYS[:3], BLOCK_BYTES) == PAYLOADS[:3]
    tier.close()


PASSWORD = "correct horse battery"


@pytest.mark.parametrize(
    ("username", "password"), [(None, None), (None, "staple guess"), ("nobody", "staple guess"), ("nobody", PASSWORD)]
)
def test_wrong_credentials_are_a_miss_a_counter_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, username: str | None, password: str | None
) -> None:
    metrics = Metrics()
    with running_redis(tmp_path, password=PASSWORD) as server, caplog.at_level(logging.DEBUG):
        tier = connect(
            server.url, username=username, password=password, metrics=metrics, breaker=CircuitBreaker(3, 1000.0)
        )
        for _ in range(5):
            assert tier.lookup(KEYS[:1]) == [Status.MISS]
            assert tier.write(items(1)) == [WriteStatus.FAILED]
        assert errors(metrics, "lookup", "UnauthenticatedError") == 2
        assert errors(metrics, "lookup", "BreakerOpen") == 3
        assert len([r for r in caplog.records if "check username and password" in r.getMessage()]) == 1
        assert password is None or password not in caplog.text + repr(vars(tier))
        tier.close()


def test_the_right_password(tmp_path: Path) -> None:
    with running_redis(tmp_path, password=PASSWORD) as server:
        for username in (None, "default"):
            tier = connect(server.url, username=username, password=PASSWORD)
            assert_heals(tier)
            tier.close()


def test_a_server_that_repeats_the_password_does_not_get_it_into_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown command comes back with its arguments, and AUTH may be one."""
    with running_redis(tmp_path, "--rename-command", "AUTH", "") as server, caplog.at_level(logging.DEBUG):
        tier = connect(server.url, password=PASSWORD, breaker=CircuitBreaker(1, 1000.0))
        assert tier.lookup(KEYS[:1]) == [Status.MISS]
        assert "***" in caplog.text
        assert PASSWORD not in caplog.text
        tier.close()


@contextlib.contextmanager
def stranger(greeting: bytes, after: bytes = b"") -> Iterator[str]:
    """Something that listens and is no Redis: the URL that leads there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def talk() -> None:
            kept = []
            while True:
                connection, _ = listener.accept()
                if stop.is_set():
                    connection.close()
                    break
                kept.append(connection)
                with contextlib.suppress(OSError):
                    connection.sendall(greeting)
                    connection.recv(65536)
                    connection.sendall(after)
            for connection in kept:
                connection.close()

        with ThreadPoolExecutor(1) as executor:
            talking = executor.submit(talk)
            yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
            stop.set()
            socket.create_connection(listener.getsockname()[:2]).close()
            talking.result(WAIT_S)


@pytest.mark.parametrize("password", [None, PASSWORD])
@pytest.mark.parametrize(
    ("greeting", "after"),
    [
        (b"", b""),
        (b"SSH-2.0-OpenSSH_9.2\r\n", b""),
        (b"", b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"),
        (b"", b"+OK\r\n" * 1000),
        (b"", b"$999999999999\r\n" + bytes(3 * MIB)),
        (b"", b"$" + b"9" * 5000 + b"\r\n"),
        (b"\x00" * 100, b""),
        (b"", b"-\xff\xfe not UTF-8\r\n"),
        (b"", b"*2000000000\r\n"),
        (b"", b"*100000\r\n" * 100),
        (b"", b"*1\r\n" * 200_000 + b":1\r\n"),
        (b"", b"%1\r\n*0\r\n:1\r\n"),
    ],
)
def test_what_is_no_redis_is_a_miss_in_time(greeting: bytes, after: bytes, password: str | None) -> None:
    metrics = Metrics()
    with stranger(greeting, after) as url:
        tier = connect(url, password=password, metrics=metrics, call_timeout_s=0.5, connect_timeout_s=0.3)
        assert tier.lookup(KEYS[:1]) == [Status.MISS]
        assert read_blocks(tier, KEYS[:1], BLOCK_BYTES) == [None]
        assert len(all_errors(metrics)) == 2
        tier.close()


def test_a_server_that_answers_byte_by_byte_costs_a_deadline() -> None:
    """Each byte comes in time, and the answer never does."""
    stop = threading.Event()

    def talk(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            while not stop.is_set():
                asked = connection.recv(65536)
                if b"EXISTS" not in asked:
                    connection.sendall(b"+PONG\r\n" if b"PING" in asked else b"+OK\r\n")
                    continue
                connection.sendall(b"+")
                while not stop.wait(0.01):
                    connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as executor:
        talking = executor.submit(talk, listener)
        metrics = Metrics()
        tier = connect(f"redis://127.0.0.1:{listener.getsockname()[1]}", metrics=metrics, call_timeout_s=0.5)
        began = time.monotonic()
        assert tier.lookup(KEYS[:1]) == [Status.MISS]
        assert time.monotonic() - began < WAIT_S / 4
        assert errors(metrics, "lookup", "UnavailableError") == 1
        tier.close()
        stop.set()
        talking.result(WAIT_S)


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:1",
        "redis://no-such-host.invalid",
        "redis://no..host",
        f"redis+cluster://{'long' * 20}",
        "unix:///no/such/socket",
        "rediss://127.0.0.1:1?ca=/no/such/file",
    ],
)
def test_nobody_there_is_a_miss(url: str) -> None:
    metrics = Metrics()
    tier = connect(url, metrics=metrics, connect_timeout_s=2.0)
    assert tier.lookup(KEYS[:1]) == [Status.MISS]
    assert tier.write(items(1)) == [WriteStatus.FAILED]
    assert errors(metrics, "lookup", "UnavailableError") == 1
    tier.close()


def test_a_connection_that_comes_too_late_is_closed(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a name takes long to resolve: the call ends in time, and nobody writes into its buffers later."""
    patient = connect(server.url)
    assert patient.write(items(1)) == [WriteStatus.STORED]
    before = psutil.Process().num_fds(), threading.active_count()
    go_on, resolving = threading.Event(), threading.Event()
    resolve = socket.getaddrinfo

    def slowly(*args: Any, **options: Any) -> Any:
        resolving.set()
        assert go_on.wait(WAIT_S)
        return resolve(*args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    metrics = Metrics()
    tier = connect(server.url, metrics=metrics, call_timeout_s=0.2)
    into = memoryview(bytearray(BLOCK_BYTES))
    assert tier.read(KEYS[:1], [into]) == [Status.MISS]
    assert tier.discard(KEYS[:1]) == 0
    assert resolving.is_set()
    assert errors(metrics, "read", "UnavailableError") == 1
    tier.close()
    go_on.set()
    poll(lambda: (psutil.Process().num_fds(), threading.active_count()) == before)
    assert into == bytes(BLOCK_BYTES)
    assert patient.lookup(KEYS[:1]) == [Status.HIT], "nobody discards it late, either"
    patient.close()


def test_many_threads_at_once_and_nothing_left_behind(server: RedisServer) -> None:
    before = psutil.Process().num_fds(), threading.active_count()
    tier = connect(server.url)
    tier.write(items(16))
    start = threading.Barrier(12)

    def work(worker: int) -> None:
        start.wait(WAIT_S)
        for _ in range(10):
            order = KEYS[worker:] + KEYS[:worker]
            assert read_blocks(tier, order, BLOCK_BYTES) == PAYLOADS[worker:] + PAYLOADS[:worker]

    with ThreadPoolExecutor(12) as executor:
        for result in [executor.submit(work, worker) for worker in range(12)]:
            result.result(WAIT_S)
    tier.close()
    poll(lambda: (psutil.Process().num_fds(), threading.active_count()) == before)


def test_failed_calls_leave_nothing_behind(server: RedisServer) -> None:
    before = psutil.Process().num_fds(), threading.active_count()
    failing: list[Callable[[], None]] = [server.kill, server.start]
    tier = connect(server.url, call_timeout_s=0.2)
    for fail in failing * 3:
        fail()
        for _ in range(3):
            tier.lookup(KEYS)
            tier.write(items(1))
    with server.stopped():
        for _ in range(3):
            tier.lookup(KEYS)
    tier.close()
    poll(lambda: (psutil.Process().num_fds(), threading.active_count()) == before)


def test_close_waits_for_a_call_that_waits_for_the_server(server: RedisServer) -> None:
    tier = connect(server.url, call_timeout_s=1.0)
    tier.write(items(1))
    with server.stopped(), ThreadPoolExecutor(1) as executor:
        asking = executor.submit(tier.lookup, KEYS[:1])
        poll(lambda: asking.running())
        tier.close()
        with contextlib.suppress(Exception):
            assert asking.result(WAIT_S) == [Status.MISS]
