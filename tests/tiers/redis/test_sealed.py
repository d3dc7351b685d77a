"""Tenants with storage keys in a real Redis: none of theirs can be read there, and what was meddled with is missed."""

import struct

import pytest
import redis
import xxhash

from kvtier.codec.sealed_form import NO_SEALS
from kvtier.codec.sealing import SEAL_BYTES
from kvtier.codec.stored_form import Codec
from kvtier.metrics import Metrics
from kvtier.testing.blocks import make_packable_payload, make_payload, read_blocks, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.redis.commands import key_name
from redis_rig import BLOCK_BYTES, KEYS, PAYLOADS, RedisServer, connect, corrupt, emptied, items, module_redis
from redis_rig import somebody_else as somebody_else_with_access
from seal_rig import seals, unopened

running = pytest.fixture(scope="module")(module_redis)
server = pytest.fixture(emptied)
client = pytest.fixture(somebody_else_with_access)


def everything(client: redis.Redis) -> bytes:
    return b"".join(client.get(name) for name in client.scan_iter())


def resummed(value: bytes) -> bytes:
    """As an attacker would leave it: its checksum, which anybody can compute, is right."""
    return value[:88] + struct.pack("<Q", xxhash.xxh3_64_intdigest(value[:88] + value[96:])) + value[96:]


@pytest.mark.parametrize("codec", Codec)
def test_sealed_blocks_come_back_and_are_not_in_the_server(
    server: RedisServer, client: redis.Redis, codec: Codec
) -> None:
    payload = make_packable_payload("kv", BLOCK_BYTES)
    tier = connect(server.url, codec=codec, seals=seals(1))
    assert tier.write([summed(KEYS[0], payload)]) == [WriteStatus.STORED]
    assert read_blocks(tier, KEYS[:1], BLOCK_BYTES) == [payload]
    assert not any(payload[at : at + 16] in everything(client) for at in range(0, BLOCK_BYTES, 500))
    tier.close()


@pytest.mark.parametrize("less", [SEAL_BYTES + 1, SEAL_BYTES, 1, 0, -1])
@pytest.mark.parametrize("num_values", [1, 2])
def test_blocks_about_as_large_as_a_value_are_whole(server: RedisServer, less: int, num_values: int) -> None:
    nbytes = num_values * BLOCK_BYTES - less
    tier = connect(server.url, max_value_bytes=BLOCK_BYTES, seals=seals(1))
    payloads = [make_payload(i, nbytes) for i in range(3)]
    blocks = [summed(*block) for block in zip(KEYS, payloads, strict=False)]
    assert tier.write(blocks) == [WriteStatus.STORED] * 3
    assert read_blocks(tier, KEYS[:3], nbytes) == payloads
    assert tier.discard(KEYS[:3]) == 3
    tier.close()


def test_keys_are_rotated_while_pools_have_different_ones(server: RedisServer, client: redis.Redis) -> None:
    """The pool that has not got the new key yet drops nothing; the one that has lost the old key does."""
    metrics = Metrics()
    ahead, behind = connect(server.url, seals=seals(1, 2)), connect(server.url, seals=seals(1), metrics=metrics)
    assert behind.write(items(1)) == [WriteStatus.STORED]
    assert ahead.write([summed(KEYS[1], PAYLOADS[1])]) == [WriteStatus.STORED]
    assert read_blocks(ahead, KEYS[:2], BLOCK_BYTES) == PAYLOADS[:2]
    assert read_blocks(behind, KEYS[:2], BLOCK_BYTES) == [PAYLOADS[0], None]
    assert (unopened(metrics, "redis"), corrupt(metrics)) == ({"newer_key": 1}, 0)
    assert client.dbsize() == 2
    after = connect(server.url, seals=seals(2), metrics=metrics)
    assert read_blocks(after, KEYS[:2], BLOCK_BYTES) == [None, PAYLOADS[1]]
    assert unopened(metrics, "redis") == {"newer_key": 1, "unknown_key": 1}
    assert after.write(items(1)) == [WriteStatus.STORED], "the old one is gone"
    for tier in (ahead, behind, after):
        tier.close()


def test_plain_blocks_are_read_only_if_that_is_wanted(server: RedisServer) -> None:
    metrics = Metrics()
    before, lenient = connect(server.url), connect(server.url, seals=seals(1, reads_plain=True))
    strict = connect(server.url, seals=seals(1), metrics=metrics)
    before.write(items(1))
    assert read_blocks(lenient, KEYS[:1], BLOCK_BYTES) == PAYLOADS[:1]
    assert read_blocks(strict, KEYS[:1], BLOCK_BYTES) == [None]
    assert unopened(metrics, "redis") == {"plain": 1}
    assert strict.lookup(KEYS[:1]) == [Status.MISS]
    for tier in (before, lenient, strict):
        tier.close()


@pytest.mark.parametrize("forged", [False, True])
@pytest.mark.parametrize("at", [6, 40, 75, 96, 121, 5000, -1])
def test_a_flipped_bit_is_a_miss(server: RedisServer, client: redis.Redis, at: int, forged: bool) -> None:
    metrics = Metrics()
    tier = connect(server.url, seals=seals(1), metrics=metrics)
    tier.write(items(1))
    value = bytearray(client.get(key_name(KEYS[0])))
    value[at] ^= 0x01
    client.set(key_name(KEYS[0]), resummed(bytes(value)) if forged else bytes(value))
    assert read_blocks(tier, KEYS[:1], BLOCK_BYTES) == [None]
    assert corrupt(metrics) == 1
    assert tier.write(items(1)) == [WriteStatus.STORED]
    tier.close()


def test_blocks_that_somebody_has_swapped_are_misses(server: RedisServer, client: redis.Redis) -> None:
    """With all that anybody can put right: names, keys in the headers, checksums."""
    metrics = Metrics()
    tier = connect(server.url, seals=seals(1), metrics=metrics)
    tier.write(items(2))
    values = [client.get(key_name(key)) for key in KEYS[:2]]
    for key, value in zip(KEYS[:2], reversed(values), strict=True):
        client.set(key_name(key), resummed(value[:8] + key + value[72:]))
    assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == [None, None]
    assert unopened(metrics, "redis") == {"altered": 2}
    tier.close()


def test_a_block_of_before_put_in_the_place_of_a_sealed_one_is_a_miss(server: RedisServer, client: redis.Redis) -> None:
    """A forgery that needs no key at all."""
    tier, forger = connect(server.url, seals=seals(1)), connect(server.url, seals=NO_SEALS)
    tier.write(items(1))
    client.flushall()
    forger.write([summed(KEYS[0], make_payload("forged", BLOCK_BYTES))])
    assert read_blocks(tier, KEYS[:1], BLOCK_BYTES) == [None]
    for each in (tier, forger):
        each.close()


def test_blocks_that_somebody_else_has_stored_first_leave_no_parts(server: RedisServer, client: redis.Redis) -> None:
    """Sealed twice, a block has other parts, of which nobody else knows."""
    payload = make_payload("kv", 3 * BLOCK_BYTES)
    tier = connect(server.url, max_value_bytes=BLOCK_BYTES, seals=seals(1))
    assert tier.write([summed(KEYS[0], payload)] * 2) == [WriteStatus.STORED, WriteStatus.EXISTS]
    assert client.dbsize() == 4
    assert read_blocks(tier, KEYS[:1], len(payload)) == [payload]
    tier.close()
