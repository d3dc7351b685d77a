"""One tenant takes all connections, calls, streams and descriptors that it can get: the other one is served at once."""

import contextlib
import json
import os
import resource
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from kvtier.clock import MONOTONIC
from kvtier.errors import KvtierError, LimitExceededError, UnavailableError
from kvtier.metrics import Metrics
from kvtier.protocol import pool_pb2
from kvtier.protocol.block import Verb
from kvtier.protocol.groups import group
from kvtier.testing.contract import make_key
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.pool.connection import PoolConnection
from kvtier_pool.metrics import PoolMetrics
from kvtier_pool.places import TenantPlaces
from pool_rig import (
    BLUE,
    MIB,
    RED,
    TOKENS,
    WAIT_S,
    PoolProcess,
    connect,
    dial,
    failed_calls,
    items,
    keys,
    pool_process,
    resident_bytes,
    running_pool,
    until,
)

SERVICE = "/kvtier.pool.v1.Pool/"
NAMES = {RED: "red", BLUE: "blue"}


def metric(address: str, name: str) -> float:
    """The value of one sample of a pool's, 0 where there is none."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S) as answer:
        lines = answer.read().decode().splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)


def refusals(address: str, tenant: str, limit: str) -> float:
    """What all tenants together were refused by this limit, when it was this one alone: others are not shown it."""
    if not own_refusals(address, tenant):
        return 0.0
    assert not own_refusals(address, "blue" if tenant == "red" else "red")
    return metric(address, f'kvtier_pool_tenant_refusals_total{{limit="{limit}"}}')


def own_refusals(address: str, tenant: str) -> int:
    """How often all limits together have refused the tenant, as the pool tells it."""
    headers = {"Authorization": f"Bearer {TOKENS[tenant]}"}
    asked = urllib.request.Request(f"http://{address}/tenants", headers=headers)
    with urllib.request.urlopen(asked, timeout=WAIT_S) as answer:
        return int(json.load(answer)["tenants"][tenant]["num_refused"])


@contextlib.contextmanager
def all_connections(address: str, tenant: str, most: int) -> Iterator[list[PoolConnection]]:
    """As many as the pool gives one tenant."""
    opened: list[PoolConnection] = []
    try:
        with contextlib.suppress(UnavailableError):
            while len(opened) < most:
                opened.append(dial(address, tenant))
        yield opened
    finally:
        for connection in opened:
            connection.close()


def is_served(address: str, tenant: str = "blue") -> bool:
    """Whether a new engine of the tenant stores a block and finds it, each at its first call."""
    of = BLUE if tenant == "blue" else RED
    tier = connect(address, tenant)
    try:
        return tier.write(items(["new"], of))[0] is not WriteStatus.FAILED and tier.lookup(keys(["new"], of)) == [
            Status.HIT
        ]
    finally:
        tier.close()


def test_places_are_kept_for_each_tenant_and_the_rest_is_for_all() -> None:
    registry = CollectorRegistry()
    places = TenantPlaces("max_things", 10, NAMES, PoolMetrics(registry))
    for _ in range(8):  # two are kept for each, so six are for both
        places.take(RED)
    with pytest.raises(LimitExceededError, match=r"^max_things: 8 of 10 are this tenant's already, .* 2 are kept"):
        places.take(RED)
    for _ in range(2):
        places.take(BLUE)
    with pytest.raises(LimitExceededError):
        places.take(BLUE)
    places.give_back(RED)
    places.take(BLUE)
    for limited, count in (("red", 1.0), ("blue", 1.0)):
        labels = {"tenant": limited, "limit": "max_things"}
        assert registry.get_sample_value("kvtier_pool_tenant_refusals_total", labels) == count
    for tenant, count in ((RED, 7), (BLUE, 3)):
        for _ in range(count):
            places.give_back(tenant)
    for _ in range(8):
        places.take(BLUE)


def test_a_single_tenant_has_all_places_and_many_have_one_each() -> None:
    alone = TenantPlaces("max_things", 3, {RED: "red"}, PoolMetrics(CollectorRegistry()))
    for _ in range(3):
        alone.take(RED)
    with pytest.raises(LimitExceededError):
        alone.take(RED)
    few = TenantPlaces("max_things", 1, NAMES, PoolMetrics(CollectorRegistry()))
    assert few.num_places == 2
    few.take(RED)
    with pytest.raises(LimitExceededError):
        few.take(RED)
    few.take(BLUE)


def test_a_place_may_be_waited_for() -> None:
    places = TenantPlaces("max_things", 2, NAMES, PoolMetrics(CollectorRegistry()))
    places.take(RED)
    waits = threading.Thread(target=lambda: places.take(RED, wait_s=WAIT_S))
    waits.start()
    places.give_back(RED)
    waits.join(WAIT_S)
    assert not waits.is_alive()
    with pytest.raises(LimitExceededError), places.held(RED, wait_s=0.01):
        pass


@pytest.mark.parametrize("verb", ["Write", "Lookup"])
def test_what_one_tenant_sends_over_many_grpc_connections_is_not_gathered(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool reads as much ahead on each connection as its flow control lets in, whatever it does with it then."""
    message, ends = bytes(2 * MIB), threading.Event()
    metadata = (("authorization", f"Bearer {TOKENS['red']}"),)

    def messages() -> Iterator[bytes]:
        while not ends.is_set():
            yield message

    def upload(channel: grpc.Channel) -> None:
        call: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(f"{SERVICE}{verb}")
        while not ends.wait(0.01):
            with contextlib.suppress(grpc.RpcError):
                call(messages(), metadata=metadata, timeout=WAIT_S)

    monkeypatch.setenv("KVTIER__POOL_SERVICE__NUM_THREADS", "5")
    with pool_process() as pool, contextlib.ExitStack() as stack:
        idle_bytes = resident_bytes(pool)
        channels = [
            stack.enter_context(grpc.insecure_channel(pool.grpc, options=[("grpc.use_local_subchannel_pool", 1)]))
            for _ in range(40)
        ]
        threads = [threading.Thread(target=upload, args=(channel,), daemon=True) for channel in channels * 2]
        for thread in threads:
            thread.start()
        most_bytes, ends_s = 0, MONOTONIC() + 3.0
        while MONOTONIC() < ends_s:
            most_bytes = max(most_bytes, resident_bytes(pool))
            ends.wait(0.05)
        ends.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert most_bytes - idle_bytes < 192 * MIB, "messages of the calls that are served, and what is read ahead"
        assert is_served(pool.block)


