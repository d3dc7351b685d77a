"""Values in a Redis that the tier did not write: damaged, foreign, or with a part gone. All are misses that heal."""

from collections.abc import Callable, Iterator

import pytest
import redis

from codec_rig import build_v1
from kvtier.codec.stored_form import Codec
from kvtier.metrics import Metrics
from kvtier.testing.contract import make_payload, read_blocks, summed
from kvtier.tiers.base import Status, Tier, WriteStatus
from kvtier.tiers.redis.commands import key_name
from redis_rig import (
    BLOCK_BYTES,
    KEYS,
    MIB,
    PAYLOADS,
    RedisServer,
    all_errors,
    connect,
    corrupt,
    emptied,
    items,
    module_redis,
    somebody_else,
)

running = pytest.fixture(scope="module")(module_redis)
server = pytest.fixture(emptied)
client = pytest.fixture(somebody_else)


def _flip(position: int) -> Callable[[bytes], bytes]:
    def flip(value: bytes) -> bytes:
        at = position % len(value)
        return value[:at] + bytes([value[at] ^ 0x10]) + value[at + 1 :]

    return flip


DAMAGE = {
    **{f"bit at {i}": _flip(i) for i in (0, 4, 6, 7, 8, 40, 71, 72, 75, 80, 84, 88, 95, 96, 5000, -1)},
    **{f"cut to {n}": lambda value, n=n: value[:n] for n in (0, 1, 95, 96, 97, -1)},
    "longer": lambda value: value + b"x",
    "foreign": lambda value: b"hello",
    "large": lambda value: bytes(9 * MIB),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("codec", Codec)
def test_a_damaged_value_is_a_miss_and_dropped(
    server: RedisServer, client: redis.Redis, damage: Callable[[bytes], bytes], codec: Codec
) -> None:
    metrics = Metrics()
    tier = connect(server.url, metrics=metrics, codec=codec)
    payloads = [make_payload(i, BLOCK_BYTES // 8) * 8 for i in range(3)]
    tier.write([summed(*block) for block in zip(KEYS, payloads, strict=False)])
    name = key_name(KEYS[1])
    client.set(name, damage(client.get(name)))
    assert read_blocks(tier, KEYS[:3], BLOCK_BYTES) == [payloads[0], None, payloads[2]]
    assert corrupt(metrics) == 1
    assert tier.lookup(KEYS[:3]) == [Status.HIT, Status.MISS, Status.HIT]
    assert tier.write([summed(KEYS[1], payloads[1])]) == [WriteStatus.STORED]
    assert read_blocks(tier, KEYS[:3], BLOCK_BYTES) == payloads
    assert all_errors(metrics) == []
    tier.close()


def test_a_codec_that_this_release_does_not_know_is_a_miss_and_dropped(
    server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left where it is, it would be there for writers and a miss for readers for ever."""
    payloads = [make_payload(i, BLOCK_BYTES // 8) * 8 for i in range(2)]
    newer, older = connect(server.url, codec=Codec.PLANES_ZSTD), connect(server.url)
    assert newer.write([summed(KEYS[0], payloads[0])]) == [WriteStatus.STORED]
    assert older.write([summed(KEYS[1], payloads[1])]) == [WriteStatus.STORED]
    monkeypatch.setattr("kvtier.codec.stored_form._CODECS", {Codec.RAW, Codec.LZ4})
    assert read_blocks(older, KEYS[:2], BLOCK_BYTES) == [None, payloads[1]]
    assert client.dbsize() == 1
    assert older.write([summed(KEYS[0], payloads[0])]) == [WriteStatus.STORED]
    assert read_blocks(older, KEYS[:2], BLOCK_BYTES) == payloads
    for tier in (newer, older):
        tier.close()


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.PLANES_ZSTD])
def test_version_1_is_read_and_version_2_refused_by_those_who_know_no_other(
    server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, codec: Codec
) -> None:
    payloads, metrics = [make_payload(i, BLOCK_BYTES // 8) * 8 for i in range(3)], Metrics()
    client.set(key_name(KEYS[0]), b"".join(build_v1(KEYS[0], payloads[0], codec)))
    newer, older = connect(server.url, codec=codec), connect(server.url, metrics=metrics)
    assert newer.write([summed(KEYS[1], payloads[1])]) == [WriteStatus.STORED]
    assert older.write([summed(KEYS[2], payloads[2])]) == [WriteStatus.STORED]
    assert read_blocks(newer, KEYS[:3], BLOCK_BYTES) == payloads
    monkeypatch.setattr("kvtier.codec.stored_form._VERSIONS", frozenset({1}))
    assert read_blocks(older, KEYS[:3], BLOCK_BYTES) == [payloads[0], None, payloads[2]]
    assert corrupt(metrics) == 1
    assert older.write([summed(KEYS[1], payloads[1])]) == [WriteStatus.STORED]
    for tier in (newer, older):
        tier.close()


def test_a_sealed_block_is_a_miss_counted_and_dropped(server: RedisServer, client: redis.Redis) -> None:
    metrics = Metrics()
    tier = connect(server.url, metrics=metrics)
    tier.write(items(1))
    value = bytearray(client.get(key_name(KEYS[0])))
    value[4:8], value[76:80] = b"\x02\x00\x00\x01", b"\x07\x00\x00\x00"
    client.set(key_name(KEYS[0]), bytes(value))
    assert read_blocks(tier, KEYS[:1], BLOCK_BYTES) == [None]
    assert corrupt(metrics) == 1
    assert tier.write(items(1)) == [WriteStatus.STORED]
    tier.close()


def test_a_block_in_anothers_place_is_a_miss_and_dropped(server: RedisServer, client: redis.Redis) -> None:
    metrics = Metrics()
    tier = connect(server.url, metrics=metrics)
    tier.write(items(2))
    first, second = (key_name(key) for key in KEYS[:2])
    client.rename(first, "aside")
    client.rename(second, first)
    client.rename("aside", second)
    assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == [None, None]
    assert corrupt(metrics) == 2
    assert client.dbsize() == 0
    tier.close()


def test_something_that_is_no_string_is_a_miss_and_dropped(server: RedisServer, client: redis.Redis) -> None:
    metrics = Metrics()
    tier = connect(server.url, metrics=metrics)
    tier.write(items(2)[1:])
    client.lpush(key_name(KEYS[0]), "not", "ours")
    assert tier.write(items(1)) == [WriteStatus.EXISTS]
    assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == [None, PAYLOADS[1]]
    assert corrupt(metrics) == 1
    assert tier.write(items(1)) == [WriteStatus.STORED]
    client.delete(key_name(KEYS[0]))
    client.lpush(key_name(KEYS[0]), "again")
    assert tier.discard(KEYS[:1]) == 1
    assert all_errors(metrics) == []
    tier.close()


class TestParts:
    """Blocks of four parts."""

    @pytest.fixture
    def metrics(self) -> Metrics:
        return Metrics()

    @pytest.fixture
    def tier(self, server: RedisServer, metrics: Metrics) -> Iterator[Tier]:
        tier = connect(server.url, metrics=metrics, max_value_bytes=20_000)
        assert tier.write(items(2)) == [WriteStatus.STORED] * 2
        yield tier
        assert all_errors(metrics) == []
        tier.close()

    @pytest.fixture
    def parts(self, tier: Tier, client: redis.Redis) -> list[bytes]:
        """Names of the first block's, in order."""
        names = sorted(name for name in client.scan_iter() if name.startswith(key_name(KEYS[0])))
        assert [client.strlen(name) for name in names] == [20_096, 20_000, 20_000, BLOCK_BYTES - 60_000]
        return names

    @pytest.mark.parametrize("lost", range(4))
    def test_one_that_is_gone_makes_a_miss_that_heals(
        self, tier: Tier, client: redis.Redis, metrics: Metrics, parts: list[bytes], lost: int
    ) -> None:
        client.delete(parts[lost])
        assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == [None, PAYLOADS[1]]
        assert corrupt(metrics) == 0
        assert tier.lookup(KEYS[:1]) == [Status.MISS]
        assert lost == 0 or client.exists(*parts) == 0, "the others are gone as well"
        assert tier.write(items(1)) == [WriteStatus.STORED]
        assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == PAYLOADS[:2]

    @pytest.mark.parametrize("damaged", range(1, 4))
    def test_one_that_is_no_string_makes_a_miss_that_heals(
        self, tier: Tier, client: redis.Redis, metrics: Metrics, parts: list[bytes], damaged: int
    ) -> None:
        client.delete(parts[damaged])
        client.lpush(parts[damaged], "not", "ours")
        assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == [None, PAYLOADS[1]]
        assert corrupt(metrics) == 1
        assert client.exists(*parts) == 0
        assert tier.write(items(1)) == [WriteStatus.STORED]
        assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == PAYLOADS[:2]

    @pytest.mark.parametrize("damaged", range(4))
    @pytest.mark.parametrize("how", ["bit at 5000", "cut to 96", "longer"])
    def test_one_that_is_damaged_makes_a_miss_that_heals(
        self, tier: Tier, client: redis.Redis, metrics: Metrics, parts: list[bytes], damaged: int, how: str
    ) -> None:
        client.set(parts[damaged], DAMAGE[how](client.get(parts[damaged])))
        assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == [None, PAYLOADS[1]]
        assert corrupt(metrics) == 1
        assert client.exists(parts[0]) == 0
        assert tier.write(items(1)) == [WriteStatus.STORED]
        assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == PAYLOADS[:2]

    @pytest.mark.parametrize("nbytes", [20_001, BLOCK_BYTES + 1, 1 << 20, 1 << 40, 1 << 62])
    def test_a_header_with_another_length_makes_a_miss_that_heals(
        self, tier: Tier, client: redis.Redis, metrics: Metrics, parts: list[bytes], nbytes: int
    ) -> None:
        value = client.get(parts[0])
        client.set(parts[0], value[:72] + 2 * nbytes.to_bytes(8, "little") + value[88:])
        assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == [None, PAYLOADS[1]]
        assert tier.write(items(1)) == [WriteStatus.STORED]
        assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == PAYLOADS[:2]

    def test_packed_ones_too(self, server: RedisServer, client: redis.Redis, metrics: Metrics) -> None:
        """The parts of a packed block do not tell the length of the block itself."""
        tier = connect(server.url, metrics=metrics, codec=Codec.LZ4, max_value_bytes=5000)
        batch = [summed(KEYS[i], make_payload(i, BLOCK_BYTES // 8) * 8) for i in range(3)]
        assert tier.write(batch) == [WriteStatus.STORED] * 3
        for key in KEYS[:2]:
            value = client.get(key_name(key))
            client.set(key_name(key), value[:72] + (BLOCK_BYTES + 8).to_bytes(8, "little") + value[80:])
        loaded = [read_blocks(tier, KEYS[:3], BLOCK_BYTES) for _ in range(2)]
        assert loaded == [[None, None, batch[2][1]]] * 2
        assert corrupt(metrics) == 2, "one with each read"
        assert tier.write(batch) == [WriteStatus.STORED, WriteStatus.STORED, WriteStatus.EXISTS]
        assert read_blocks(tier, KEYS[:3], BLOCK_BYTES) == [payload for _, payload, _ in batch]
        tier.close()

    def test_parts_of_different_bytes_never_meet(self, tier: Tier, client: redis.Redis, parts: list[bytes]) -> None:
        """Two writers of one key, the first of whom died before it was whole."""
        client.delete(parts[0])
        assert tier.write([summed(KEYS[0], PAYLOADS[5])]) == [WriteStatus.STORED]
        assert client.exists(*parts) == 4, "the dead one's are still there"
        assert read_blocks(tier, KEYS[:1], BLOCK_BYTES) == [PAYLOADS[5]]

    def test_no_room_for_all_leaves_none(self, server: RedisServer, tier: Tier, client: redis.Redis) -> None:
        assert tier.discard(KEYS[:2]) == 2
        assert client.dbsize() == 0
        server.limit(4 * MIB, policy="noeviction")
        big = make_payload("big", 6 * MIB)
        assert tier.write([summed(KEYS[2], big)]) == [WriteStatus.FULL]
        assert client.dbsize() == 0
        server.limit(0)
        assert tier.write([summed(KEYS[2], big)]) == [WriteStatus.STORED]
        assert read_blocks(tier, KEYS[2:3], len(big)) == [big]
