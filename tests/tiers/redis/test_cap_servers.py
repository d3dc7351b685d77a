"""Servers under caps in a Redis: they forget, evict, hang, refuse and turn their clocks, and the books hold."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kvtier.metrics import Metrics
from kvtier.tiers.redis import cap_script
from kvtier.tiers.redis.cap_script import NUM_BOOKS, UNIT_BYTES, book_name
from redis_caps_rig import (
    BLUE,
    CAP_BYTES,
    EXISTS,
    FAILED,
    FULL,
    MOST_BLOCKS,
    RED,
    STORED,
    Clock,
    capped,
    check_books,
    forbidden,
    items,
    keys,
    stored_bytes,
    there,
    turned_clock,
    write_all,
)
from redis_cluster_rig import cluster_url
from redis_rig import (
    MIB,
    RedisServer,
    connect,
    emptied,
    errors,
    module_redis,
    running_cluster,
    running_redis,
    somebody_else,
)

running = pytest.fixture(scope="module")(module_redis)


@pytest.fixture
def server(running: RedisServer) -> Iterator[RedisServer]:
    yield from emptied(running)


client = pytest.fixture(somebody_else)
clock = pytest.fixture(turned_clock)


def test_what_the_server_forgets_by_itself_goes_from_the_books_first(
    server: RedisServer, client: redis.Redis, clock: Clock
) -> None:
    """Evicted, expired, or removed by an operator: these are room that is not used until it is the oldest."""
    tier = capped(server)
    write_all(tier, range(MOST_BLOCKS // 2))
    for name in client.scan_iter(f"kvt1:{RED.hex()}:*"):
        client.unlink(name)
    assert write_all(tier, range(1000, 1000 + MOST_BLOCKS)) == {STORED: MOST_BLOCKS}
    assert sum(there(tier, range(1000, 1000 + MOST_BLOCKS))) > 0.8 * MOST_BLOCKS, "some books are fuller than others"
    check_books(client)
    tier.close()


def test_a_flush_and_a_lost_book_count_from_nothing(server: RedisServer, client: redis.Redis) -> None:
    tier = capped(server)
    write_all(tier, range(MOST_BLOCKS))
    client.flushall()
    assert write_all(tier, range(MOST_BLOCKS // 2)) == {STORED: MOST_BLOCKS // 2}
    assert all(there(tier, range(MOST_BLOCKS // 2)))
    for book in range(NUM_BOOKS):
        client.delete(book_name(RED, book))
    assert set(tier.write(items(range(MOST_BLOCKS // 2)))) == {EXISTS}, "offered again, they are entered again"
    assert check_books(client) == MOST_BLOCKS // 2 * 4
    tier.close()


def test_a_server_that_lets_no_books_be_kept_gets_nothing_of_tenants_with_a_cap(
    server: RedisServer, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    client.execute_command(
        *"ACL SETUSER kv reset on >secret ~kvt1:* +get +getex +getrange +set +exists +unlink +ping".split()
    )
    metrics = Metrics()
    tier = connect(server.url, username="kv", password="secret", metrics=metrics)
    tier.set_caps({RED: CAP_BYTES})
    assert tier.write([*items(range(2)), *items(range(2), BLUE)]) == [FAILED] * 2 + [STORED] * 2
    assert errors(metrics, "write", "UnauthenticatedError") == 2
    assert "nothing is written for tenants with a cap" in caplog.text
    client.execute_command(*"ACL SETUSER kv +eval +evalsha +time +zadd +zrem +zscore +zrangebyscore".split())
    assert tier.write(items(range(2))) == [STORED] * 2
    client.execute_command("ACL DELUSER kv")
    tier.close()


def test_a_server_that_forgets_the_script_gets_it_again(server: RedisServer, client: redis.Redis) -> None:
    """As after a failover to a replica that has never run it."""
    tier = capped(server)
    for start in range(0, 48, 16):
        client.script_flush()
        assert tier.write(items(range(start, start + 16))) == [STORED] * 16
    assert check_books(client) == 48 * 4
    tier.close()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "allkeys-random"])
def test_a_server_that_evicts_by_itself_leaves_books_that_hold(
    server: RedisServer, client: redis.Redis, clock: Clock, policy: str
) -> None:
    """It has room for half of the cap. Whatever it evicts, books too, a tenant can write on, within its cap."""
    tier = capped(server, ttl_s=1000.0)
    server.limit(CAP_BYTES // 2, policy=policy)
    for start in range(0, 4 * MOST_BLOCKS, 16):
        assert set(tier.write(items(range(start, start + 16)))) <= {STORED, FULL}
    assert stored_bytes(client) <= CAP_BYTES
    assert check_books(client) * UNIT_BYTES <= CAP_BYTES
    assert any(there(tier, range(3 * MOST_BLOCKS, 4 * MOST_BLOCKS)))
    tier.close()


def test_a_server_that_is_restarted_counts_from_nothing(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        tier = capped(server)
        write_all(tier, range(MOST_BLOCKS))
        server.kill()
        assert set(tier.write(items(range(4)))) == {FAILED}
        server.start()
        assert write_all(tier, range(MOST_BLOCKS // 2)) == {STORED: MOST_BLOCKS // 2}
        tier.close()


def test_a_cluster_keeps_the_cap_over_all_its_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cap_script, "YOUNG_S", -1)
    with running_cluster(tmp_path) as nodes:
        tier = connect(cluster_url(nodes[0]))
        tier.set_caps({RED: CAP_BYTES})
        tier.write(items(range(50), BLUE))
        for start in range(0, 3 * MOST_BLOCKS, 16):
            assert tier.write(items(range(start, start + 16))) == [STORED] * 16
        total, num_books = 0, []
        for node in nodes:
            with node.client() as client:
                total += stored_bytes(client)
                num_books.append(len(list(client.scan_iter("kvt1:book:*", count=1000))))
        assert 0.8 * CAP_BYTES < total <= CAP_BYTES
        assert sum(num_books) == NUM_BOOKS
        assert min(num_books) > 0
        assert all(there(tier, range(50), BLUE))
        tier.close()


def test_a_clock_that_is_set_back_refuses_nobody(server: RedisServer, client: redis.Redis, clock: Clock) -> None:
    """As after a failover to a replica whose clock is right: what was entered before has a time to come."""
    tier = capped(server)
    write_all(tier, range(2 * MOST_BLOCKS))
    clock.advance(-1_000_000)
    assert write_all(tier, range(1000, 1000 + 2 * MOST_BLOCKS)) == {STORED: 2 * MOST_BLOCKS}
    assert not any(there(tier, range(2 * MOST_BLOCKS))), "of which nobody knows how old they are"
    assert stored_bytes(client) <= check_books(client) * UNIT_BYTES <= CAP_BYTES
    tier.close()


@pytest.mark.parametrize("max_value_bytes", [MIB, 4000])
def test_what_a_server_does_not_remove_now_it_does_later(
    server: RedisServer, client: redis.Redis, clock: Clock, max_value_bytes: int
) -> None:
    """As a node of a Cluster that hangs, beside those that have the books."""
    metrics = Metrics()
    tier = connect(server.url, metrics=metrics, max_value_bytes=max_value_bytes)
    tier.set_caps({RED: CAP_BYTES})
    write_all(tier, range(MOST_BLOCKS // 2))
    with forbidden(client, "unlink"):
        for start in range(1000, 1000 + MOST_BLOCKS, 16):
            tier.write(items(range(start, start + 16)))
            clock.advance(cap_script.GRACE_S)
        assert stored_bytes(client) > 1.2 * CAP_BYTES
        num_evicted = metrics.registry.get_sample_value("kvtier_tier_evicted_blocks_total", {"tier": "redis"})
        assert num_evicted == 0, "nothing has gone yet"
    tier.write(items(range(2000, 2016)))
    assert stored_bytes(client) <= check_books(client) * UNIT_BYTES <= CAP_BYTES
    tier.close()


def test_a_right_that_is_taken_away_leaves_books_that_hold(server: RedisServer, client: redis.Redis) -> None:
    """No script ends between two changes that belong together."""
    tier = capped(server)
    write_all(tier, range(16))
    for right in ("zadd", "zrem"):
        with forbidden(client, right):
            assert tier.discard(keys(range(4))) == (4 if right == "zadd" else 0)
            assert tier.write(items(range(100, 104))) == [FAILED] * 4
            assert check_books(client) == 16 * 4
    tier.close()
