"""The redis tier against a real server: the contract, what lies there and for how long, and who may."""

import logging

import pytest
import redis

from kvtier.codec.stored_form import Codec
from kvtier.errors import ConfigError
from kvtier.identity.keys import NUMPY_PAYS_FROM, ChainHash, NamespaceId, TenantId, store_key
from kvtier.metrics import Metrics
from kvtier.testing.contract import (
    MakeTier,
    TierContract,
    make_key,
    make_payload,
    read_blocks,
    summed,
    tier_state_machine,
)
from kvtier.tiers.base import Status, Tier, Usage, WriteStatus
from kvtier.tiers.redis.cap_script import NUM_BOOKS
from kvtier.tiers.redis.commands import key_name, key_names
from kvtier.tiers.redis.look import ServerLook, look_at
from kvtier.tiers.redis.settings import RedisSettings
from redis_rig import (
    BLOCK_BYTES,
    KEYS,
    MIB,
    PAYLOADS,
    RedisServer,
    all_errors,
    connect,
    emptied,
    errors,
    items,
    module_redis,
    somebody_else,
)

running = pytest.fixture(scope="module")(module_redis)
server = pytest.fixture(emptied)
client = pytest.fixture(somebody_else)


class OverRedis(TierContract):
    persistent = True
    codec = Codec.RAW
    max_value_bytes = 4 * MIB
    room = 3
    """Times the capacity: values take more than their payload, and so do buffers."""
    cap_bytes: int | None = None
    """The cap of each tenant."""

    @pytest.fixture
    def make_tier(self, server: RedisServer) -> MakeTier:
        def make(capacity_bytes: int) -> Tier:
            server.limit(self.room * capacity_bytes)
            tier = connect(
                server.url,
                ttl_s=1000.0,
                codec=self.codec,
                max_value_bytes=self.max_value_bytes,
                max_batch_bytes=256 * 1024,  # what a server holds for readers counts against its limit
            )
            tier.set_caps(dict.fromkeys(self.tenants, self.cap_bytes) if self.cap_bytes is not None else {})
            return tier

        return make


class TestRaw(OverRedis):
    pass


class TestCapped(OverRedis):
    """Books are keys as well, and take memory of the server: they are evicted as blocks are."""

    cap_bytes = 1 << 40

    def test_usage_counts_blocks_and_stays_in_bounds(self, tier: Tier) -> None:
        self.store(tier, range(8))
        assert 8 < tier.usage().num_blocks <= 8 + NUM_BOOKS


class TestPacked(OverRedis):
    codec = Codec.LZ4
    packs = True
    room = 2


class TestInParts(OverRedis):
    max_value_bytes = 5000

    def test_usage_counts_blocks_and_stays_in_bounds(self, tier: Tier) -> None:
        """Keys are counted, so every part of a block is: four here."""
        self.store(tier, range(8))
        usage = tier.usage()
        assert usage.num_blocks == 8 * 4
        assert 8 * self.payload_bytes <= usage.used_bytes <= usage.capacity_bytes
        tier.discard([self.key(i) for i in range(8)])
        assert tier.usage() == Usage(0, 0, usage.capacity_bytes)


@pytest.mark.parametrize("codec", Codec)
def test_states(server: RedisServer, codec: Codec) -> None:
    def make(capacity_bytes: int) -> Tier:
        server.limit(3 * capacity_bytes)
        return connect(server.url, ttl_s=1000.0, codec=codec, max_batch_bytes=64 * 1024)

    packable = codec is not Codec.RAW
    tier_state_machine(make, packable=packable, persistent=True, max_examples=25).TestCase().runTest()


def test_names_are_pinned() -> None:
    key = store_key(TenantId(bytes(range(16))), NamespaceId(bytes(range(16, 32))), ChainHash(bytes(range(224, 256))))
    assert key_name(key) == (
        b"kvt1:000102030405060708090a0b0c0d0e0f:101112131415161718191a1b1c1d1e1f:"
        b"e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"
    )
    many = [make_key(label) for label in range(NUMPY_PAYS_FROM)]
    assert key_names(many) == [key_name(each) for each in many]


@pytest.mark.parametrize("num_there", [0, 1, 64, 100, 200])
def test_many_names_are_asked_for_together(server: RedisServer, client: redis.Redis, num_there: int) -> None:
    """One command for 64 names, and one for each name of the few runs of which only some are there."""
    tier = connect(server.url)
    keys = [make_key(("together", label)) for label in range(200)]
    tier.write([summed(key, b"block") for key in keys[:num_there]])
    client.config_resetstat()
    assert tier.lookup(keys) == [Status.HIT] * num_there + [Status.MISS] * (200 - num_there)
    num_mixed = 64 if num_there % 64 and num_there < 192 else 0
    assert client.info("commandstats")["cmdstat_exists"]["calls"] == 4 + num_mixed
    assert tier.discard(keys) == num_there
    assert tier.lookup(keys) == [Status.MISS] * 200
    tier.close()


