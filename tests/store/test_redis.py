"""Pools over a real Redis: what they share, and what becomes of them when it dies, forgets, fills up or hangs."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.testing.blocks import summed
from kvtier.testing.contract import make_key, read_blocks
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.pool.tier import PoolTier
from kvtier_pool import open_tiers
from pool_rig import BLOCK_BYTES, BLUE, WAIT_S, connect, keys, payloads, pool_process, running_pool, until
from redis_rig import RedisServer, running_redis

STORED, HIT, MISS = WriteStatus.STORED, Status.HIT, Status.MISS


@pytest.fixture(autouse=True)
def probed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_tiers, "_REDIS_OPEN_S", 0.1)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path) as server:
        yield server


@contextlib.contextmanager
def pool(server: RedisServer, *, tenant: str = "red", **redis: object) -> Iterator[PoolTier]:
    """An engine's view of a fresh pool over the server."""
    table = {f"redis_{name}": value for name, value in ({"url": server.url, "timeout_s": WAIT_S} | redis).items()}
    with running_pool(**table) as addresses:
        tier = connect(addresses.block[0], tenant)
        try:
            yield tier
        finally:
            tier.close()


def store(tier: PoolTier, labels: Sequence[object]) -> list[WriteStatus]:
    return tier.write([summed(*block) for block in zip(keys(labels), payloads(labels), strict=True)])


def load(tier: PoolTier, labels: Sequence[object]) -> list[bytes | None]:
    return read_blocks(tier, keys(labels), BLOCK_BYTES)


def shares(server: RedisServer, labels: Sequence[object]) -> bool:
    """Whether another pool finds these blocks."""
    with pool(server) as other:
        return load(other, labels) == payloads(labels)


@pytest.mark.parametrize("codec", ["raw", "lz4", "planes-zstd"])
def test_what_one_pool_was_given_another_one_reads(redis: RedisServer, codec: str) -> None:
    labels = range(20)
    with pool(redis, codec=codec) as one, pool(redis, codec=codec) as two, pool(redis, tenant="blue") as stranger:
        assert store(one, labels) == [STORED] * 20
        until(lambda: two.lookup(keys(labels)) == [HIT] * 20)
        assert load(two, [*labels, "absent"]) == [*payloads(labels), None]
        assert stranger.lookup([make_key(i, tenant=BLUE) for i in labels]) == [MISS] * 20
        assert one.discard(keys([3])) == 1
    with pool(redis) as three:
        assert three.lookup(keys([2, 3])) == [HIT, MISS]


def test_a_site_outlives_each_of_its_pools(redis: RedisServer) -> None:
    with pool_process(f"--redis-url={redis.url}") as service:
        tier = connect(service.block)
        store(tier, range(10))
        tier.close()
        code, log = service.terminate()
        assert code == 0, log
        assert "0 that it did not take" in log
        again = service.again()
        try:
            tier = connect(again.block)
            assert load(tier, range(10)) == payloads(range(10))
            tier.close()
        finally:
            again.kill()


def test_write_back_reaches_redis_at_the_stop(redis: RedisServer) -> None:
    with pool(redis, write_policy="write_back") as one:
        store(one, range(10))
        with redis.client() as client:
            assert client.dbsize() == 0
    assert shares(redis, range(10))


def test_a_pool_starts_without_its_redis_and_finds_it_later(redis: RedisServer) -> None:
    redis.kill()
    with pool(redis) as tier:
        assert store(tier, ["a"]) == [STORED]
        assert load(tier, ["a", "b"]) == [*payloads(["a"]), None]
        redis.start()
        heals(tier, redis, "after")


def test_a_wrong_password_costs_the_redis_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    right, wrong = (tmp_path / name for name in ("right", "wrong"))
    right.write_text("the-right-one")
    wrong.write_text("the-wrong-one")
    with running_redis(tmp_path, password="the-right-one") as server:
        with pool(server, password=f"file:{wrong}") as tier:
            assert store(tier, ["a"]) == [STORED]
            assert load(tier, ["a", "b"]) == [*payloads(["a"]), None]
            until(lambda: "refuses" in caplog.text)
        assert "the-wrong-one" not in caplog.text
        with pool(server, password=f"file:{right}") as tier:
            store(tier, ["a"])
        with pool(server, password=f"file:{right}") as tier:
            assert load(tier, ["a"]) == payloads(["a"])


def heals(tier: PoolTier, server: RedisServer, label: str) -> None:
    """New blocks reach the server again, by themselves."""
    count = 0

    def reaches_it() -> bool:
        nonlocal count
        count += 1
        assert store(tier, [(label, count)]) == [STORED]
        with server.client() as client:
            return bool(client.exists(redis_key((label, count))))

    until(reaches_it)
    assert shares(server, [(label, count)])


def redis_key(label: object) -> str:
    key = make_key(label)
    return f"kvt1:{key[:16].hex()}:{key[16:32].hex()}:{key[32:].hex()}"


