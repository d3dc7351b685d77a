"""When blocks go down: from the device to host memory, and from there to the tiers below."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from hierarchy_rig import (
    NAMESPACE,
    PATIENCE_S,
    TENANT,
    Held,
    Rig,
    blocks,
    chain,
    full,
    in_tier,
    memory_tier,
    pool_tier,
    until,
)
from kvtier.device.block_pool import BlockPool
from kvtier.device.kv import HostMemoryKV
from kvtier.memory.buffers import ReadableBuffer
from kvtier.offload import Cleaner, DirectorySettings, InventoryLog
from kvtier.tiers.base import Item, WriteStatus
from kvtier.tiers.common.write_policy import WritePolicy
from kvtier.tiers.host.tier import HostTier
from wrapped_tier import WrappedTier

SELECTIVE, WRITE_BACK = WritePolicy.WRITE_THROUGH_SELECTIVE, WritePolicy.WRITE_BACK


pool = pytest.fixture(pool_tier)


def selective(pool: HostTier, **settings: object) -> Rig:
    return Rig(pool, settings=DirectorySettings(tier_policies={"pool": SELECTIVE}, **settings))  # type: ignore[arg-type]


def written_back(pool: HostTier | Held, num_slots: int = 16) -> Rig:
    return Rig(pool, num_slots=num_slots, settings=DirectorySettings(tier_policies={"pool": WRITE_BACK}))


def held_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies from the device wait for what is returned."""
    may_copy, gather = threading.Event(), HostMemoryKV.gather

    def hold(device: HostMemoryKV, *args: Any, **options: Any) -> None:
        assert may_copy.wait(PATIENCE_S)
        gather(device, *args, **options)

    monkeypatch.setattr(HostMemoryKV, "gather", hold)
    return may_copy


class Refusing(WrappedTier):
    """Full until it is told otherwise."""

    refuses = True

    def write(self, items: Sequence[Item[ReadableBuffer]]) -> list[WriteStatus]:
        return [WriteStatus.FULL] * len(items) if self.refuses else super().write(items)


