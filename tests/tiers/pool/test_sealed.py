"""Blocks that an engine seals with keys that the pool has not got: nobody else reads or forges them, on any way."""

import contextlib
import hmac
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvtier.codec import sealing
from kvtier.codec.checksums import checksum
from kvtier.errors import CorruptBlockError, SealedBlockError, SealFault
from kvtier.identity.keys import StoreKey
from kvtier.memory.pieces import Pieces
from kvtier.metrics import Metrics
from kvtier.testing.blocks import make_payload, read_blocks, summed
from kvtier.tiers.base import Status, Tier, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.pool.carriage import Carriage
from kvtier.tiers.pool.sealed_blocks import CARRIED_BYTES, SealedPayload, SealedTarget
from kvtier.tiers.pool.tier import PoolTier
from pool_contract import OverPool, run_states
from pool_rig import (
    BLOCK_BYTES,
    BLUE,
    MIB,
    RED,
    PoolProcess,
    connect,
    items,
    keys,
    payloads,
    pool_process,
    running_pool,
)
from seal_rig import KEYS, carriage_keys, unopened

WAYS = ["shm", "unix", "tcp", "grpc"]
LABELS = range(4)
KEY = keys([0])[0]
PAYLOAD = payloads([0])[0]


@contextlib.contextmanager
def pool_by(way: str, folder: Path, capacity_bytes: int = 32 * MIB) -> Iterator[Callable[..., PoolTier]]:
    """A pool, and what makes clients of it that go one way."""
    unix = f"unix:{folder}/pool.sock"
    with running_pool(capacity_bytes, listen=["127.0.0.1:0", unix]) as pool, contextlib.ExitStack() as stack:
        address = {"tcp": pool.block[0], "grpc": f"grpc:{pool.grpc[0]}"}.get(way, unix)

        def client(tenant: str = "red", **options: object) -> PoolTier:
            tier = connect(address, tenant, shared_memory=way == "shm", **options)  # type: ignore[arg-type]
            stack.callback(tier.close)
            return tier

        yield client


class _Sealed(OverPool):
    way = "tcp"

    @contextlib.contextmanager
    def opened(self, capacity_bytes: int, folder: Path) -> Iterator[Tier]:
        with pool_by(self.way, folder, capacity_bytes) as client:
            yield client(sealing=carriage_keys(1))


class TestSealedInSharedMemory(_Sealed):
    way = "shm"


class TestSealedOverTcp(_Sealed):
    way = "tcp"


class TestSealedOverGrpc(_Sealed):
    way = "grpc"


@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_states_against_a_dict(tmp_path: Path, way: str) -> None:
    with pool_by(way, tmp_path, 4 * MIB) as client:
        run_states(lambda: client(sealing=carriage_keys(1)))


def as_carried(tier: Tier, key: StoreKey = KEY) -> bytes:
    """What the pool has, as its operator, or who has the token, reads it."""
    (found,) = read_blocks(tier, [key], BLOCK_BYTES + CARRIED_BYTES)
    assert found is not None
    return found


def replace(tier: Tier, key: StoreKey, block: bytes) -> None:
    """What they put in its place, with the right checksum."""
    tier.discard([key])
    assert tier.write([summed(key, block)]) == [WriteStatus.STORED]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_seals_and_opens(tmp_path: Path, way: str) -> None:
    metrics = Metrics()
    with pool_by(way, tmp_path) as client:
        tier, operator = client(sealing=carriage_keys(1), metrics=metrics), client()
        assert tier.write(items(LABELS)) == [WriteStatus.STORED] * 4
        assert tier.write(items(LABELS)) == [WriteStatus.EXISTS] * 4
        assert tier.lookup(keys(LABELS)) == [Status.HIT] * 4
        assert read_blocks(tier, keys(LABELS), BLOCK_BYTES) == payloads(LABELS)
        for op in ("read",) if way == "grpc" else ("read", "write"):  # gRPC sends what is there as well
            moved = metrics.registry.get_sample_value("kvtier_path_bytes_total", {"path": way, "op": op})
            assert moved == 4 * (BLOCK_BYTES + CARRIED_BYTES)
        assert read_blocks(operator, keys(LABELS), BLOCK_BYTES) == [None] * 4
        for key, payload in zip(keys(LABELS), payloads(LABELS), strict=True):
            carried = as_carried(operator, key)
            assert not any(payload[at : at + 16] in carried for at in range(0, BLOCK_BYTES, 100))
            assert struct.pack("<Q", checksum(key, payload)) not in carried
        assert tier.lease(keys(LABELS), BLOCK_BYTES, ()) is None


