"""Blocks from the pool's memory straight to the device: which ones, how its memory is mapped, and when it is not."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_rig import result
from direct_rig import BLOCK_BYTES, KEYS, NUM_BLOCKS, engine, is_right
from hierarchy_rig import chain
from kvtier.identity.keys import BlockKey, rank_keys
from kvtier.memory import memfd
from kvtier.memory.slot_memory import SlotMemory
from kvtier.testing.blocks import TINY_NAMESPACE
from kvtier.tiers.sidecar import direct_reads as borrowing
from kvtier_pool.limits import PoolLimits
from pool_rig import MIB, WAIT_S, connect, held_bytes, running_pool, until

pytestmark = pytest.mark.skipif(not memfd.available(), reason="shared memory needs Linux")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address of a pool so large that a writer's first slab, 2 MiB, holds all of its blocks."""
    with running_pool(2048 * MIB, listen=(f"unix:{tmp_path}/pool.sock",)) as pool:
        yield pool.block[0]


def test_blocks_come_from_where_they_lie(address: str, tmp_path: Path) -> None:
    with engine(tmp_path, address) as writer, engine(tmp_path, address) as reader:
        saved = writer.save()
        first = reader.load()
        assert first.tiers == ("pool",) * NUM_BLOCKS
        assert is_right(reader, saved, first)
        assert reader.device.num_by_arena == NUM_BLOCKS, "memory that is not mapped yet is not waited for"
        reader.get_ready()
        assert not reader.cache.hierarchy.holds(KEYS[0]), "it took no slot of host memory"
        before = {
            name: reader.count(name, **labels)
            for name, labels in (
                ("kvtier_tier_bytes_total", {"tier": "pool", "op": "read"}),
                ("kvtier_tier_blocks_total", {"tier": "pool", "op": "read", "status": "hit"}),
            )
        }
        again = reader.load()
        assert again.tiers == ("pool",) * NUM_BLOCKS
        assert is_right(reader, saved, again)
        assert (reader.device.num_leased, reader.device.num_by_arena) == (NUM_BLOCKS, 0)
        gained = reader.count("kvtier_tier_bytes_total", tier="pool", op="read") - before["kvtier_tier_bytes_total"]
        assert gained == NUM_BLOCKS * BLOCK_BYTES
        hits = reader.count("kvtier_tier_blocks_total", tier="pool", op="read", status="hit")
        assert hits - before["kvtier_tier_blocks_total"] == NUM_BLOCKS
        assert reader.count("kvtier_tier_blocks_total", tier="pool", op="lease", status="hit") > 0
        assert reader.count("kvtier_tier_batch_seconds_count", tier="pool", op="lease") > 0