class TestTowardsTiersBelow:
    def test_write_through_is_the_default(self, pool: HostTier) -> None:
        rig, hashes = Rig(pool), chain(4)
        full(rig, hashes)
        assert in_tier(pool, hashes) == [True] * 4
        rig.close()

    def test_selective_waits_for_the_second_use(self, pool: HostTier) -> None:
        rig, hashes = selective(pool), chain(4)
        full(rig, hashes)
        assert in_tier(pool, hashes) == [False] * 4
        assert rig.load(hashes[:2], [10, 11]).tiers == ("host", "host")
        rig.settle()
        assert in_tier(pool, hashes) == [True, True, False, False]
        rig.close()
        assert in_tier(pool, hashes) == [True, True, False, False]

    def test_a_hit_on_the_device_is_a_use(self, pool: HostTier) -> None:
        rig, hashes = selective(pool), chain(4)
        full(rig, hashes)
        assert rig.hierarchy.note_hits(blocks(hashes[:1])) is None
        rig.settle()
        assert in_tier(pool, hashes) == [True, False, False, False]
        rig.close()

    def test_a_block_computed_twice_was_used_twice(self, pool: HostTier) -> None:
        """Evicted from everywhere between the two."""
        rig = Rig(pool, num_slots=4, settings=DirectorySettings(tier_policies={"pool": SELECTIVE}, saving_fraction=1.0))
        hashes, others = chain(4), chain(4, seed=1)
        full(rig, hashes)
        full(rig, others)
        assert rig.tiers_of(hashes) == ["MISS"] * 4
        full(rig, hashes)
        assert in_tier(pool, hashes) == [True] * 4
        rig.close()

    def test_a_hit_while_the_block_is_being_copied_counts(self, pool: HostTier) -> None:
        rig, hashes = selective(pool), chain(4)
        rig.hierarchy.save_full(blocks(hashes))
        rig.hierarchy.note_hits(blocks(hashes))
        rig.settle()
        until(lambda: rig.hierarchy.poll() or all(in_tier(pool, hashes)) or None)
        rig.settle()
        rig.close()

    def test_write_back_waits_for_eviction(self, pool: HostTier) -> None:
        """16 slots, of which the coldest 4 are kept written."""
        rig, hashes = written_back(pool), chain(14)
        full(rig, hashes[:6])
        full(rig, hashes[6:12])
        assert in_tier(pool, hashes[:12]) == [False] * 12
        full(rig, hashes[12:])
        # 14 of 16 are in use: the next 4 blocks would evict two, and a save's tail is colder than its head.
        assert sum(in_tier(pool, hashes)) == 2
        assert in_tier(pool, hashes[4:6]) == [True, True]
        rig.close()
        assert in_tier(pool, hashes) == [True] * 14, "a stop writes what is owed"

    @pytest.mark.parametrize("policy", [WritePolicy.WRITE_BACK, WritePolicy.WRITE_THROUGH])
    def test_what_a_tier_refused_is_counted_when_it_is_lost(self, pool: HostTier, policy: WritePolicy) -> None:
        refusing = Refusing(pool)
        rig = Rig(refusing, num_slots=16, settings=DirectorySettings(tier_policies={"pool": policy}))
        hashes = chain(32)
        for start in range(0, 16, 2):
            full(rig, hashes[start : start + 2], start)
        refusing.refuses = False
        for start in range(16, 32, 2):
            full(rig, hashes[start : start + 2], start)
        lost = rig.counter("evicted_unwritten", tier="pool")
        assert rig.tiers_of(hashes).count("MISS") == lost > 0
        rig.close()

    def test_written_back_blocks_come_back_byte_for_byte(self, pool: HostTier) -> None:
        rig, hashes = written_back(pool), chain(32)
        original = rig.device.copy()
        for start in range(0, 32, 2):
            full(rig, hashes[start : start + 2], start)
        rig.device[:] = 0
        found = rig.tiers_of(hashes)
        assert set(found) == {"host", "pool"}
        assert rig.counter("evicted_unwritten", tier="pool") == 0
        assert not rig.load(hashes, range(32)).failed
        assert np.array_equal(rig.device, original)
        rig.settle()
        rig.close()

    def test_write_back_forgets_rather_than_waits(self) -> None:
        inner = memory_tier("pool")
        held = Held(inner)
        held.gate.clear()
        rig, hashes = written_back(held), chain(32)
        for start in range(0, 32, 2):
            job = rig.hierarchy.save_full(blocks(hashes[start : start + 2], start))
            assert job is not None
            rig.result(job)
        assert rig.counter("evicted_unwritten", tier="pool") > 0
        held.gate.set()
        rig.settle()
        rig.close()
        inner.close()

    def test_what_came_from_the_tier_is_not_owed_to_it(self, pool: HostTier) -> None:
        first, hashes = Rig(pool), chain(4)
        full(first, hashes)
        first.close()
        held = Held(pool)
        rig = written_back(held)
        assert rig.load(hashes, range(4)).tiers == ("pool",) * 4
        held.entered.clear()
        rig.close()
        assert not held.entered.is_set()

    def test_policies_are_each_tiers_own(self, pool: HostTier) -> None:
        inventory = InventoryLog([TENANT], NAMESPACE)
        disk = HostTier(2**22, slab_bytes=2**16, name="disk", on_event=inventory.on_event)
        policies = {"disk": WRITE_BACK, "pool": WritePolicy.WRITE_THROUGH}
        rig = Rig(pool, local=disk, inventory=inventory, settings=DirectorySettings(tier_policies=policies))
        hashes = chain(4)
        full(rig, hashes)
        assert (in_tier(disk, hashes), in_tier(pool, hashes)) == ([False] * 4, [True] * 4)
        rig.close()
        assert in_tier(disk, hashes) == [True] * 4
        disk.close()

    def test_a_block_that_comes_up_is_offered_to_the_other_tiers(self, pool: HostTier) -> None:
        first, hashes = Rig(pool), chain(4)
        full(first, hashes)
        first.close()
        inventory = InventoryLog([TENANT], NAMESPACE)
        disk = HostTier(2**22, slab_bytes=2**16, name="disk", on_event=inventory.on_event)
        rig = Rig(pool, local=disk, inventory=inventory)
        assert rig.load(hashes, range(4)).tiers == ("pool",) * 4
        rig.settle()
        assert in_tier(disk, hashes) == [True] * 4
        rig.close()
        disk.close()

    def test_a_stop_waits_for_saves_that_hold_the_room(self) -> None:
        """All that may be saving is on its way to the pool when the stop comes; the disk gets its share after."""
        inventory = InventoryLog([TENANT], NAMESPACE)
        inner = memory_tier("pool")
        held = Held(inner)
        held.gate.clear()
        disk = HostTier(2**22, slab_bytes=2**16, name="disk", on_event=inventory.on_event)
        rig = Rig(
            held,
            local=disk,
            inventory=inventory,
            num_slots=16,
            settings=DirectorySettings(tier_policies={"disk": WRITE_BACK}),
        )
        hashes = chain(8)
        rig.result(rig.hierarchy.save_full(blocks(hashes)) or 0)
        threading.Timer(0.2, held.gate.set).start()
        rig.close()
        assert in_tier(disk, hashes) == [True] * 8
        disk.close()
        inner.close()

    def test_what_a_stop_has_no_time_for_is_counted(self) -> None:
        inner = memory_tier("pool")
        held = Held(inner)
        rig = Rig(held, num_slots=16, settings=DirectorySettings(tier_policies={"pool": WRITE_BACK}), settle_s=0.05)
        full(rig, chain(8))
        held.gate.clear()
        with ThreadPoolExecutor(1) as other:

            def open_when_counted() -> None:
                until(lambda: rig.counter("evicted_unwritten", tier="pool") > 0 or None)
                held.gate.set()

            opening = other.submit(open_when_counted)
            rig.close()
            opening.result()
        written = inner.usage().num_blocks
        assert rig.counter("evicted_unwritten", tier="pool") == 8 - written > 0
        inner.close()

    @pytest.mark.parametrize("policy", [WRITE_BACK, SELECTIVE])
    def test_a_stop_waits_for_what_is_still_copied_from_the_device(
        self, pool: HostTier, monkeypatch: pytest.MonkeyPatch, policy: WritePolicy
    ) -> None:
        settings = DirectorySettings(tier_policies={"pool": policy}, selective_uses=1)
        rig, hashes = Rig(pool, settings=settings), chain(8)
        may_copy = held_copies(monkeypatch)
        assert rig.hierarchy.save_full(blocks(hashes)) is not None
        threading.Timer(0.2, may_copy.set).start()
        rig.close()
        assert in_tier(pool, hashes) == [True] * 8

    def test_what_a_stop_has_no_time_to_copy_is_counted(self, pool: HostTier, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = DirectorySettings(tier_policies={"pool": WRITE_BACK})
        rig, hashes = Rig(pool, settings=settings, settle_s=0.05), chain(8)
        may_copy = held_copies(monkeypatch)
        assert rig.hierarchy.save_full(blocks(hashes)) is not None
        with ThreadPoolExecutor(1) as other:

            def open_when_counted() -> None:
                try:
                    until(lambda: rig.counter("evicted_unwritten", tier="pool") > 0 or None)
                finally:
                    may_copy.set()

            opening = other.submit(open_when_counted)
            rig.hierarchy.close()
            opening.result()
        assert rig.counter("evicted_unwritten", tier="pool") == 8
        assert in_tier(pool, hashes) == [False] * 8


class TestTowardsHostMemory:
    def test_selective_copies_what_is_hit(self, pool: HostTier) -> None:
        rig, hashes = Rig(pool, settings=DirectorySettings(host_policy=SELECTIVE)), chain(4)
        assert rig.hierarchy.save_full(blocks(hashes)) is None
        assert rig.tiers_of(hashes) == ["MISS"] * 4
        job = rig.hierarchy.note_hits(blocks(hashes)[:2])
        assert job is not None
        assert not rig.directory.is_telling, "the mover has it already"
        assert not rig.result(job).failed
        assert rig.tiers_of(hashes) == ["host", "host", "MISS", "MISS"]
        assert rig.hierarchy.note_hits(blocks(hashes)[:2]) is None, "once"
        rig.settle()
        assert in_tier(pool, hashes) == [True, True, False, False]
        rig.close()

    def test_selective_copies_what_is_computed_again(self, pool: HostTier) -> None:
        rig, hashes = Rig(pool, settings=DirectorySettings(host_policy=SELECTIVE)), chain(2)
        assert rig.hierarchy.save_full(blocks(hashes)) is None
        assert rig.hierarchy.save_full(blocks(hashes)) is not None
        rig.settle()
        rig.close()

    @pytest.mark.parametrize("policy", [SELECTIVE, WRITE_BACK])
    def test_the_cleaner_copies_before_eviction_only_what_is_worth_it(
        self, pool: HostTier, policy: WritePolicy
    ) -> None:
        rig, hashes = Rig(pool, settings=DirectorySettings(host_policy=policy)), chain(8)
        block_pool = BlockPool(8, on_evict=rig.hierarchy.note_eviction)
        cleaner = Cleaner(block_pool, rig.hierarchy, rig.metrics, depth_blocks=8)
        block_ids = block_pool.allocate(8)
        assert block_ids is not None
        for block_id, chain_hash in zip(block_ids, hashes, strict=True):
            block_pool.assign_key(block_id, chain_hash)
        assert rig.hierarchy.save_full(list(zip(hashes, block_ids, strict=True))) is None
        block_pool.free(block_ids)
        cleaner.step()
        for result in until(rig.hierarchy.poll) if policy is WRITE_BACK else []:
            assert cleaner.take(result)
        rig.settle()
        assert rig.tiers_of(hashes) == (["host"] * 8 if policy is WRITE_BACK else ["MISS"] * 8)
        rig.close()