def test_blocks_in_pieces_are_sealed_and_opened(tmp_path: Path) -> None:
    whole = np.frombuffer(PAYLOAD, np.uint8)
    halves = [whole[: BLOCK_BYTES // 2].reshape(1, 1, -1), whole[BLOCK_BYTES // 2 :].reshape(1, 1, -1)]
    into = np.zeros(BLOCK_BYTES, np.uint8)
    target = Pieces([into.reshape(2, 2, -1)])
    for way in ("shm", "tcp"):
        folder = tmp_path / way
        folder.mkdir()
        with pool_by(way, folder) as client:
            tier = client(sealing=carriage_keys(1))
            assert tier.write([(KEY, Pieces(halves), checksum(KEY, PAYLOAD))]) == [WriteStatus.STORED]
            into[:] = 0
            assert tier.read([KEY], [target]) == [Status.HIT]
            assert into.tobytes() == PAYLOAD


class _SlowPool:
    """Answers a read after some seconds, with a block that cannot be opened."""

    def __init__(self, read_s: float) -> None:
        self.read_s, self.now_s = read_s, 0.0
        self.discard_timeouts_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def read(self, keys: object, into: object, timeout_s: float) -> Iterator[tuple[int, CorruptBlockError | None]]:
        self.now_s += self.read_s
        yield 0, SealedBlockError(SealFault.ALTERED, "forged")

    def discard(self, keys: object, timeout_s: float) -> int:
        self.discard_timeouts_s.append(timeout_s)
        return 1


@pytest.mark.parametrize(("read_s", "left_s"), [(4.0, [1.0]), (5.0, [])])
def test_a_read_that_discards_takes_no_longer_than_a_call_may(read_s: float, left_s: list[float]) -> None:
    """A tier process is ended when its tier takes longer."""
    pool, breaker = _SlowPool(read_s), CircuitBreaker(3, 1.0)
    tier = PoolTier(
        pool,  # type: ignore[arg-type]
        RED,
        metrics=Metrics(),
        breaker=breaker,
        call_timeout_s=5.0,
        sealing=carriage_keys(1),
        clock=pool.clock,
    )
    assert read_blocks(tier, [KEY], BLOCK_BYTES) == [None]
    assert pool.discard_timeouts_s == left_s


REGIONS = {"magic": 0, "key id": 4, "random": 10, "masked checksum": 34, "ciphertext": 5000, "tag": -3}


@pytest.mark.parametrize("way", WAYS)
def test_what_an_operator_changes_is_a_miss_and_heals(tmp_path: Path, way: str) -> None:
    with pool_by(way, tmp_path) as client:
        metrics = Metrics()
        tier, operator = client(sealing=carriage_keys(2), metrics=metrics), client()
        for at in REGIONS.values():
            tier.write(items([0]))
            block = bytearray(as_carried(operator))
            block[at] ^= 0x02  # makes key 2 to key 0
            replace(operator, KEY, bytes(block))
            assert read_blocks(tier, [KEY], BLOCK_BYTES) == [None]
            assert tier.lookup([KEY]) == [Status.MISS], "or nobody could store it again"
        assert unopened(metrics, "pool") == {"plain": 1, "unknown_key": 1, "altered": 4}


def test_every_bit_counts() -> None:
    payload = make_payload("small", 40)
    into = memoryview(bytearray(40))
    carriage = Carriage(carriage_keys(1))
    target = SealedTarget(KEY, into, carriage)
    whole = bytes(SealedPayload((KEY, payload, checksum(KEY, payload)), carriage).sealed()[0])
    assert target.opening(memoryview(whole), is_shared=False)() is None
    assert into == payload
    for bit in range(8 * len(whole)):
        block = bytearray(whole)
        block[bit // 8] ^= 1 << bit % 8
        assert target.opening(memoryview(block), is_shared=False)() is not None


@pytest.mark.parametrize("way", WAYS)
def test_blocks_in_each_others_places_are_misses(tmp_path: Path, way: str) -> None:
    with pool_by(way, tmp_path) as client:
        tier, operator = client(sealing=carriage_keys(1)), client()
        tier.write(items([0, 1]))
        one, other = (as_carried(operator, key) for key in keys([0, 1]))
        replace(operator, keys([0])[0], other)
        replace(operator, keys([1])[0], one)
        assert read_blocks(tier, keys([0, 1]), BLOCK_BYTES) == [None, None]


@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_a_block_of_another_tenant_is_a_miss_even_with_one_secret_for_both(tmp_path: Path, way: str) -> None:
    with pool_by(way, tmp_path) as client:
        tier, operator = client(sealing=carriage_keys(1)), client()
        theirs = client("blue", sealing=carriage_keys(1, tenant=BLUE))
        theirs.write(items([0], BLUE))
        replace(operator, KEY, as_carried(client("blue"), keys([0], BLUE)[0]))
        assert read_blocks(tier, [KEY], BLOCK_BYTES) == [None]
        assert read_blocks(theirs, keys([0], BLUE), BLOCK_BYTES) == [PAYLOAD]


@pytest.mark.parametrize("way", WAYS)
def test_plain_blocks_are_never_read_with_keys(tmp_path: Path, way: str) -> None:
    """As long as they are, or as sealed ones are: a downgrade needs no key, and must not work."""
    metrics = Metrics()
    with pool_by(way, tmp_path) as client:
        tier, operator = client(sealing=carriage_keys(1), metrics=metrics), client()
        operator.write([summed(KEY, PAYLOAD), summed(keys([1])[0], PAYLOAD + bytes(CARRIED_BYTES))])
        assert read_blocks(tier, keys([0, 1]), BLOCK_BYTES) == [None, None]
        assert unopened(metrics, "pool") == {"plain": 1}
        for cut in (1, CARRIED_BYTES, BLOCK_BYTES):
            tier.discard(keys([2]))
            tier.write(items([2]))
            replace(operator, keys([2])[0], as_carried(operator, keys([2])[0])[:-cut])
            assert read_blocks(tier, keys([2]), BLOCK_BYTES) == [None]


def test_keys_are_rotated(tmp_path: Path) -> None:
    metrics = Metrics()
    with pool_by("shm", tmp_path) as client:
        old, both = client(sealing=carriage_keys(1), metrics=metrics), client(sealing=carriage_keys(1, 2))
        new = client(sealing=carriage_keys(2), metrics=metrics)
        old.write(items([0]))
        both.write(items([1]))
        assert read_blocks(both, keys([0, 1]), BLOCK_BYTES) == payloads([0, 1])
        assert read_blocks(old, keys([0, 1]), BLOCK_BYTES) == [PAYLOAD, None]
        assert both.lookup(keys([1])) == [Status.HIT], "an engine without the new key leaves it to others"
        assert read_blocks(new, keys([0, 1]), BLOCK_BYTES) == [None, *payloads([1])]
        assert unopened(metrics, "pool") == {"newer_key": 1, "unknown_key": 1}
        assert new.write(items([0])) == [WriteStatus.STORED]


def test_the_form_is_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing.os, "urandom", lambda nbytes: bytes(range(nbytes)))
    key = StoreKey(RED + bytes(16) + bytes(range(32)))
    whole, summed_up = SealedPayload(summed(key, b"golden payload"), Carriage(carriage_keys(1))).sealed()
    block = bytes(whole)
    material = hmac.digest(KEYS[1], b"kvtier.carriage.v1" + RED + b"\1\0\0\0" + bytes(range(24)), "sha512")
    bound = block[:8] + key + struct.pack("<Q", 14) + block[32:40]
    assert AESGCM(material[:32]).decrypt(material[32:44], block[40:], bound) == b"golden payload"
    assert summed_up == checksum(key, block)
    assert block.hex() == (
        "4b56545301000000000102030405060708090a0b0c0d0e0f1011121314151617df4e7203d54561287513eb63a2c0f086"
        "b33f293e8a0fd8579c22cdeccd91d03b2c54e5cc7a8f"
    )


def _memory_of(pool: PoolProcess) -> Iterator[bytes]:
    """All that the process has mapped, shared memory included, piece by piece."""
    pid = pool.process.pid
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            found = re.match(r"([0-9a-f]+)-([0-9a-f]+) r", line)
            if found is None or "[v" in line:
                continue
            start, stop = (int(part, 16) for part in found.groups())
            for at in range(start, stop, 16 * MIB):
                with contextlib.suppress(OSError, ValueError, OverflowError):
                    memory.seek(at)
                    yield memory.read(min(16 * MIB, stop - at))


@pytest.mark.parametrize("sealed", [True, False])
def test_nothing_of_a_block_is_in_the_pools_memory_nor_on_its_disk(tmp_path: Path, sealed: bool) -> None:
    """Without keys all of it is there, or this test looks for nothing."""
    folder, unix = tmp_path / "disk", f"unix:{tmp_path}/pool.sock"
    marks = [payload[1000:1016] for payload in payloads(LABELS)]
    with pool_process(f"--disk-dir={folder}", listen=unix) as pool:
        for shared in (True, False):
            tier = connect(pool.block, shared_memory=shared, sealing=carriage_keys(1) if sealed else None)
            half = LABELS[:2] if shared else LABELS[2:]
            assert tier.write(items(half)) == [WriteStatus.STORED] * 2
            assert read_blocks(tier, keys(half), BLOCK_BYTES) == payloads(half)
            tier.close()
        try:
            found = {mark for part in _memory_of(pool) for mark in marks if mark in part}
        except PermissionError:
            pytest.skip("may not read another process's memory")
        assert found == (set() if sealed else set(marks))
        code, _ = pool.terminate()
        assert code == 0
    files = b"".join(path.read_bytes() for path in folder.iterdir())
    assert {mark for mark in marks if mark in files} == (set() if sealed else set(marks))


@pytest.mark.parametrize("way", ["shm", "tcp", "older"])
@pytest.mark.parametrize("nbytes", [(256 << 10) - CARRIED_BYTES, 256 << 10, (256 << 10) + 1, (1 << 20) + 40])
def test_large_blocks_are_sealed_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, nbytes: int
) -> None:
    """Around the size of a piece, and from the size on at which another thread helps; a forged one among them. Also
    with a pool that takes no checksums behind blocks."""
    if way == "older":
        monkeypatch.setattr("kvtier.tiers.pool.socket_transport.can_stream", lambda items: False)
    blocks = [summed(key, make_payload(f"large {i}", nbytes)) for i, key in enumerate(keys(range(8)))]
    places = keys(range(8))
    with pool_by(way, tmp_path, 64 * MIB) as client:
        tier, operator = client(sealing=carriage_keys(1)), client()
        assert tier.write(blocks) == [WriteStatus.STORED] * 8
        expected: list[bytes | None] = [bytes(payload) for _, payload, _ in blocks]
        assert read_blocks(tier, places, nbytes) == expected
        (forged,) = read_blocks(operator, places[3:4], nbytes + CARRIED_BYTES)
        assert forged is not None
        replace(operator, places[3], forged[:-20] + bytes([forged[-20] ^ 1]) + forged[-19:])
        expected[3] = None
        assert read_blocks(tier, places, nbytes) == expected
