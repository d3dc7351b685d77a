"""Blocks that are read from below while memory has no room for them: what they take is bounded, shared, and purged."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.identity.keys import TenantId
from kvtier.store import lower_tiers
from kvtier.store.private_buffers import PrivateBuffers
from kvtier.testing.blocks import make_key
from kvtier.tiers.base import WriteStatus
from pool_rig import BLOCK_BYTES, BLUE, MIB, RED, WAIT_S, CoreRig, core_rig, keys, until

NUM_COLD = 12
ROOM_BLOCKS = 2
"""How many blocks of all tenants may be beside a memory of 1 MiB."""
AGES_S = 3600.0


def make_cold(folder: Path) -> None:
    """Blocks of both tenants that only the disk has, when the next rig opens it."""
    with core_rig(folder) as rig:
        for tenant in (RED, BLUE):
            assert {rig.store(label, tenant=tenant) for label in range(NUM_COLD)} == {WriteStatus.STORED}
        rig.core.drain(WAIT_S)


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_tiers, "_LEAST_PRIVATE_BYTES", BLOCK_BYTES)


@contextmanager
def full_memory(folder: Path) -> Iterator[CoreRig]:
    """A store whose memory waits for the disk as a whole, above what `make_cold` has left."""
    with core_rig(folder, memory_bytes=MIB) as rig:
        rig.files.may_write.clear()
        for tenant in (RED, BLUE):
            assert WriteStatus.FULL in [rig.store(f"new {i}", tenant=tenant) for i in range(20)]
        yield rig


def num_found(rig: CoreRig, tenant: TenantId) -> int:
    return sum(payload is not None for payload in rig.load(keys(range(NUM_COLD), tenant)))


def test_beside_a_full_memory_reads_take_no_more_than_their_part(tmp_path: Path) -> None:
    make_cold(tmp_path)
    with full_memory(tmp_path) as rig:
        with rig.core.read(keys(range(NUM_COLD)), BLOCK_BYTES) as blocks:
            num_blocks = sum(block is not None for block in blocks)
            assert 1 <= num_blocks <= ROOM_BLOCKS
            assert rig.core._below.private_bytes(RED) == num_blocks * BLOCK_BYTES
            assert 1 <= num_found(rig, BLUE) <= ROOM_BLOCKS, "one tenant's reads leave another one a block at least"
        assert rig.count("kvtier_pool_unread_blocks_total", tier="disk") >= 2 * (NUM_COLD - ROOM_BLOCKS)
        assert rig.core._below.private_bytes(RED) == rig.core._below.private_bytes(BLUE) == 0
        assert num_found(rig, RED) == num_blocks, "what was given back is there for the next read"
        rig.files.may_write.set()
        rig.core.drain(WAIT_S)
        for tenant in (RED, BLUE):
            assert [rig.load([key]) for key in keys(range(NUM_COLD), tenant)].count([None]) == 0


def test_each_tenant_has_a_block_whatever_the_others_have() -> None:
    buffers = PrivateBuffers(BLOCK_BYTES)
    held = [buffers.take(RED, BLOCK_BYTES) for _ in range(3)]
    assert [buffer is not None for buffer in held] == [True, False, False]
    large = buffers.take(BLUE, 10 * BLOCK_BYTES)
    assert large is not None
    assert len(large.view) == 10 * BLOCK_BYTES
    assert buffers.take(BLUE, 1) is None
    for _ in range(2):
        large.release()
    assert buffers.taken_by(BLUE) == 0
    assert buffers.taken_by(RED) == BLOCK_BYTES


@pytest.mark.parametrize("is_full", [False, True])
def test_a_purge_waits_for_reads_under_way_and_leaves_nothing_of_them(tmp_path: Path, is_full: bool) -> None:
    make_cold(tmp_path)
    opened = full_memory(tmp_path) if is_full else core_rig(tmp_path)
    with opened as rig, ThreadPoolExecutor(2) as executor:
        rig.files.may_read.clear()
        reading = executor.submit(rig.load, keys(range(NUM_COLD)))
        assert rig.files.reading.acquire(timeout=WAIT_S)
        purging = executor.submit(rig.core.purge, RED, AGES_S)
        until(lambda: rig.core.usage(RED)[1].num_blocks == 0)
        rig.files.may_read.set()
        rig.files.may_write.set()
        reading.result(WAIT_S)
        report = purging.result(WAIT_S)
        assert report.problems == []
        assert rig.load(keys(range(NUM_COLD))) == [None] * NUM_COLD
        assert [share.num_blocks for share in rig.core.usage(RED)] == [0, 0]
        assert rig.core._below.private_bytes(RED) == 0
        assert [rig.load([key]) for key in keys(range(NUM_COLD), BLUE)].count([None]) == 0
        assert rig.core.lookup([make_key("new 0")]) == rig.core.lookup([make_key("never")])
