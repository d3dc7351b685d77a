"""A Redis that dies, hangs or refuses: every call ends in time, with nothing wrong in it, and heals."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from free_port import free_port
from kvtier.metrics import Metrics
from kvtier.testing.contract import make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import Status, Usage, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from redis_rig import (
    BLOCK_BYTES,
    KEYS,
    MIB,
    PAYLOADS,
    WAIT_S,
    RedisServer,
    all_errors,
    assert_heals,
    connect,
    errors,
    fresh_redis,
    items,
    poll,
)
from suspending import resume, suspend
from threads_rig import no_more_threads
from transfers_rig import kill_during_transfers

server = pytest.fixture(fresh_redis)


def test_a_call_without_a_thread_fails_and_nothing_of_it_is_done_later(server: RedisServer) -> None:
    metrics = Metrics()
    tier = connect(server.url, metrics=metrics)
    assert tier.write(items(16)) == [WriteStatus.STORED] * 16
    into = [memoryview(bytearray(BLOCK_BYTES)) for _ in KEYS]
    with ThreadPoolExecutor(1) as other, server.stopped():
        held = other.submit(tier.lookup, KEYS)  # by the one thread that there is
        poll(lambda: tier._topology.servers(0.0)[0].threads._idle_semaphore._value == 0)
        with no_more_threads():
            assert tier.read(KEYS, into) == [Status.MISS] * 16
        assert errors(metrics, "read", "UnavailableError") == 1
        resume(server.process.pid)
        assert held.result(WAIT_S) == [Status.HIT] * 16
        assert tier.lookup(KEYS) == [Status.HIT] * 16, "and what was queued before it has had its turn"
        assert not any(any(buffer) for buffer in into)
    assert read_blocks(tier, KEYS, BLOCK_BYTES) == PAYLOADS
    tier.close()


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


def test_no_call_waits_for_a_server_that_hangs_and_it_is_used_again_by_itself(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvtier")
    metrics = Metrics()
    tier = connect(server.url, metrics=metrics, breaker=CircuitBreaker(2, 0.05), call_timeout_s=0.2)
    patient = connect(server.url)
    assert patient.write(items(1)) == [WriteStatus.STORED]
    patient.close()
    with server.stopped():
        for _ in range(2):
            assert tier.lookup(KEYS[:1]) == [Status.MISS]
        poll(lambda: errors(metrics, "probe", "UnavailableError") >= 3)
        for _ in range(5):
            assert tier.write(items(1)) == [WriteStatus.FAILED]
        assert errors(metrics, "lookup", "UnavailableError") == 2
        assert errors(metrics, "write", "BreakerOpen") == 5
        assert "a server is left alone" in str(tier.problem())
    poll(lambda: tier.lookup(KEYS[:1]) == [Status.HIT])
    assert tier.problem() is None
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
        assert errors(metrics, "write", "ReadOnly") == 1
        client.config_set("replica-serve-stale-data", "no")
        assert tier.lookup(KEYS[:1]) == [Status.MISS]
        assert errors(metrics, "lookup", "UnavailableError") == 1
        client.replicaof("NO", "ONE")
    assert tier.write(items(3)[2:]) == [WriteStatus.STORED]
    assert read_blocks(tier, KEYS[:3], BLOCK_BYTES) == [None, *PAYLOADS[1:3]], "discarded as soon as it could be"
    with server.client() as client:
        assert client.dbsize() == 2
    tier.close()


def _follow_nobody(client: redis.Redis) -> None:
    client.replicaof("127.0.0.1", str(free_port()))


def _want_replicas(client: redis.Redis) -> None:
    client.config_set("min-replicas-to-write", 1)


def _forbid_writes(client: redis.Redis) -> None:
    client.execute_command("ACL SETUSER default -set -getex")


@pytest.mark.parametrize(
    ("refuse", "allow", "code"),
    [
        (_follow_nobody, lambda client: client.replicaof("NO", "ONE"), "READONLY"),
        (_want_replicas, lambda client: client.config_set("min-replicas-to-write", 0), "NOREPLICAS"),
        (_forbid_writes, lambda client: client.execute_command("ACL SETUSER default +set +getex"), "NOPERM"),
    ],
    ids=["replica", "without replicas", "without rights"],
)
@pytest.mark.parametrize("max_value_bytes", [4 * MIB, 20_000])
def test_a_server_that_refuses_writes_is_read_and_told(
    server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    refuse: Callable[[redis.Redis], None],
    allow: Callable[[redis.Redis], object],
    code: str,
    max_value_bytes: int,
) -> None:
    """Blocks have a time to live, which a read would prolong."""
    caplog.set_level("INFO", "kvtier")
    metrics = Metrics()
    tier = connect(
        server.url,
        metrics=metrics,
        ttl_s=1000.0,
        breaker=CircuitBreaker(1, 1000.0),
        max_value_bytes=max_value_bytes,
    )
    assert tier.write(items(2)) == [WriteStatus.STORED] * 2
    with server.client() as client:
        refuse(client)
        for _ in range(3):
            assert tier.lookup(KEYS[:3]) == [Status.HIT] * 2 + [Status.MISS]
            assert read_blocks(tier, KEYS[:3], BLOCK_BYTES) == [*PAYLOADS[:2], None]
            assert tier.write(items(3)[2:]) == [WriteStatus.FAILED]
        assert all_errors(metrics) == ["write ReadOnly"]
        assert tier.problem() is None
        allow(client)
    assert tier.write(items(3)[2:]) == [WriteStatus.STORED]
    lines = [record.getMessage() for record in caplog.records if "takes" in record.getMessage()]
    assert f"takes no more blocks: {code} " in lines[0]
    assert lines[-1] == "tier redis: takes writes again"
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
