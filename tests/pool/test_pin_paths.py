"""Pins over every way to a pool."""

import contextlib
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import InvalidInputError
from kvtier.identity.keys import NamespaceId
from kvtier.memory import memfd
from kvtier.metrics import Metrics
from kvtier.protocol.retention import PinStatus
from kvtier.testing.contract import make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.pool.socket_transport import SocketTransport
from kvtier.tiers.pool.tier import PoolTier
from pool_rig import (
    BLOCK_BYTES,
    BLUE,
    MIB,
    RED,
    TOKENS,
    WAIT_S,
    PoolProcess,
    connect,
    items,
    keys,
    pool_process,
    running_pool,
    until,
)

PINNED, MISS, FULL = PinStatus.PINNED, PinStatus.MISS, PinStatus.FULL
PATHS = ["shm", "unix", "tcp", "grpc"]
NUM_PINNED = 16
NOISE = 64 * MIB // BLOCK_BYTES


@contextlib.contextmanager
def pool_at(path: str, tmp_path: Path, *arguments: str) -> Iterator[PoolProcess]:
    if path == "shm" and not memfd.available():
        pytest.skip("shared memory needs Linux")
    listen = f"unix:{tmp_path}/pool.sock" if path in ("shm", "unix") else ""
    with pool_process(*arguments, listen=listen, memory="16MiB") as pool:
        yield pool


@contextlib.contextmanager
def client(pool: PoolProcess, path: str, tenant: str = "red", metrics: Metrics | None = None) -> Iterator[PoolTier]:
    address = f"grpc:{pool.grpc}" if path == "grpc" else pool.block
    tier = connect(address, tenant, shared_memory=path == "shm", metrics=metrics)
    try:
        yield tier
    finally:
        tier.close()


def write_noise(tier: PoolTier, name: str) -> None:
    """Four times the pool's memory."""
    for start in range(0, NOISE, 64):
        statuses = tier.write(items([(name, i) for i in range(start, start + 64)]))
        assert statuses == [WriteStatus.STORED] * 64


def num_pinned(pool: PoolProcess) -> float:
    with urllib.request.urlopen(f"http://{pool.http}/metrics", timeout=WAIT_S) as answer:
        found = re.search(r"^kvtier_pool_pinned_blocks (\S+)", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found.group(1))


