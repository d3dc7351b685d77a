"""The hierarchy in one process, over real tiers; faults are forced with events."""

import numpy as np
import pytest

from hierarchy_rig import BLOCK_BYTES, NAMESPACE, TENANT, Held, Rig, chain, pool_tier, until
from kvtier.device.block_pool import BlockPool
from kvtier.identity.keys import BlockKey, NamespaceId, rank_keys, tenant_id
from kvtier.offload import Cleaner, DirectorySettings, InventoryLog
from kvtier.offload.messages import Cancelled, Copied, Discarded, Loaded, Stored, ToDirectory
from kvtier.tiers.host.tier import HostTier

pool = pytest.fixture(pool_tier)


def filled(pool: HostTier, hashes: list[BlockKey]) -> Rig:
    """An engine that has saved its first blocks to `pool` under these hashes, and ended."""
    rig = Rig(pool)
    rig.save(hashes, range(len(hashes)))
    rig.close()
    return rig


def test_saved_blocks_come_back_byte_for_byte(pool: HostTier) -> None:
    rig, hashes = Rig(pool), chain(8)
    original = rig.device.copy()
    assert rig.tiers_of(hashes) == ["MISS"] * 8
    saved = rig.save(hashes, range(8))
    assert saved is not None
    assert not saved.failed
    assert rig.tiers_of(hashes) == ["host"] * 8
    loaded = rig.load(hashes, range(20, 28))
    assert (loaded.kind, loaded.failed, set(loaded.tiers)) == ("load", frozenset(), {"host"})
    assert np.array_equal(rig.device[20:28], original[:8])
    assert rig.save(hashes, range(8)) is None, "what is there already is not copied again"
    rig.settle()
    rig.close()


def test_a_save_tells_what_was_there_before_from_what_it_has_copied(pool: HostTier) -> None:
    rig, hashes = Rig(pool), chain(8)
    first = rig.save(hashes[:3], range(3))
    assert first is not None
    assert first.found == frozenset()
    second = rig.save(hashes, range(8))
    assert second is not None
    assert (second.found, second.failed) == (frozenset(range(3)), frozenset())
    rig.settle()
    rig.close()


def test_another_engine_pulls_from_the_shared_tier(pool: HostTier) -> None:
    first, hashes = Rig(pool), chain(8)
    first.save(hashes, range(8))
    first.close()
    second = Rig(pool)
    second.device[:] = 0xAA
    assert second.tiers_of(hashes + chain(2, seed=1)) == ["pool"] * 8 + ["MISS"] * 2
    loaded = second.load(hashes, range(10, 18))
    assert loaded.tiers == ("pool",) * 8
    assert np.array_equal(second.device[10:18], first.device[:8])
    assert (second.device[:10] == 0xAA).all()
    assert (second.device[18:] == 0xAA).all()
    assert second.tiers_of(hashes) == ["host"] * 8, "a fetched block stays in host memory"
    second.settle()
    second.close()


def test_another_tenant_or_namespace_meets_nothing(pool: HostTier) -> None:
    hashes = chain(2)
    filled(pool, hashes)
    blue = tenant_id("blue")
    strangers = [
        (Rig(pool, tenant=blue), chain(2, tenant=blue)),
        (Rig(pool), chain(2, tenant=blue)),
        (Rig(pool, namespace=NamespaceId(b"m" * 16)), hashes),
    ]
    for stranger, keys in strangers:
        assert stranger.tiers_of(keys) == ["MISS"] * 2
        assert stranger.load(keys, range(2)).failed == {0, 1}, "not even when it asks without looking"
        stranger.close()
    friend = Rig(pool)
    assert friend.tiers_of(hashes) == ["pool"] * 2
    friend.close()


def test_a_block_that_cannot_be_read_fails_alone(pool: HostTier) -> None:
    hashes = chain(6)
    writer = filled(pool, hashes)
    held = Held(pool)
    held.broken = {hashes[3]}
    rig = Rig(held)
    loaded = rig.load(hashes, range(6, 12))
    assert loaded.failed == {3}
    assert loaded.tiers == ("pool",) * 3 + ("",) + ("pool",) * 2
    assert rig.counter("degraded_fetches") == 1
    assert rig.counter("failed_blocks") == 1
    for i in {0, 1, 2, 4, 5}:
        assert np.array_equal(rig.device[6 + i], writer.device[i])
    rig.settle()
    rig.close()