def test_a_value_is_the_stored_form(server: RedisServer, client: redis.Redis) -> None:
    tier = connect(server.url)
    assert tier.write(items(1)) == [WriteStatus.STORED]
    value = client.get(key_name(KEYS[0]))
    assert value[:8] == b"KVTB\x01\x00\x00\x00"
    assert value[8:72] == KEYS[0]
    assert value[96:] == PAYLOADS[0]
    tier.close()


def test_packed_blocks_are_smaller_and_read_by_a_tier_that_writes_raw_ones(
    server: RedisServer, client: redis.Redis
) -> None:
    payload = make_payload("a", BLOCK_BYTES // 8) * 8
    packing, plain = connect(server.url, codec=Codec.LZ4), connect(server.url)
    assert packing.write([summed(KEYS[0], payload), summed(KEYS[1], PAYLOADS[1])]) == [WriteStatus.STORED] * 2
    assert client.strlen(key_name(KEYS[0])) < BLOCK_BYTES // 2
    assert client.strlen(key_name(KEYS[1])) == BLOCK_BYTES + 96, "what does not pay is stored raw"
    assert read_blocks(plain, KEYS[:2], BLOCK_BYTES) == [payload, PAYLOADS[1]]
    for tier in (packing, plain):
        tier.close()


@pytest.mark.parametrize("nbytes", [0, 1, MIB, 4 * MIB, 4 * MIB + 1, 9 * MIB + 5])
@pytest.mark.parametrize("codec", Codec)
def test_blocks_of_any_size(server: RedisServer, nbytes: int, codec: Codec) -> None:
    tier = connect(server.url, codec=codec, ttl_s=1000.0)
    payloads = [make_payload(nbytes, nbytes // 2) * 2 + b"x" * (nbytes % 2), make_payload("b", nbytes)]
    assert tier.write([summed(*block) for block in zip(KEYS, payloads, strict=False)]) == [WriteStatus.STORED] * 2
    assert read_blocks(tier, KEYS[:3], nbytes) == [*payloads, None]
    assert tier.discard(KEYS[:2]) == 2
    assert tier.usage().num_blocks == 0
    tier.close()


def test_thousands_of_keys(server: RedisServer) -> None:
    tier = connect(server.url)
    batch = [summed(make_key(("many", i)), make_payload(i, 100)) for i in range(5000)]
    keys = [key for key, _, _ in batch]
    assert tier.write(batch[::2]) == [WriteStatus.STORED] * 2500
    assert tier.lookup(keys) == [Status.HIT, Status.MISS] * 2500
    assert read_blocks(tier, keys, 100) == [None if i % 2 else batch[i][1] for i in range(5000)]
    assert tier.discard(keys) == 2500
    assert tier.lookup(keys) == [Status.MISS] * 5000
    tier.close()


def test_time_to_live_begins_anew_with_each_read(server: RedisServer, client: redis.Redis) -> None:
    tier, for_ever = connect(server.url, ttl_s=1000.0, max_value_bytes=20_000), connect(server.url)
    assert tier.write(items(1)) == for_ever.write(items(2)[1:]) == [WriteStatus.STORED]
    assert client.pttl(key_name(KEYS[1])) == -1
    names = sorted(name for name in client.scan_iter() if name.startswith(key_name(KEYS[0])))
    assert len(names) == 4
    for name in names:
        assert 990_000 < client.pttl(name) <= 1_000_000
        client.pexpire(name, 500_000)
    assert tier.lookup(KEYS[:1]) == [Status.HIT]
    assert all(client.pttl(name) <= 500_000 for name in names), "a lookup is no use"
    assert read_blocks(tier, KEYS[:1], BLOCK_BYTES) == PAYLOADS[:1]
    assert all(client.pttl(name) > 990_000 for name in names)
    for either in (tier, for_ever):
        either.close()


def test_expired_blocks_miss(server: RedisServer, client: redis.Redis) -> None:
    tier = connect(server.url, ttl_s=1000.0)
    tier.write(items(1))
    client.pexpire(key_name(KEYS[0]), 0)
    assert tier.lookup(KEYS[:1]) == [Status.MISS]
    assert tier.write(items(1)) == [WriteStatus.STORED]
    tier.close()


def test_a_full_server_that_does_not_evict_refuses_writes_and_nothing_else(
    server: RedisServer, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    tier = connect(server.url, metrics=metrics, ttl_s=1000.0)
    server.limit(MIB, policy="noeviction")
    batch = [summed(make_key(i), make_payload(i, BLOCK_BYTES)) for i in range(64)]
    statuses = tier.write(batch)
    assert set(statuses) == {WriteStatus.STORED, WriteStatus.FULL}
    assert tier.write(batch[:1]) == [WriteStatus.EXISTS]
    loaded = read_blocks(tier, [key for key, _, _ in batch], BLOCK_BYTES)
    assert loaded == [
        payload if status is WriteStatus.STORED else None
        for (_, payload, _), status in zip(batch, statuses, strict=True)
    ]
    assert [r for r in caplog.records if "takes no more blocks: OOM" in r.message]
    assert all_errors(metrics) == []
    server.limit(0)
    assert tier.write(batch[63:]) == [WriteStatus.STORED]
    tier.close()


@pytest.mark.parametrize(
    ("maxmemory", "policy", "ttl_s", "told"),
    [
        (0, "noeviction", 0.0, "has no `maxmemory`"),
        (0, "allkeys-lru", 60.0, "has no `maxmemory`"),
        (MIB << 10, "noeviction", 60.0, "will refuse writes"),
        (MIB << 10, "volatile-lru", 0.0, "`ttl_s` is 0"),
        (MIB << 10, "volatile-lru", 60.0, None),
        (MIB << 10, "allkeys-lru", 0.0, None),
    ],
)
def test_a_policy_that_will_not_do_is_told_once(
    server: RedisServer,
    client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    maxmemory: int,
    policy: str,
    ttl_s: float,
    told: str | None,
) -> None:
    client.config_set("maxmemory", maxmemory)
    client.config_set("maxmemory-policy", policy)
    tier = connect(server.url, ttl_s=ttl_s)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            tier.lookup(KEYS)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (told is not None)
    assert told is None or (told in lines[0] and server.url.rpartition("/")[2] in lines[0])
    tier.close()


def test_a_user_with_no_more_rights_than_needed(server: RedisServer, client: redis.Redis) -> None:
    """What a site gives away on a server that others use too: not even INFO."""
    client.execute_command(
        *"ACL SETUSER kv reset on >secret ~kvt1:* +get +getex +getrange +set +exists +unlink +ping".split()
    )
    metrics = Metrics()
    tier = connect(server.url, username="kv", password="secret", ttl_s=1000.0, metrics=metrics)
    assert tier.write(items(2)) == [WriteStatus.STORED] * 2
    assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == PAYLOADS[:2]
    assert tier.discard(KEYS[:2]) == 2
    assert all_errors(metrics) == [], "of the look at the policy"
    assert tier.usage() == Usage(0, 0, 0)
    assert all_errors(metrics) == ["usage UnauthenticatedError"]
    assert tier.lookup(KEYS[:1]) == [Status.MISS]
    client.execute_command("ACL SETUSER kv -exists")
    assert tier.lookup(KEYS[:1]) == [Status.MISS]
    assert errors(metrics, "lookup", "UnauthenticatedError") == 1
    client.execute_command("ACL DELUSER kv")
    tier.close()


@pytest.mark.parametrize(
    "wrong", [{"ttl_s": -1.0}, {"call_timeout_s": 0.0}, {"connect_timeout_s": 0.0}, {"max_value_bytes": 0}]
)
def test_settings_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        connect("redis://127.0.0.1", **wrong)


def test_a_replica_that_takes_no_writes_is_told(
    server: RedisServer, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    tier = connect(server.url, metrics=metrics)
    assert set(tier.write(items(2))) == {WriteStatus.STORED}
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    with caplog.at_level(logging.WARNING):
        for place in range(100, 108):
            assert set(tier.write([summed(make_key(place), make_payload(place, BLOCK_BYTES))])) == {WriteStatus.FAILED}
            assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == PAYLOADS[:2], "its breaker is closed"
        later = connect(server.url)
        later.lookup(KEYS)
    for each in (tier, later):
        each.close()
    assert len([record for record in caplog.records if "takes no more blocks: READONLY" in record.getMessage()]) == 1
    assert any("is a replica, which takes no writes" in record.getMessage() for record in caplog.records)
    (look,) = look_at(server.url, RedisSettings(), 5.0).values()
    assert isinstance(look, ServerLook)
    assert look.memory.warning(ttl=False) == "is a replica, which takes no writes: name the server that it follows"
