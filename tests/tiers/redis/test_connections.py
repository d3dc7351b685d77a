"""Connections of many threads, of failed calls and of late ones: nothing of them is left behind."""

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from kvtier.metrics import Metrics
from kvtier.testing.contract import read_blocks
from kvtier.tiers.base import Status, WriteStatus
from redis_rig import (
    BLOCK_BYTES,
    KEYS,
    PAYLOADS,
    WAIT_S,
    RedisServer,
    connect,
    errors,
    fresh_redis,
    items,
    poll,
)

server = pytest.fixture(fresh_redis)


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return psutil.Process().num_fds(), threading.active_count()


def no_more_than(before: tuple[int, int]) -> bool:
    """Whether no more is held. It may be less: what earlier tests have left can end meanwhile."""
    return all(now <= then for now, then in zip(held(), before, strict=True))


def test_a_connection_that_comes_too_late_is_closed(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a name takes long to resolve: the call ends in time, and nobody writes into its buffers later."""
    patient = connect(server.url)
    assert patient.write(items(1)) == [WriteStatus.STORED]
    before = held()
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
    poll(lambda: no_more_than(before))
    assert into == bytes(BLOCK_BYTES)
    assert patient.lookup(KEYS[:1]) == [Status.HIT], "nobody discards it late, either"
    patient.close()


def test_many_threads_at_once_and_nothing_left_behind(server: RedisServer) -> None:
    before = held()
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
    poll(lambda: no_more_than(before))


def test_failed_calls_leave_nothing_behind(server: RedisServer) -> None:
    before = held()
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
    poll(lambda: no_more_than(before))


def test_close_waits_for_a_call_that_waits_for_the_server(server: RedisServer) -> None:
    tier = connect(server.url, call_timeout_s=1.0)
    tier.write(items(1))
    with server.stopped(), ThreadPoolExecutor(1) as executor:
        asking = executor.submit(tier.lookup, KEYS[:1])
        poll(lambda: asking.running())
        tier.close()
        with contextlib.suppress(Exception):
            assert asking.result(WAIT_S) == [Status.MISS]
