"""Requests and bytes a second of each tenant: who asks for more waits for a moment, hears misses, and hurts nobody."""

import threading
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from block_rig import GOLDEN, receive_frame, receive_rest, session, split_frames
from clock_rig import StillClock
from kvtier.codec.stored_form import encode_header
from kvtier.config.tenant import RateConfig
from kvtier.identity.keys import TenantId
from kvtier.metrics import Metrics
from kvtier.protocol.block import encode_head
from kvtier.testing.blocks import summed
from kvtier.testing.contract import make_key, make_payload
from kvtier.tiers.base import Item, Status, WriteStatus
from kvtier_pool.metrics import PoolMetrics
from kvtier_pool.rates import BYTES, MOST_WAIT_S, REQUESTS, Pace, TenantRates
from kvtier_pool.service import PoolService
from pool_rig import (
    BLUE,
    MIB,
    RED,
    connect,
    core_rig,
    failed_calls,
    items,
    keys,
    pool_config,
    running_pool,
)

LARGE_BYTES = 8 * MIB
"""A block that takes eight seconds at a MiB a second."""


class Paced:
    """A pace with a clock of the test's own, which goes on by what is waited for."""

    def __init__(self, **rate: object) -> None:
        self.clock = StillClock()
        self.registry = CollectorRegistry()
        self.waited: list[float] = []
        self.pace = Pace(PoolMetrics(self.registry), self.clock)
        self.pace.set_rate("red", RateConfig.model_validate(rate))

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)

    def count(self, what: str, limit: str) -> float:
        labels = {"tenant": "red", "limit": limit}
        return self.registry.get_sample_value(f"kvtier_pool_tenant_{what}_total", labels) or 0.0

    def asks(self, times: int) -> int:
        return sum(self.pace.let_in(self.wait) for _ in range(times))


def test_requests_of_a_quiet_second_at_once_then_a_few_late_ones_then_none() -> None:
    red = Paced(max_requests_per_s=100)
    assert red.asks(100) == 100
    assert not red.waited
    assert red.asks(10) == 10
    assert red.waited == pytest.approx([0.01 * n for n in range(1, 11)])
    assert red.asks(50) == 0
    assert red.waited[10:] == [MOST_WAIT_S] * 50
    assert (red.count("delays", REQUESTS), red.count("refusals", REQUESTS)) == (10, 50)
    red.clock.now_s += 1.0
    assert red.asks(200) == 100, "ten were owed, and ten may wait"


def test_what_is_served_is_paid_for_by_what_comes_after_it() -> None:
    red = Paced(max_bytes_per_s="1MiB")
    red.pace.take(nbytes=11 * MIB)
    assert red.asks(1) == 0
    red.pace.take(nbytes=-8 * MIB)
    assert red.asks(1) == 0
    red.clock.now_s += 2.0
    assert red.asks(1) == 1
    assert red.count("refusals", BYTES) == 2


def test_a_tenant_without_bounds_is_never_held_up() -> None:
    free = Paced()
    free.pace.take(num_requests=1 << 40, nbytes=1 << 60)
    assert free.asks(1000) == 1000
    assert not free.waited


def test_a_reload_that_changes_nothing_gives_nothing_back() -> None:
    registry = CollectorRegistry()
    rates = TenantRates(PoolMetrics(registry), StillClock())
    names = {RED: "red", BLUE: "blue"}
    config = pool_config(rates={"red": {"max_requests_per_s": 5}})
    rates.set_tenants(names, config.tenants)
    pace = rates.of(RED)
    assert sum(pace.let_in(lambda _: None) for _ in range(9)) == 5
    rates.set_tenants(names, config.tenants)
    assert not pace.let_in(lambda _: None)
    rates.set_tenants(names, pool_config().tenants)
    assert pace.let_in(lambda _: None)
    assert rates.of(BLUE).let_in(lambda _: None)


