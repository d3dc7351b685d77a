"""Blocks in pieces of memory: the same bytes as blocks in one place, by every way to the pool, and checked as those."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvtier.tiers.pool.shared_memory.read
from kvtier.codec.checksums import checksum, copy_checked
from kvtier.identity.keys import StoreKey
from kvtier.memory.pieces import Pieces, Target, copy_payload
from kvtier.metrics import Metrics
from kvtier.testing.contract import make_key, make_payload, summed
from kvtier.tiers.base import Item, Status, WriteStatus
from kvtier.tiers.pool import PoolTier
from kvtier_pool.limits import PoolLimits
from pool_rig import MIB, connect, held_bytes, running_pool, until

NUM_LAYERS, NUM_PAGES, PIECE_BYTES = 6, 8, 40_000
BLOCK_BYTES = 2 * NUM_LAYERS * PIECE_BYTES
"""Bytes of a page: keys and values of all layers. Some is copied before the rest, see `codec`."""
KEYS = [make_key(i) for i in range(NUM_PAGES)]


class Host:
    """Pages that lie as an engine has them in its memory: `[keys and values, layers, pages, bytes]`."""

    def __init__(self, seed: int | None = None) -> None:
        shape = (2, NUM_LAYERS, NUM_PAGES, PIECE_BYTES)
        made = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        self.memory = made if seed is not None else np.zeros(shape, dtype=np.uint8)

    def page(self, page: int) -> Pieces:
        """Keys and values of one layer, then of the next; the last layer is a grid of its own."""
        of_layers = self.memory[:, :, page].transpose(1, 0, 2)
        return Pieces([of_layers[:-1], of_layers[-1:]])

    def expected(self, page: int) -> bytes:
        return b"".join(self.memory[part, layer, page].tobytes() for layer in range(NUM_LAYERS) for part in range(2))

    def items(self, *pages: int) -> list[Item[Pieces]]:
        return [summed(KEYS[page], self.page(page)) for page in pages]


def test_pieces_are_in_the_order_of_their_grids() -> None:
    host = Host(1)
    assert len(host.page(3)) == BLOCK_BYTES
    assert bytes(host.page(3).copied()) == host.expected(3)
    other = Host()
    other.page(5).fill(memoryview(host.expected(3)))
    assert other.expected(5) == host.expected(3)
    other.memory[:, :, 5] = 0
    assert not other.memory.any(), "nothing beside the pieces"


@pytest.mark.parametrize("most_bytes", [1, PIECE_BYTES * 2, PIECE_BYTES * 5, BLOCK_BYTES, 1 << 40])
def test_batches_are_bounded_and_hold_every_piece_once(most_bytes: int) -> None:
    host = Host(2)
    batches = list(host.page(0).batches(most_bytes))
    assert b"".join(batch.tobytes() for batch in batches) == host.expected(0)
    assert max(batch.nbytes for batch in batches) <= max(most_bytes, 2 * PIECE_BYTES), "or one group"


def test_a_copy_gives_the_checksum_of_the_whole() -> None:
    host, other = Host(3), Host()
    slot = memoryview(bytearray(BLOCK_BYTES))
    expected = checksum(KEYS[0], host.expected(2))
    assert checksum(KEYS[0], host.page(2)) == expected
    copy_payload(slot, host.page(2))
    assert bytes(slot) == host.expected(2)
    assert copy_checked(KEYS[0], other.page(1), slot) == expected
    assert other.expected(1) == host.expected(2)


@contextlib.contextmanager
def tier(address: str, metrics: Metrics | None = None) -> Iterator[PoolTier]:
    with contextlib.closing(connect(address, shared_memory=True, metrics=metrics)) as connected:
        assert isinstance(connected, PoolTier)
        yield connected


@pytest.mark.parametrize("path", ["shm", "unix", "tcp", "grpc"])
def test_pieces_go_and_come_by_every_way(tmp_path: Path, path: str) -> None:
    """And what was written in pieces is read as a whole, and the other way round."""
    unix, metrics = f"unix:{tmp_path}/pool.sock", Metrics()
    host, other = Host(4), Host()
    with running_pool(32 * MIB, listen=("127.0.0.1:0", unix), shared_memory=path == "shm") as pool:
        address = {"tcp": pool.block[0], "grpc": f"grpc:{pool.grpc[0]}"}.get(path, unix)
        with tier(address, metrics) as connected:
            whole = make_payload(5, BLOCK_BYTES)
            statuses = connected.write([*host.items(0, 1, 2, 3), summed(KEYS[5], whole)])
            assert statuses == [WriteStatus.STORED] * 5
            into: list[Target] = [other.page(page) for page in (3, 2, 1, 0)]
            into += [memoryview(bytearray(BLOCK_BYTES)), other.page(5), other.page(6)]
            keys = [*KEYS[:4], KEYS[1], KEYS[5], KEYS[6]]
            assert connected.read(keys, into) == [Status.HIT] * 6 + [Status.MISS]
        assert [other.expected(page) for page in (3, 2, 1, 0)] == [host.expected(page) for page in range(4)]
        assert bytes(into[4]) == host.expected(1)  # type: ignore[arg-type]
        assert other.expected(5) == whole
        moved = metrics.registry.get_sample_value("kvtier_path_bytes_total", {"path": path, "op": "read"})
        assert moved == 6 * BLOCK_BYTES


def test_pieces_of_a_block_that_its_writer_broke_are_a_miss(tmp_path: Path) -> None:
    metrics, host, other = Metrics(), Host(5), Host()
    with running_pool(32 * MIB, listen=(f"unix:{tmp_path}/pool.sock",)) as pool, tier(pool.block[0], metrics) as it:
        assert it.write(host.items(0, 1)) == [WriteStatus.STORED] * 2
        slabs = it._transport.memory._writes._session.slabs.values()  # type: ignore[attr-defined]
        (slab,) = (slab for slab in slabs if host.expected(0)[:64] in bytes(slab._memory))
        at = bytes(slab._memory).find(host.expected(0)[:64])
        slab._memory[at + BLOCK_BYTES // 2] ^= 1
        assert it.read(KEYS[:2], [other.page(0), other.page(1)]) == [Status.MISS, Status.HIT]
        assert metrics.registry.get_sample_value("kvtier_corrupt_blocks_total", {"tier": "pool"}) == 1
    assert other.expected(1) == host.expected(1)


def test_pieces_of_a_slot_that_changed_hands_are_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader stalls past its lease, and others take all slots meanwhile; then the pool has these blocks no more."""
    host, other, listen = Host(6), Host(), (f"unix:{tmp_path}/pool.sock",)
    stalled, metrics = threading.Event(), Metrics()
    with (
        running_pool(8 * MIB, listen=listen, limits=PoolLimits(lease_s=0.3)) as pool,
        tier(pool.block[0], metrics) as reader,
        tier(pool.block[0]) as writer,
    ):
        assert writer.write(host.items(0, 1)) == [WriteStatus.STORED] * 2

        def stall(key: StoreKey, into: Target, payload: memoryview) -> int:
            if not stalled.is_set():
                stalled.set()
                until(lambda: held_bytes(pool) == 0)  # the lease is over, and the tier has seen it
                fresh = [summed(make_key(i), make_payload(i, BLOCK_BYTES)) for i in range(100, 140)]
                assert WriteStatus.STORED in writer.write(fresh)
            return copy_checked(key, into, payload)

        monkeypatch.setattr(kvtier.tiers.pool.shared_memory.read, "copy_checked", stall)
        assert reader.read(KEYS[:2], [other.page(0), other.page(1)]) == [Status.MISS] * 2
        corrupt = metrics.registry.get_sample_value("kvtier_corrupt_blocks_total", {"tier": "pool"})
        assert not corrupt, "nobody broke them, and nobody's blocks are discarded"