def test_a_load_of_unknown_blocks_fails_at_once() -> None:
    rig = Rig()
    assert rig.load(chain(3), range(3)).failed == {0, 1, 2}
    rig.close()


def test_an_answer_that_nobody_asked_for_is_logged_and_ends_nothing(
    pool: HostTier, caplog: pytest.LogCaptureFixture
) -> None:
    rig, hashes = Rig(pool), chain(2)
    answers: list[ToDirectory] = [Loaded(77, b"\1", 0.1), Cancelled(77), Copied(77, b"\1"), Stored(77), Discarded(77)]
    rig.directory.deliver(0, answers)
    assert caplog.text.count("which nobody asked for") == len(answers)
    rig.save(hashes, range(2))
    assert rig.tiers_of(hashes) == ["host"] * 2
    rig.settle()
    rig.close()


def test_single_flight(pool: HostTier) -> None:
    hashes = chain(4)
    writer = filled(pool, hashes)
    held = Held(pool)
    rig = Rig(held)
    held.gate.clear()
    first = rig.hierarchy.start_load(list(zip(hashes, range(4), strict=True)))
    assert held.entered.wait(10)
    assert rig.tiers_of(hashes) == ["PENDING"] * 4
    second = rig.hierarchy.start_load(list(zip(hashes, range(8, 12), strict=True)))
    assert not rig.hierarchy.poll()
    held.gate.set()
    assert rig.result(first).tiers == ("pool",) * 4
    assert rig.result(second).tiers == ("host",) * 4, "the second load waits for the first and copies from the arena"
    assert np.array_equal(rig.device[8:12], writer.device[:4])
    rig.close()


def test_a_cancelled_load_keeps_off_the_device(pool: HostTier) -> None:
    hashes = chain(4)
    filled(pool, hashes)
    held = Held(pool)
    rig = Rig(held)
    rig.device[:] = 0xAA
    held.gate.clear()
    job_id = rig.hierarchy.start_load(list(zip(hashes, range(4), strict=True)))
    assert held.entered.wait(10)
    rig.hierarchy.cancel(job_id)
    assert rig.result(job_id).failed == {0, 1, 2, 3}, "the result does not wait for the tier"
    assert rig.tiers_of(hashes) == ["PENDING"] * 4
    held.gate.set()
    rig.settle()
    assert (rig.device == 0xAA).all()
    assert rig.tiers_of(hashes) == ["host"] * 4, "what the tier delivered after all is in the arena"
    rig.close()


def test_a_late_load_ends_at_its_deadline(pool: HostTier) -> None:
    hashes = chain(2)
    filled(pool, hashes)
    now = [0.0]
    held = Held(pool)
    rig = Rig(held, clock=lambda: now[0])
    held.gate.clear()
    job_id = rig.hierarchy.start_load(list(zip(hashes, range(2), strict=True)))
    assert held.entered.wait(10)
    assert rig.hierarchy.poll() == []
    now[0] = 11.0
    assert rig.result(job_id).failed == {0, 1}
    assert rig.counter("deadlines_missed", verb="load") == 1
    held.gate.set()
    rig.close()


def test_a_hung_lookup_is_a_miss_at_its_deadline(pool: HostTier) -> None:
    now = [0.0]
    held = Held(pool)
    rig = Rig(held, clock=lambda: now[0], settings=DirectorySettings(max_lookups=1), lookup_deadline_s=1.0)
    held.lookup_gate.clear()
    ticket = rig.hierarchy.start_lookup(chain(2))
    assert rig.hierarchy.poll_lookup(ticket) is None
    assert rig.tiers_of(chain(2)) == ["MISS"] * 2, "beyond max_lookups the shared tier is not asked"
    assert rig.counter("lookups_skipped") == 1
    now[0] = 2.0
    assert [s.status.name for s in rig.hierarchy.poll_lookup(ticket) or []] == ["MISS"] * 2
    assert rig.counter("deadlines_missed", verb="lookup") == 1
    held.lookup_gate.set()
    rig.close()


def test_a_slow_tier_drops_saves_and_nothing_waits(pool: HostTier) -> None:
    held = Held(pool)
    held.gate.clear()
    rig = Rig(held, num_slots=8)
    first = rig.save(chain(6), range(6))
    assert first is not None
    assert first.failed == {4, 5}, "half of the arena may be waiting for the pool"
    assert rig.counter("saves_dropped") == 2
    assert rig.save(chain(4, seed=1), range(4)) is None
    assert rig.counter("saves_dropped") == 6
    assert rig.load(chain(6)[:4], range(8, 12)).failed == frozenset(), "loads go on"
    held.gate.set()
    rig.settle()
    again = rig.save(chain(4, seed=1), range(4))
    assert again is not None
    assert not again.failed
    rig.close()


