"""Tenants that may have so much of a Redis and no more: counted there, by whoever writes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot

from kvtier.clock import MONOTONIC
from kvtier.identity.keys import TENANT_ID_BYTES, StoreKey, TenantId, tenant_id
from kvtier.metrics import Metrics
from kvtier.testing.blocks import make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import Item, Status, WriteStatus
from kvtier.tiers.redis import RedisTier, cap_script
from kvtier.tiers.redis.cap_script import NUM_BOOKS, UNIT_BYTES, book_name, book_of
from kvtier.tiers.redis.caps import TenantCaps
from kvtier.tiers.redis.commands import key_name
from redis_cluster_rig import cluster_url
from redis_rig import (
    MIB,
    WAIT_S,
    RedisServer,
    connect,
    emptied,
    errors,
    module_redis,
    running_cluster,
    running_redis,
    somebody_else,
)

RED, BLUE = tenant_id("red"), tenant_id("blue")
BLOCK_BYTES = 15 * 1024
"""With its head: four units."""
CAP_BYTES = 4 * MIB
MOST_BLOCKS = CAP_BYTES // (16 * 1024)
STORED, EXISTS, FULL, FAILED = WriteStatus.STORED, WriteStatus.EXISTS, WriteStatus.FULL, WriteStatus.FAILED

running = pytest.fixture(scope="module")(module_redis)


@pytest.fixture
def server(running: RedisServer) -> Iterator[RedisServer]:
    yield from emptied(running)


client = pytest.fixture(somebody_else)


def keys(labels: Sequence[object], tenant: TenantId = RED) -> list[StoreKey]:
    return [make_key(label, tenant=tenant) for label in labels]


def items(labels: Sequence[object], tenant: TenantId = RED, nbytes: int = BLOCK_BYTES) -> list[Item[bytes]]:
    return [summed(make_key(label, tenant=tenant), make_payload(label, nbytes)) for label in labels]


def capped(server: RedisServer, cap_bytes: int = CAP_BYTES, **settings: object) -> RedisTier:
    tier = connect(server.url, **settings)  # type: ignore[arg-type]
    tier.set_caps({RED: cap_bytes})
    return tier


def stored_bytes(client: redis.Redis, tenant: TenantId = RED) -> int:
    """What really lies there."""
    return sum(client.strlen(name) for name in client.scan_iter(f"kvt1:{tenant.hex()}:*", count=1000))


def check_books(client: redis.Redis, tenant: TenantId = RED) -> int:
    """The units that count; each book's sum must be what its blocks make."""
    total = 0
    for book in range(NUM_BOOKS):
        entries = dict(client.zrange(book_name(tenant, book), 0, -1, withscores=True))
        used = -int(entries.pop(b"used", 0))
        live = {member: int(score) for member, score in entries.items() if score >= 1}
        assert used == sum(score % (1 << 20) for score in live.values())
        assert all(len(member) == 48 for member in live)
        assert all(member[:1] == b"d" and len(member) == 49 for member in entries.keys() - live.keys())
        total += used
    return total


def there(tier: RedisTier, labels: Sequence[object], tenant: TenantId = RED) -> list[bool]:
    return [status is Status.HIT for status in tier.lookup(keys(labels, tenant))]


class Clock:
    """Turns the server's clock, as the books see it, with every change of a book."""

    def __init__(self, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
        self._client = client
        turned = "{1800000000 + redis.call('INCRBY', 'clock', 3), 0}"
        monkeypatch.setattr(cap_script, "_SCRIPT", cap_script._SCRIPT.replace("redis.call('TIME')", turned))

    def advance(self, seconds: int) -> None:
        self._client.incrby("clock", seconds)


@pytest.fixture
def clock(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(client, monkeypatch)


def write_all(tier: RedisTier, labels: range, step: int = 16) -> Counter[WriteStatus]:
    answers: Counter[WriteStatus] = Counter()
    for start in range(labels.start, labels.stop, step):
        answers.update(tier.write(items(range(start, min(start + step, labels.stop)))))
    return answers


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


def test_two_pools_that_write_at_once_stay_below_it_together(server: RedisServer, client: redis.Redis) -> None:
    tiers = [capped(server) for _ in range(3)]
    with ThreadPoolExecutor(6) as executor:
        jobs = [executor.submit(write_all, tier, range(n * 1000, n * 1000 + 400)) for n, tier in enumerate(tiers * 2)]
        for job in jobs:
            assert set(job.result()) <= {STORED, FULL}, "what is young may still be on its way, and is not evicted"
    assert stored_bytes(client) <= check_books(client) * UNIT_BYTES <= CAP_BYTES
    for tier in tiers:
        tier.close()


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


def test_what_a_pool_without_the_cap_writes_counts_when_it_is_offered_again(
    server: RedisServer, client: redis.Redis
) -> None:
    old, tier = connect(server.url), capped(server)
    old.write(items(range(8)))
    assert check_books(client) == 0
    assert tier.write(items(range(8))) == [EXISTS] * 8
    assert check_books(client) == 8 * 4
    assert read_blocks(old, keys(range(8)), BLOCK_BYTES) == [make_payload(label, BLOCK_BYTES) for label in range(8)]
    old.close()
    tier.close()


def test_what_a_pool_did_not_live_to_remove_the_next_one_does(
    server: RedisServer, client: redis.Redis, clock: Clock
) -> None:
    tier = capped(server)
    write_all(tier, range(MOST_BLOCKS))
    dying = TenantCaps(tier._servers, MIB, lambda small, others, deadline: None, lambda refusal: None)
    dying.set({RED: CAP_BYTES})
    dying.make_room(keys(range(1000, 1200)), [BLOCK_BYTES] * 200, MONOTONIC() + WAIT_S)
    assert sum(there(tier, range(MOST_BLOCKS))) > MOST_BLOCKS // 2, "condemned, and not removed"
    tier.write(items(range(2000, 2200)))
    assert sum(there(tier, range(MOST_BLOCKS))) > 0
    clock.advance(2 * cap_script.GRACE_S)
    for _ in range(4):
        tier.write(items(range(2000, 2200)))
    assert stored_bytes(client) <= CAP_BYTES
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


def test_a_block_that_no_book_can_hold_is_full_and_evicts_nobody(server: RedisServer, client: redis.Redis) -> None:
    tier = capped(server)
    write_all(tier, range(MOST_BLOCKS // 4))
    assert tier.write(items(["large"], nbytes=CAP_BYTES // NUM_BOOKS)) == [FULL]
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
    client.execute_command("ACL SETUSER default -set")
    try:
        assert set(tier.write(items(range(100, 116)))) == {FAILED}
        assert check_books(client) == 8 * 4
    finally:
        client.execute_command("ACL SETUSER default +set")
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


def test_members_are_what_a_key_is_behind_its_tenant() -> None:
    assert len(make_key("a", tenant=RED)[TENANT_ID_BYTES:]) == 48