def works_through(tier: PoolTier, num_rounds: int) -> None:
    """Reads and writes that must neither fail nor be wrong."""
    for number in range(num_rounds):
        labels = [("round", number, i) for i in range(4)]
        assert store(tier, labels) == [STORED] * 4
        assert load(tier, labels) == payloads(labels)
        old = load(tier, range(8))
        assert all(block in (None, payload) for block, payload in zip(old, payloads(range(8)), strict=True))
        assert load(tier, [("absent", number)]) == [None]


class TestFaults:
    """Blocks 0 to 7 are in Redis alone when the fault comes: this pool has not seen them."""

    @pytest.fixture
    def tier(self, redis: RedisServer) -> Iterator[PoolTier]:
        with pool(redis) as writer:
            store(writer, range(8))
        with pool(redis) as tier:
            yield tier

    @pytest.fixture
    def hasty(self, redis: RedisServer) -> Iterator[PoolTier]:
        """For a Redis that hangs: each call that waits for it costs this deadline, and any may miss it."""
        with pool(redis) as writer:
            store(writer, range(8))
        with pool(redis, timeout_s=0.5) as tier:
            yield tier

    def test_killed_and_started_empty(self, redis: RedisServer, tier: PoolTier) -> None:
        assert load(tier, [0]) == payloads([0])
        redis.kill()
        works_through(tier, 20)
        assert load(tier, [0, 1]) == [*payloads([0]), None], "memory keeps what it has"
        redis.start()
        heals(tier, redis, "after")
        assert load(tier, range(1, 8)) == [None] * 7, "a restarted Redis is an empty one"
        until(lambda: shares(redis, [("round", 0, 0), ("round", 19, 3)]))

    def test_emptied_under_way(self, redis: RedisServer, tier: PoolTier) -> None:
        assert tier.lookup(keys(range(8))) == [HIT] * 8
        with redis.client() as client:
            client.flushall()
        assert load(tier, range(8)) == [None] * 8
        works_through(tier, 5)
        heals(tier, redis, "after")

    def test_out_of_memory(self, redis: RedisServer, tier: PoolTier) -> None:
        with redis.client() as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", 1)
        works_through(tier, 5)
        assert load(tier, range(8)) == payloads(range(8)), "reads go on"
        with redis.client() as client:
            client.config_set("maxmemory", 0)
        heals(tier, redis, "after")

    def test_evicting(self, redis: RedisServer, tier: PoolTier) -> None:
        with redis.client() as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
            client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 20 * BLOCK_BYTES)
        works_through(tier, 20)
        heals(tier, redis, "after")

    def test_asleep(self, redis: RedisServer, hasty: PoolTier) -> None:
        """One call after the other runs into the deadline of half a second, until the breaker opens."""
        with asleep(redis, 3.0):
            works_through(hasty, 20)
        heals(hasty, redis, "after")
        until(lambda: load(hasty, range(8)) == payloads(range(8)))  # what it had it has

    def test_stopped_and_continued(self, redis: RedisServer, hasty: PoolTier) -> None:
        with redis.stopped():
            works_through(hasty, 10)
        heals(hasty, redis, "after")
        until(lambda: load(hasty, range(8)) == payloads(range(8)))

    def test_discarded_while_out_of_reach(self, redis: RedisServer, hasty: PoolTier) -> None:
        with redis.stopped():
            assert load(hasty, range(8)) == [None] * 8
            hasty.discard(keys([0, 1]))
            assert hasty.lookup(keys([0, 1])) == [MISS] * 2
        until(lambda: load(hasty, range(2, 8)) == payloads(range(2, 8)))
        assert load(hasty, [0, 1]) == [None] * 2
        assert store(hasty, [0]) == [STORED]
        until(lambda: shares(redis, [0]))

    def test_hanging_it_hides_nothing_that_the_pool_has(self, redis: RedisServer, hasty: PoolTier) -> None:
        store(hasty, ["here"])
        with redis.stopped():
            began = time.monotonic()
            assert hasty.lookup(keys(["here", "absent"])) == [HIT, MISS]
            assert time.monotonic() - began < WAIT_S / 2

    def test_a_garbled_and_a_swapped_value(self, redis: RedisServer, tier: PoolTier) -> None:
        with redis.client() as client:
            first, second = redis_key(0), redis_key(1)
            value = client.get(first)
            assert isinstance(value, bytes)
            client.setrange(first, 5000, b"\0\1\2\3")
            client.set(second, value)
        assert load(tier, range(8)) == [None, None, *payloads(range(2, 8))]


@contextlib.contextmanager
def asleep(server: RedisServer, seconds: float) -> Iterator[None]:
    """DEBUG SLEEP, whose answer nobody waits for."""
    connection = server.client().connection_pool.make_connection()
    connection.connect()
    connection.send_command("DEBUG", "SLEEP", seconds)
    yield
    connection.disconnect()