def test_a_load_larger_than_the_arena(pool: HostTier) -> None:
    hashes = chain(24)
    writer = Rig(pool)
    writer.save(hashes[:16], range(16))
    writer.settle()
    writer.save(hashes[16:], range(16, 24))
    writer.close()
    rig = Rig(pool, num_slots=4, settings=DirectorySettings(batch_blocks=2))
    rig.device[:] = 0
    assert rig.load(hashes, range(24)).failed == frozenset()
    assert np.array_equal(rig.device[:24], writer.device[:24])
    rig.settle()
    rig.close()


def test_a_tier_of_ones_own_is_mirrored(pool: HostTier) -> None:
    hashes = chain(6)
    inventory = InventoryLog([TENANT], NAMESPACE)
    disk = HostTier(2**20, slab_bytes=2**16, name="disk", on_event=inventory.on_event)
    rig = Rig(local=disk, inventory=inventory, num_slots=4, settings=DirectorySettings(saving_fraction=1.0))
    rig.save(hashes[:3], range(3))
    rig.settle()
    rig.save(hashes[3:], range(3, 6))
    rig.settle()
    assert rig.tiers_of(hashes) == ["host", "disk", "disk", "host", "host", "host"], "tails first"
    disk.discard(rank_keys(hashes[2:3], NAMESPACE))
    until(lambda: rig.tiers_of(hashes)[2] == "MISS" or None)
    assert rig.load(hashes[:2], range(10, 12)).tiers == ("host", "disk")
    assert np.array_equal(rig.device[10:12], rig.device[:2])
    rig.close()
    disk.close()


def test_the_cleaner_copies_the_cold_end_ahead(pool: HostTier) -> None:
    rig = Rig(pool, num_blocks=8)
    blocks = BlockPool(8, on_evict=rig.hierarchy.note_eviction)
    cleaner = Cleaner(blocks, rig.hierarchy, rig.metrics, depth_blocks=6)
    table, hashes = blocks.allocate(6) or [], chain(6)
    for block_id, chain_hash in zip(table, hashes, strict=True):
        blocks.assign_key(block_id, chain_hash)
    blocks.free(table)
    queue = blocks.free_queue()
    cleaner.step()
    assert cleaner.num_held == 4, "two free blocks without a key lie before them"
    assert blocks.num_free == 4
    until(lambda: [cleaner.take(result) for result in rig.hierarchy.poll()] or None)
    assert blocks.free_queue() == queue, "what was copied is as cold as before"
    assert blocks.match_prefix(hashes) == table
    evicted = blocks.allocate(8) or []
    assert len(evicted) == 8
    assert rig.counter("device_evictions", state="clean") == 4
    assert rig.counter("device_evictions", state="dropped") == 2
    assert rig.tiers_of(hashes[2:]) == ["host"] * 4
    rig.close()


def test_random_work_never_lies(pool: HostTier) -> None:
    """Saves and loads of random blocks through a tiny arena; whatever is reported loaded is what was saved."""
    seed = 20261121
    print("seed", seed)
    rng = np.random.default_rng(seed)
    hashes = chain(64)
    truth = {h: rng.integers(0, 256, BLOCK_BYTES, dtype=np.uint8) for h in hashes}
    rig = Rig(pool, num_slots=6, settings=DirectorySettings(batch_blocks=3))
    loaded_blocks = 0
    for _ in range(150):
        picked = [hashes[i] for i in rng.choice(64, size=rng.integers(1, 12), replace=False)]
        if rng.random() < 0.5:
            for slot, chain_hash in enumerate(picked):
                rig.device[slot] = truth[chain_hash]
            rig.save(picked, range(len(picked)))
        else:
            rig.device[16:] = 0xEE
            result = rig.load(picked, range(16, 16 + len(picked)))
            for i, chain_hash in enumerate(picked):
                if i not in result.failed:
                    loaded_blocks += 1
                    assert np.array_equal(rig.device[16 + i], truth[chain_hash])
    assert loaded_blocks > 100
    rig.settle()
    rig.close()