@pytest.fixture
def _no_residency(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that nobody pins may be evicted at once."""
    monkeypatch.setenv("KVTIER__POOL_SERVICE__MIN_RESIDENCY_S", "0")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.usefixtures("_no_residency")
def test_pins_over_every_way_to_a_pool(path: str, tmp_path: Path) -> None:
    metrics = Metrics()
    wanted, unwanted = keys(range(NUM_PINNED)), keys([("unwanted", i) for i in range(NUM_PINNED)])
    with pool_at(path, tmp_path) as pool:
        with client(pool, path) as writer:  # whose memory stays as long as its blocks are pinned
            writer.write(items(range(NUM_PINNED)))
        with client(pool, path, metrics=metrics) as tier, client(pool, path, "blue") as blue:
            tier.write(items([("unwanted", i) for i in range(NUM_PINNED)]))
            assert tier.pin([*wanted, make_key("absent")], 600.0) == NUM_PINNED
            assert blue.pin(keys(range(NUM_PINNED), BLUE), 600.0) == 0
            assert blue.unpin(keys(range(NUM_PINNED), BLUE)) == 0
            assert num_pinned(pool) == NUM_PINNED
            write_noise(tier, "while pinned")
            assert read_blocks(tier, wanted, BLOCK_BYTES) == [payload for _, payload, _ in items(range(NUM_PINNED))]
            assert tier.lookup(unwanted) == [Status.MISS] * NUM_PINNED
            assert tier.unpin(wanted) == NUM_PINNED
            assert num_pinned(pool) == 0
            write_noise(tier, "afterwards")
            assert tier.lookup(wanted) == [Status.MISS] * NUM_PINNED
            for status, count in (("pinned", NUM_PINNED), ("miss", 1)):
                labels = {"tier": "pool", "status": status}
                assert metrics.registry.get_sample_value("kvtier_pins_total", labels) == count


@pytest.mark.parametrize("path", PATHS)
def test_a_pin_is_over_by_its_time_by_a_discard_and_with_the_pool(path: str, tmp_path: Path) -> None:
    with pool_at(path, tmp_path) as pool, client(pool, path) as tier:
        tier.write(items(range(4)))
        assert tier.pin(keys(range(2)), 0.05) == 2
        assert tier.pin(keys([2, 3]), 600.0) == 2
        until(lambda: num_pinned(pool) == 2)
        tier.discard(keys([2]))
        assert num_pinned(pool) == 1
        pool.kill()
        assert tier.pin(keys([3]), 600.0) == tier.unpin(keys([3])) == 0
        restarted = pool.again()
        try:
            until(lambda: tier.write(items([3])) == [WriteStatus.STORED])
            assert num_pinned(restarted) == 0
            assert tier.pin(keys([3]), 600.0) == 1
        finally:
            restarted.kill()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("setting", ["MAX_PIN_S", "PIN_SHARE"])
def test_a_pool_that_pins_nothing_loses_nothing_by_being_asked(
    path: str, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(f"KVTIER__POOL_SERVICE__{setting}", "0")
    metrics = Metrics()
    with pool_at(path, tmp_path) as pool, client(pool, path, metrics=metrics) as tier:
        tier.write(items(range(4)))
        for _ in range(3):
            assert (tier.pin(keys(range(4)), 600.0), tier.unpin(keys(range(4)))) == (0, 0)
        assert tier.lookup(keys(range(4))) == [Status.HIT] * 4
    labels = {"tier": "pool", "status": "not_offered"}
    assert metrics.registry.get_sample_value("kvtier_pins_total", labels) == 12
    assert not [s for m in metrics.io_errors.collect() for s in m.samples if s.labels.get("op") in ("pin", "unpin")]
    assert len([r for r in caplog.records if "pins no blocks" in r.message]) == 1


def test_pins_of_several_namespaces_are_answered_in_order() -> None:
    with running_pool() as pool:
        for address in (pool.block[0], f"grpc:{pool.grpc[0]}"):
            tier = connect(address)
            one, other = NamespaceId(b"one-namespace-id"), NamespaceId(b"other-namespace!")
            mixed = [make_key(i, namespace=one if i % 3 else other) for i in range(9)]
            tier.write([summed(key, make_payload(i, BLOCK_BYTES)) for i, key in enumerate(mixed) if i % 2])
            expected = [PINNED if i % 2 else MISS for i in range(9)]
            assert tier._transport.pin(mixed, 60_000, WAIT_S) == expected
            assert tier._transport.unpin(mixed, WAIT_S) == 4
            tier.close()


def test_pins_go_the_way_that_works(tmp_path: Path) -> None:
    with running_pool() as pool:
        tier = connect(f"unix:{tmp_path}/nobody.sock,{pool.block[0]}")
        tier.write(items(range(2)))
        assert tier.pin(keys(range(2)), 60.0) == 2
        assert tier.unpin(keys(range(2))) == 2
        tier.close()


def test_large_batches_of_pins_are_split() -> None:
    with running_pool() as pool:
        transport = SocketTransport(pool.block[0], TOKENS["red"], RED)
        tier = PoolTier(transport, RED, metrics=Metrics(), breaker=CircuitBreaker(3, 1.0), max_batch_blocks=5)
        tier.write(items(range(12)))
        assert tier.pin(keys(range(12)), 60.0) == tier.unpin(keys(range(12))) == 12
        tier.close()


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan")])
def test_no_time_at_all_is_a_mistake(ttl_s: float) -> None:
    tier = connect("127.0.0.1:1")
    with pytest.raises(InvalidInputError, match="must be above 0"):
        tier.pin([], ttl_s)
    for verb in (lambda foreign: tier.pin(foreign, 1.0), tier.unpin):
        with pytest.raises(InvalidInputError, match="another tenant"):
            verb(keys("a", BLUE))
    assert tier.pin([], float("inf")) == 0
    tier.close()
