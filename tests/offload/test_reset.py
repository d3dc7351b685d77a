"""What a reset forgets, and what becomes of what is under way then."""

import numpy as np
import pytest

from hierarchy_rig import NAMESPACE, TENANT, Held, Rig, blocks, chain, full, in_tier, pool_tier, until
from kvtier.offload import DirectorySettings, InventoryLog
from kvtier.tiers.common.write_policy import WritePolicy
from kvtier.tiers.host.tier import HostTier

pool = pytest.fixture(pool_tier)


def test_everything_of_this_engine_is_forgotten_and_the_shared_tier_keeps_its_own(pool: HostTier) -> None:
    inventory = InventoryLog([TENANT], NAMESPACE)
    disk = HostTier(2**22, slab_bytes=2**16, name="disk", on_event=inventory.on_event)
    rig, hashes = Rig(pool, local=disk, inventory=inventory), chain(8)
    full(rig, hashes[:4])
    rig.hierarchy.save_full(blocks(hashes[4:]))  # on the move
    rig.hierarchy.reset()
    rig.settle()
    until(lambda: (not any(in_tier(disk, hashes))) or None)
    assert all(in_tier(pool, hashes))
    assert rig.tiers_of(hashes) == ["pool"] * 8
    assert not rig.load(hashes, range(8)).failed
    full(rig, hashes)
    rig.close()
    disk.check()
    disk.close()


def test_a_tier_that_is_slow_to_forget_is_not_found_meanwhile(pool: HostTier) -> None:
    inventory = InventoryLog([TENANT], NAMESPACE)
    disk = HostTier(2**22, slab_bytes=2**16, name="disk", on_event=inventory.on_event)
    held = Held(disk)
    rig, hashes = Rig(local=held, inventory=inventory), chain(8)
    full(rig, hashes[:6])
    held.gate.clear()
    held.entered.clear()
    rig.hierarchy.save_full(blocks(hashes[6:]))  # keeps the disk's writer busy
    assert held.entered.wait(10)
    rig.hierarchy.reset()
    assert rig.tiers_of(hashes[:6]) == ["MISS"] * 6
    assert rig.load(hashes[:6], range(6)).failed == set(range(6))
    held.gate.set()
    rig.settle()
    assert rig.tiers_of(hashes) == ["MISS"] * 8
    full(rig, hashes)
    assert in_tier(disk, hashes) == [True] * 8
    rig.close()
    disk.close()


def test_loads_under_way_end_well_and_leave_nothing(pool: HostTier) -> None:
    first, hashes = Rig(pool), chain(4)
    full(first, hashes)
    first.close()
    held = Held(pool)
    held.gate.clear()
    rig = Rig(held)
    job = rig.hierarchy.start_load(blocks(hashes))
    assert held.entered.wait(10)
    rig.hierarchy.reset()
    held.gate.set()
    assert not rig.result(job).failed
    assert np.array_equal(rig.device[:4], first.device[:4])
    rig.settle()
    assert rig.tiers_of(hashes) == ["pool"] * 4, "host memory kept nothing"
    rig.close()


def test_blocks_owed_to_a_tier_are_forgotten_too(pool: HostTier) -> None:
    settings = DirectorySettings(tier_policies={"pool": WritePolicy.WRITE_BACK})
    rig, hashes = Rig(pool, num_slots=16, settings=settings), chain(8)
    full(rig, hashes)
    rig.hierarchy.reset()
    rig.close()
    assert in_tier(pool, hashes) == [False] * 8


def test_saving_again_right_after(pool: HostTier) -> None:
    rig, hashes = Rig(pool), chain(8)
    for _ in range(20):
        rig.hierarchy.save_full(blocks(hashes))
        rig.hierarchy.reset()
    rig.settle()
    full(rig, hashes)
    assert rig.tiers_of(hashes) == ["host"] * 8
    rig.close()