def test_a_device_that_verifies_finds_a_block_that_arrived_wrong(
    address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tier process looks at none of what is lent; the block that differs comes once more, by way of the arena."""
    with engine(tmp_path, address, verifies=True) as only:
        saved = only.save()
        only.get_ready()
        only.device.num_verified = 0
        only.device.spoils = 3
        loaded = only.load_from_pool()
        assert is_right(only, saved, loaded)
        assert not loaded.failed
        assert (only.device.num_verified, only.device.num_by_arena) == (NUM_BLOCKS, 1)
    assert "1 have arrived with other bytes than their writer's" in caplog.text


def test_a_device_that_could_verify_is_not_asked_where_the_host_does(address: str, tmp_path: Path) -> None:
    with engine(tmp_path, address, verifies=True, verify_loads="host") as only:
        saved = only.save()
        only.get_ready()
        assert is_right(only, saved, only.load_from_pool())
        assert only.device.num_verified == 0


@pytest.mark.parametrize("pool", [{"direct_loads": False}, {"shared_memory": False}])
def test_it_can_be_switched_off(pool: dict[str, bool], address: str, tmp_path: Path) -> None:
    with engine(tmp_path, address, **pool) as only:
        saved = only.save()
        for _ in range(3):
            assert is_right(only, saved, only.load_from_pool())
            assert only.device.num_by_arena == NUM_BLOCKS
        assert only.device.attached == []


def test_a_device_that_cannot_copy_from_there(address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine(tmp_path, address) as only:
        saved = only.save()
        only.device.can_attach = False
        for _ in range(2):
            only.load_from_pool()
        until(lambda: "cannot copy from its memory" in caplog.text)
        for _ in range(3):
            loaded = only.load_from_pool()
            assert not loaded.failed
            assert is_right(only, saved, loaded)
        assert only.device.num_leased == 0
    assert caplog.text.count("cannot copy from its memory") == 1


@pytest.fixture
def two_slabs(address: str, tmp_path: Path) -> Iterator[list[tuple[BlockKey, int]]]:
    """Half of the blocks in the slab of one writer, half in that of another; each by the place where they were."""
    with engine(tmp_path, address) as first, engine(tmp_path, address) as second:
        strange = chain(NUM_BLOCKS, seed=9)
        for writer, keys in ((first, KEYS), (second, strange)):
            job_id = writer.cache.hierarchy.start_save(list(zip(keys, range(NUM_BLOCKS), strict=True)))
            assert not result(writer.cache.hierarchy, job_id).failed
        until(lambda: all(writer.num_stored() >= NUM_BLOCKS for writer in (first, second)))
        yield [(key, i) for i, key in enumerate([*KEYS[: NUM_BLOCKS // 2], *strange[NUM_BLOCKS // 2 :]])]


def test_a_device_that_refuses_is_not_asked_again(
    two_slabs: list[tuple[BlockKey, int]], address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(tmp_path, address) as only:
        only.device.can_attach = False
        until(lambda: bool(only.load_blocks(two_slabs)) and "cannot copy from its memory" in caplog.text)
    assert caplog.text.count("cannot copy from its memory") == 1


def test_what_is_lent_while_the_device_refuses_more_is_given_back(
    two_slabs: list[tuple[BlockKey, int]], address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(tmp_path, address) as only:
        only.get_ready()
        job_id = only.load_into_gate()
        only.device.can_attach = False
        others = two_slabs[NUM_BLOCKS // 2 :]
        until(lambda: bool(only.load_blocks(others)) and "cannot copy from its memory" in caplog.text)
        assert only.device.attached, "it is being copied from"
        only.device.gate.set()
        assert not only.finish(job_id).failed
        until(lambda: not only.device.attached)


def test_memory_is_lent_while_more_is_made_ready(
    two_slabs: list[tuple[BlockKey, int]], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(borrowing, "_TICK_S", 0.0)
    with engine(tmp_path, address) as only:
        may_attach, attach = threading.Event(), only.device.attach

        def one_and_wait(memory: SlotMemory) -> bool:
            assert not only.device.attached or may_attach.wait(WAIT_S)
            return attach(memory)

        def num_leased() -> int:
            before = only.device.num_leased
            assert not only.load_blocks(two_slabs).failed
            return only.device.num_leased - before

        monkeypatch.setattr(only.device, "attach", one_and_wait)
        until(lambda: num_leased() == NUM_BLOCKS // 2)
        may_attach.set()
        until(lambda: num_leased() == NUM_BLOCKS)


def test_a_device_that_fails_in_the_middle_of_getting_ready(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(tmp_path, address) as only:
        saved, attach = only.save(), only.device.attach

        def fail(memory: SlotMemory) -> bool:
            attach(memory)
            raise RuntimeError("CUDA error: out of memory")

        monkeypatch.setattr(only.device, "attach", fail)
        until(lambda: bool(only.load_from_pool()) and "lends nothing any more" in caplog.text)
        assert is_right(only, saved, only.load_from_pool())
        assert only.device.attached == []


def test_what_the_pool_has_not_in_memory_comes_by_the_arena(tmp_path: Path) -> None:
    settings = {"disk_dir": tmp_path / "disk", "disk_bytes": 64 * MIB, "disk_reserve_bytes": 0}
    listen = (f"unix:{tmp_path}/pool.sock",)
    with running_pool(64 * MIB, listen=listen, **settings) as pool, engine(tmp_path, pool.block[0]) as writer:
        saved = writer.save()
    with running_pool(64 * MIB, listen=listen, **settings) as pool, engine(tmp_path, pool.block[0]) as reader:
        loaded = reader.load()
        assert loaded.tiers == ("pool",) * NUM_BLOCKS
        assert is_right(reader, saved, loaded)
        reader.get_ready()


def test_a_block_that_is_missing_fails_alone(address: str, tmp_path: Path) -> None:
    with engine(tmp_path, address) as only:
        saved = only.save()
        only.get_ready()
        only.device.rows[:] = 0
        only.cache.hierarchy.reset()
        strange = chain(1, seed=9)
        blocks = [*((key, NUM_BLOCKS - 1 - i) for i, key in enumerate(KEYS[:-1])), (strange[0], 0)]
        loaded = only.finish(only.cache.hierarchy.start_load(blocks))
        assert loaded.failed == {NUM_BLOCKS - 1}
        assert is_right(only, saved, loaded)


def test_a_cancelled_load_keeps_its_slots_until_the_copy_is_over(address: str, tmp_path: Path) -> None:
    with engine(tmp_path, address) as only:
        only.save()
        only.get_ready()
        job_id = only.load_into_gate()
        only.cache.hierarchy.cancel(job_id)
        assert only.cache.hierarchy.poll() == [], "its device slots are being written"
        only.device.gate.set()
        loaded = only.finish(job_id)
        assert loaded.failed in (frozenset(), frozenset(range(NUM_BLOCKS)))
        only.cache.hierarchy.check()


def test_a_cancelled_load_does_not_come_by_the_arena_instead(tmp_path: Path) -> None:
    """Although what was lent has come to nothing."""
    limits = PoolLimits(lease_s=0.2)
    listen = (f"unix:{tmp_path}/pool.sock",)
    with running_pool(64 * MIB, listen=listen, limits=limits) as pool, engine(tmp_path, pool.block[0]) as only:
        only.save()
        only.get_ready()
        job_id = only.load_into_gate()
        only.cache.hierarchy.cancel(job_id)
        until(lambda: held_bytes(pool) == 0)
        only.device.gate.set()
        assert len(only.finish(job_id).failed) == NUM_BLOCKS
        assert only.device.num_by_arena == 0


def test_memory_that_the_pool_drops_is_not_kept(address: str, tmp_path: Path) -> None:
    """A slab that is empty, and whose writer has gone. The reader asks for nothing meanwhile."""
    with engine(tmp_path, address) as reader:
        with engine(tmp_path, address) as writer:
            writer.save()
            reader.get_ready()
            assert reader.device.attached
        with contextlib.closing(connect(address)) as tier:
            assert tier.discard(rank_keys(KEYS, TINY_NAMESPACE.id)) == NUM_BLOCKS
        until(lambda: not reader.device.attached)


def test_no_more_is_mapped_than_may_be(
    two_slabs: list[tuple[BlockKey, int]], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What finds no room comes by way of the arena, until other slabs have not been used for long."""
    halves = two_slabs[: NUM_BLOCKS // 2], two_slabs[NUM_BLOCKS // 2 :]
    with engine(tmp_path, address, pinned_bytes=3 * MIB) as only:

        def num_leased(blocks: list[tuple[BlockKey, int]]) -> int:
            before = only.device.num_leased
            assert not only.load_blocks(blocks).failed
            return only.device.num_leased - before

        until(lambda: num_leased(halves[0]) == NUM_BLOCKS // 2)
        refused = refusals(monkeypatch)
        until(lambda: num_leased(halves[1]) == 0 and bool(refused))
        assert num_leased(two_slabs) == NUM_BLOCKS // 2, "of the slab that is mapped"
        (memory,) = only.device.attached
        assert 2 * memory.num_slots * memory.slot_bytes > 3 * MIB, "there would be room for two"
        assert only.count("kvtier_memory_bytes", kind="leased") == memory.num_slots * memory.slot_bytes
        until(lambda: not refused[0]._wanted)
        assert len(refused) == 1, "it is not tried again and again"
        monkeypatch.setattr(borrowing, "_IDLE_S", 0.0)
        refused[0]._full_until_s = 0.0
        until(lambda: num_leased(halves[1]) == NUM_BLOCKS // 2)
        assert len(only.device.attached) == 1
        assert memory not in only.device.attached


def refusals(monkeypatch: pytest.MonkeyPatch) -> list[borrowing.DirectReads]:
    """Collects the readers that have no room for a slab, from now on."""
    refused: list[borrowing.DirectReads] = []
    make_room = borrowing.DirectReads._make_room

    def noting(direct_reads: borrowing.DirectReads, nbytes: int) -> bool:
        has_room = make_room(direct_reads, nbytes)
        if not has_room:
            refused.append(direct_reads)
        return has_room

    monkeypatch.setattr(borrowing.DirectReads, "_make_room", noting)
    return refused