def test_no_tenant_asks_faster_than_it_may_over_many_connections_and_the_other_asks_as_it_likes() -> None:
    per_s = 5
    with running_pool(rates={"red": {"max_requests_per_s": per_s}}) as pool:
        began_s = time.monotonic()
        metrics = Metrics()
        tiers = [connect(pool.block[0], metrics=metrics) for _ in range(6)]
        blue = connect(pool.block[0], "blue")
        assert blue.write(items([0], BLUE)) == [WriteStatus.STORED]
        tiers[0].write(items([0]))
        hits: list[Status] = []

        def flood(place: int) -> None:
            for _ in range(10):
                hits.extend(tiers[place].lookup(keys([0])))

        threads = [threading.Thread(target=flood, args=(place,)) for place in range(6)]
        for thread in threads:
            thread.start()
        assert blue.lookup(keys([0], BLUE)) == [Status.HIT]
        for _ in range(50):
            assert blue.lookup(keys([0], BLUE)) == [Status.HIT]
        for thread in threads:
            thread.join()
        # As many as the time gives, however slow this machine is, those of a quiet second, and who waits.
        assert hits.count(Status.HIT) <= per_s * (time.monotonic() - began_s + 1.0 + MOST_WAIT_S) + 1
        assert hits.count(Status.MISS) > 0
        assert failed_calls(metrics, op="lookup", error="UnavailableError") == 0
        assert failed_calls(metrics, op="lookup", error="BreakerOpen") == 0
        for tier in (*tiers, blue):
            tier.close()


def large(tenant: TenantId) -> Item[bytes]:
    return summed(make_key("large", tenant=tenant), make_payload("large", LARGE_BYTES))


@pytest.mark.parametrize("way", ["tcp", "shared memory", "grpc"])
def test_bytes_are_bounded_on_every_way_and_what_is_refused_is_no_failure(way: str, tmp_path: Path) -> None:
    unix = f"unix:{tmp_path}/pool.sock"
    bounds = {"red": {"max_bytes_per_s": "1MiB"}}
    with running_pool(128 * MIB, listen=["127.0.0.1:0", unix], rates=bounds) as pool:
        address = {"tcp": pool.block[0], "shared memory": unix, "grpc": f"grpc:{pool.grpc[0]}"}[way]
        metrics = Metrics()
        red = connect(address, metrics=metrics, shared_memory=way == "shared memory")
        blue = connect(address, "blue", shared_memory=way == "shared memory")
        assert red.write([large(RED)]) == [WriteStatus.STORED]
        assert red.lookup(keys(["large"])) == [Status.MISS]
        assert red.read(keys(["large"]), [memoryview(bytearray(LARGE_BYTES))]) == [Status.MISS]
        assert red.write(items(["more"])) == [WriteStatus.THROTTLED]
        for op in ("lookup", "read", "write"):
            for error in ("UnavailableError", "LimitExceededError"):
                assert failed_calls(metrics, op=op, error=error) == 0
        assert blue.write([large(BLUE)]) == [WriteStatus.STORED]
        assert blue.lookup(keys(["large"], BLUE)) == [Status.HIT]
        red.close()
        blue.close()


def test_a_client_that_sends_on_is_told_so_and_then_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_pool.rates.MOST_REFUSED_BYTES", 2 * MIB)
    clock = StillClock()
    payload = make_payload("block", MIB)

    def bounded(metrics: PoolMetrics) -> TenantRates:
        rates = TenantRates(metrics, clock)
        rates.of(RED).set_rate("red", RateConfig.model_validate({"max_bytes_per_s": "1MiB"}))
        return rates

    def write(label: int) -> bytes:
        header = encode_header(make_key(label, tenant=RED), payload)
        return encode_head({"id": 2 + label, "verb": "write", "headers": header}, len(payload)) + payload

    with core_rig() as rig, session(rig, rates=bounded) as client:
        client.sendall(GOLDEN["hello"][0])
        receive_frame(client)
        statuses = []
        for label in range(4):
            client.sendall(write(label))
            statuses.append(WriteStatus(receive_frame(client)[0].data("statuses")[0]))
        # One of a quiet second, and one while nothing is owed.
        assert statuses == [WriteStatus.STORED] * 2 + [WriteStatus.THROTTLED] * 2
        client.sendall(write(6))
        (last,) = split_frames(receive_rest(client))
        assert last.text("result") == "unavailable"
        assert "max_bytes_per_s" in last.text("message")


def test_a_reload_changes_the_bounds_of_connections_that_are_there() -> None:
    service = PoolService(pool_config(rates={"red": {"max_bytes_per_s": "1MiB"}}))
    addresses = service.start()
    try:
        red = connect(addresses.block[0])
        assert red.write([large(RED)]) == [WriteStatus.STORED]
        assert red.lookup(keys(["large"])) == [Status.MISS]
        service.take(pool_config())
        assert red.lookup(keys(["large"])) == [Status.HIT]
        red.close()
    finally:
        service.stop()
