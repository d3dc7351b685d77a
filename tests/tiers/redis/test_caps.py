"""Tenants that may have so much of a Redis and no more: what goes, what stays, and what is refused."""

from collections.abc import Iterator

import pytest
import redis
from redis.crc import key_slot

from kvtier.identity.keys import TENANT_ID_BYTES, tenant_id
from kvtier.metrics import Metrics
from kvtier.testing.blocks import make_key, make_payload, read_blocks
from kvtier.tiers.redis import cap_script
from kvtier.tiers.redis.cap_script import NUM_BOOKS, UNIT_BYTES, book_name, book_of
from kvtier.tiers.redis.commands import key_name
from redis_caps_rig import (
    BLOCK_BYTES,
    BLUE,
    CAP_BYTES,
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
from redis_rig import (
    RedisServer,
    connect,
    emptied,
    module_redis,
    somebody_else,
)

running = pytest.fixture(scope="module")(module_redis)


@pytest.fixture
def server(running: RedisServer) -> Iterator[RedisServer]:
    yield from emptied(running)


client = pytest.fixture(somebody_else)
clock = pytest.fixture(turned_clock)


def test_names_of_books_lie_where_they_say() -> None:
    """Golden: pools of all releases that count have to use the same books."""
    slots = [key_slot(book_name(RED, book)) for book in range(NUM_BOOKS)]
    assert slots == list(range(0, 16384, 16384 // NUM_BOOKS))
    assert book_name(RED, 1) == b"kvt1:book:{48576}:" + RED.hex().encode()
    assert book_of(key_name(make_key("a", tenant=RED))) == key_slot(key_name(make_key("a", tenant=RED))) // 2048


def test_a_tenant_never_has_more_than_its_cap_and_keeps_what_is_youngest(
    server: RedisServer, client: redis.Redis, clock: Clock
) -> None:
    metrics = Metrics()
    tier = connect(server.url, metrics=metrics)
    tier.set_caps({RED: CAP_BYTES})
    tier.write(items(range(100), BLUE))
    for start in range(0, 4 * MOST_BLOCKS, 16):
        assert tier.write(items(range(start, start + 16))) == [STORED] * 16
        assert stored_bytes(client) <= check_books(client) * UNIT_BYTES <= CAP_BYTES
    last = 4 * MOST_BLOCKS
    assert all(there(tier, range(last - MOST_BLOCKS // 2, last)))
    assert stored_bytes(client) > 0.9 * CAP_BYTES * BLOCK_BYTES / (16 * 1024)
    assert all(there(tier, range(100), BLUE)), "others lose nothing"
    assert check_books(client, BLUE) == 0, "and nobody counts them"
    num_evicted = metrics.registry.get_sample_value("kvtier_tier_evicted_blocks_total", {"tier": "redis"})
    assert num_evicted == last - sum(there(tier, range(last)))
    tier.close()


def test_without_caps_nothing_is_kept_but_blocks(server: RedisServer, client: redis.Redis) -> None:
    tier = connect(server.url)
    tier.write(items(range(4)))
    assert client.dbsize() == 4
    tier.close()


def test_what_is_read_stays_longer(server: RedisServer, client: redis.Redis, clock: Clock) -> None:
    tier, hot = capped(server), range(10)
    write_all(tier, range(MOST_BLOCKS // 2))
    for start in range(MOST_BLOCKS, 4 * MOST_BLOCKS, 16):
        clock.advance(1)
        assert read_blocks(tier, keys(hot), BLOCK_BYTES) == [make_payload(label, BLOCK_BYTES) for label in hot]
        tier.write(items(range(start, start + 16)))
    assert not any(there(tier, range(10, MOST_BLOCKS // 4)))
    check_books(client)
    tier.close()


def test_a_lower_cap_is_reached_as_its_tenant_writes_and_nothing_is_added_before(
    server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(cap_script, "_SCRIPT", cap_script._SCRIPT.replace("'LIMIT', 0, 1024", "'LIMIT', 0, 2"))
    tier = capped(server)
    write_all(tier, range(MOST_BLOCKS))
    tier.set_caps({RED: CAP_BYTES // 4})
    assert tier.write(items(range(1000, 1016))) == [FULL] * 16
    for _ in range(20):
        write_all(tier, range(1000, 1100))
    assert stored_bytes(client) <= check_books(client) * UNIT_BYTES <= CAP_BYTES // 4
    tier.set_caps({})
    assert write_all(tier, range(2000, 2000 + MOST_BLOCKS)) == {STORED: MOST_BLOCKS}
    tier.close()


def test_a_block_that_no_book_can_hold_is_full_and_evicts_nobody(
    server: RedisServer, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    tier = capped(server)
    write_all(tier, range(MOST_BLOCKS // 4))
    assert tier.write(items(["large"], nbytes=CAP_BYTES // NUM_BOOKS)) == [FULL]
    assert "a block of 524,288 bytes is not written: with its head it is more than 524,288, an eighth" in caplog.text
    assert tier.write(items(range(1000, 1000 + 2 * MOST_BLOCKS))).count(FULL) > 0, "more than all books hold"
    assert stored_bytes(client) <= check_books(client) * UNIT_BYTES <= CAP_BYTES
    tier.close()


def test_blocks_in_parts_go_as_a_whole(server: RedisServer, client: redis.Redis, clock: Clock) -> None:
    tier = capped(server, max_value_bytes=4000)
    write_all(tier, range(3 * MOST_BLOCKS))
    num_blocks = sum(there(tier, range(3 * MOST_BLOCKS)))
    num_values = len(list(client.scan_iter(f"kvt1:{RED.hex()}:*", count=1000)))
    assert num_values == num_blocks * -(-BLOCK_BYTES // 4000)
    assert stored_bytes(client) <= CAP_BYTES
    tier.close()


def test_what_could_not_be_written_counts_for_nothing(server: RedisServer, client: redis.Redis) -> None:
    tier = capped(server)
    write_all(tier, range(8))
    with forbidden(client, "set"):
        assert set(tier.write(items(range(100, 116)))) == {FAILED}
        assert check_books(client) == 8 * 4
    server.limit(256 * 1024, policy="noeviction")
    answers = write_all(tier, range(200, 400))
    assert answers[FULL] > 0
    server.limit(0)
    assert check_books(client) * UNIT_BYTES <= stored_bytes(client) * 16 / 15 + 16 * UNIT_BYTES
    tier.close()


def test_discards_make_room(server: RedisServer, client: redis.Redis) -> None:
    tier = capped(server)
    write_all(tier, range(MOST_BLOCKS // 2))
    assert tier.discard(keys(range(MOST_BLOCKS // 2))) == MOST_BLOCKS // 2
    assert check_books(client) == 0
    write_all(tier, range(1000, 1000 + MOST_BLOCKS // 2))
    assert all(there(tier, range(1000, 1000 + MOST_BLOCKS // 2)))
    assert tier.write(items(range(4))) == [STORED] * 4
    tier.close()


def test_members_are_what_a_key_is_behind_its_tenant() -> None:
    assert len(make_key("a", tenant=RED)[TENANT_ID_BYTES:]) == 48


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
def test_caps_that_fit_into_the_server_are_guarantees(
    server: RedisServer, client: redis.Redis, clock: Clock, policy: str
) -> None:
    """Where each tenant has a cap, and all of them together are three quarters of `maxmemory`, no block goes for
    another tenant's: the server never evicts."""
    busy = tenant_id("green")
    caps = {RED: CAP_BYTES, BLUE: CAP_BYTES, busy: CAP_BYTES // 2}
    server.limit(sum(caps.values()) * 4 // 3, policy=policy)
    pools = [connect(server.url), connect(server.url)]
    for pool in pools:
        pool.set_caps(caps)
    idle = range(MOST_BLOCKS * 3 // 4)
    write_all(pools[0], idle)
    evicted_before = client.info("stats")["evicted_keys"]
    for start in range(0, 6 * MOST_BLOCKS, 16):
        for pool, tenant in zip(pools, (BLUE, busy), strict=True):
            assert pool.write(items(range(start, start + 16), tenant)) == [STORED] * 16
    assert client.info("stats")["evicted_keys"] == evicted_before
    assert sum(there(pools[0], idle)) == len(idle)
    for tenant, cap_bytes in ((BLUE, CAP_BYTES), (busy, CAP_BYTES // 2)):
        assert 0.8 * cap_bytes < stored_bytes(client, tenant) <= cap_bytes
    for pool in pools:
        pool.close()