def test_connections_of_one_tenant_keep_another_one_out_of_nothing() -> None:
    with pool_process() as pool, all_connections(pool.block, "red", 256) as held:
        assert len(held) == 192, "256, but for a half of the half that is kept"
        with pytest.raises(UnavailableError, match="max_connections: 192 of 256 are this tenant's already"):
            dial(pool.block)
        assert is_served(pool.block)
        with all_connections(pool.block, "blue", 64) as others:
            assert len(others) == 64
        assert refusals(pool.http, "red", "max_connections") == 2
        assert refusals(pool.http, "blue", "max_connections") == 0
        held.pop().close()
        until(lambda: is_let_in(pool))


def is_let_in(pool: PoolProcess) -> bool:
    with contextlib.suppress(UnavailableError):
        dial(pool.block).close()
        return True
    return False


def test_a_client_that_is_refused_misses_and_leaves_the_pool_alone_for_a_while() -> None:
    with running_pool(max_connections=4) as pool, all_connections(pool.block[0], "red", 4) as held:
        assert len(held) == 3
        metrics = Metrics()
        tier = connect(pool.block[0], metrics=metrics, breaker=CircuitBreaker(2, 1000.0))
        for _ in range(5):
            assert tier.lookup(keys([0])) == [Status.MISS]
            assert tier.write(items([0])) == [WriteStatus.FAILED]
        assert failed_calls(metrics, op="lookup", error="UnavailableError") == 1
        assert failed_calls(metrics, op="lookup", error="BreakerOpen") == 4
        tier.close()


@contextlib.contextmanager
def silent_calls(address: str, verb: str, count: int) -> Iterator[list[grpc.Call]]:
    """Calls of red that never send their message."""
    may_end = threading.Event()
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        metadata = (("authorization", f"Bearer {TOKENS['red']}"),)
        try:
            yield [channel.stream_stream(verb)(iter(may_end.wait, True), metadata=metadata) for _ in range(count)]
        finally:
            may_end.set()


REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.mark.parametrize("verb", [SERVICE + "Lookup", REFLECTION])
def test_calls_of_one_tenant_keep_no_thread_from_another_one(verb: str) -> None:
    with pool_process() as pool, silent_calls(pool.grpc, verb, 80) as calls:
        until(lambda: sum(not call.is_active() for call in calls) >= 80 - 48)
        assert refusals(pool.http, "red", "calls_in_flight") >= 80 - 48
        assert next(call for call in calls if not call.is_active()).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert is_served(f"grpc:{pool.grpc}")
        with grpc.insecure_channel(pool.grpc) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.skipif(sys.platform != "linux", reason="connections of gRPC are looked at in /proc")
def test_grpc_connections_of_one_tenant_keep_another_one_out_of_nothing() -> None:
    with running_pool(max_connections=8) as pool, contextlib.ExitStack() as stack:

        def code_of_a_call(tenant: str) -> grpc.StatusCode:
            """Over a connection of its own, which stays open."""
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = stack.enter_context(grpc.insecure_channel(pool.grpc[0], options=options))
            metadata = (("authorization", f"Bearer {TOKENS[tenant]}"),)
            try:
                channel.unary_unary(SERVICE + "Usage")(b"", metadata=metadata, timeout=WAIT_S)
            except grpc.RpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        assert [code_of_a_call("red") for _ in range(6)] == [grpc.StatusCode.OK] * 6
        assert code_of_a_call("red") is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusals(pool.http, "red", "max_connections") == 1
        until(lambda: code_of_a_call("blue") is grpc.StatusCode.OK)
        stack.close()
        until(lambda: code_of_a_call("red") is grpc.StatusCode.OK)


def test_event_streams_of_one_tenant_leave_another_one_its_own() -> None:
    with pool_process() as pool, grpc.insecure_channel(pool.grpc) as channel:

        def listen(tenant: str) -> grpc.Call:
            metadata = (("authorization", f"Bearer {TOKENS[tenant]}"),)
            return channel.unary_stream(SERVICE + "Events")(b"", metadata=metadata)

        streams = [listen("red") for _ in range(8)]
        until(lambda: sum(not stream.is_active() for stream in streams) == 5)
        assert refusals(pool.http, "red", "max_event_streams") == 5
        blues = listen("blue")
        stored = threading.Event()

        def write_until_heard() -> None:
            tier = connect(f"grpc:{pool.grpc}", "blue")
            for label in range(1000):
                if stored.wait(0.02):
                    break
                tier.write(items([label], BLUE))
            tier.close()

        writer = threading.Thread(target=write_until_heard)
        writer.start()
        batch = pool_pb2.EventBatch.FromString(next(iter(blues)))  # type: ignore[call-overload]
        stored.set()
        writer.join()
        assert batch.events
        blues.cancel()


def test_slabs_of_one_tenant_leave_descriptors_for_connections(tmp_path: Path) -> None:
    with pool_process(f"--listen=unix:{tmp_path}/pool", memory="256MiB") as pool:
        tcp, unix = pool.block.split(",")
        resource.prlimit(pool.process.pid, resource.RLIMIT_NOFILE, (160, 160))
        num_before = num_descriptors(pool)
        for number in range(200):
            if not is_slab_left(unix, number):
                break
        assert num_before + 50 < num_descriptors(pool) <= 160 * 0.75 + 8, "slabs took some, and not all"
        newcomer = connect(tcp, "blue")
        assert newcomer.lookup(keys([0], BLUE)) == [Status.MISS]
        newcomer.close()
        with urllib.request.urlopen(f"http://{pool.http}/healthz", timeout=WAIT_S) as answer:
            assert answer.read().startswith(b"ok")


def num_descriptors(pool: PoolProcess) -> int:
    return len(os.listdir(f"/proc/{pool.process.pid}/fd"))


def is_slab_left(address: str, number: int) -> bool:
    """Writes one small block of a length of its own and goes; whether the pool had memory for it."""
    connection = dial(address)
    try:
        groups = group([make_key(number, tenant=RED)], [1 + 64 * number]).fields
        prepared = connection.ask(Verb.PREPARE, {"groups": groups}, (), MONOTONIC() + WAIT_S)
        write = prepared.number("write")
        if write:
            fields = {"write": write, "checksums": bytes(8)}
            connection.ask(Verb.COMMIT, fields, (), MONOTONIC() + WAIT_S)
        return bool(write)
    except KvtierError:
        return False
    finally:
        connection.close()
