"""The pool over several tiers: who gets a block when, and what is left when one of them is lost."""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from kvtier.cli.stats.facts import facts_of
from kvtier.cli.stats.samples import parse
from kvtier.store.store import Store
from kvtier.testing.contract import make_key
from kvtier.tiers.base import Status, Tier, WriteStatus
from kvtier.tiers.common.write_policy import WritePolicy
from pool_rig import BLOCK_BYTES, BLUE, MIB, WAIT_S, CoreRig, core_rig, keys, payloads, until
from remote_tier import RemoteTier, remote_tier

SELECTIVE, WRITE_BACK = WritePolicy.WRITE_THROUGH_SELECTIVE, WritePolicy.WRITE_BACK


shared = pytest.fixture(remote_tier)


def cold_end_is_written(core: Store) -> bool:
    """What `write_back` keeps written is on disk."""
    waiting = core._below._ways[0]._waiting
    with waiting.changed:
        return not waiting.num_writing and not waiting.owes(core._memory.near_eviction(1 / 16))


def has(tier: Tier, labels: Sequence[object]) -> bool:
    return tier.lookup(keys(labels)) == [Status.HIT] * len(labels)


def test_a_block_goes_to_every_tier_and_comes_back_from_the_nearest(tmp_path: Path, shared: RemoteTier) -> None:
    labels = list(range(10))
    with core_rig(tmp_path, remote=shared) as rig:
        for i in labels:
            assert rig.store(i) is WriteStatus.STORED
        assert [(r.tier, r.num_abandoned, r.num_memory_only) for r in rig.core.drain(WAIT_S)] == [
            ("disk", 0, 0),
            ("redis", 0, 0),
        ]
    with core_rig(tmp_path, remote=shared, shared=True) as rig:
        asked = keys([*labels, *range(90, 95)])
        assert rig.core.lookup(asked).count(Status.HIT) == 10
        places = rig.core.acquire_places(asked[:10], [BLOCK_BYTES] * 10)  # of memory, which has none of them
        rig.core.release_places(places)
        assert rig.load(keys(labels)) == payloads(labels)
        rig.core.discard(asked[:1])
        assert rig.count("kvtier_pool_read_blocks_total", source="disk") == 10
        facts = facts_of(parse(generate_latest(rig.registry).decode(), source="a test"))
    assert facts is not None
    assert (facts.hit_rate.asked, facts.hit_rate.by_tier) == (15, {"disk": 10})
    memory, disk, redis = (facts.tiers[name] for name in ("memory", "disk", "redis"))
    assert [(tier.looked_up, tier.found) for tier in (memory, disk, redis)] == [(15, 0), (15, 10), (5, 0)]
    assert [(tier.read_hits, tier.read_misses) for tier in (memory, disk)] == [(0, 10), (10, 0)]
    assert (memory.bytes_read, disk.bytes_read) == (0, 10 * BLOCK_BYTES)


def test_a_pool_with_an_empty_disk_reads_from_redis_and_keeps_copies(tmp_path: Path, shared: RemoteTier) -> None:
    labels = list(range(10))
    with core_rig(tmp_path / "a", remote=shared) as rig:
        for i in labels:
            rig.store(i)
        rig.core.drain(WAIT_S)
    shutil.rmtree(tmp_path / "a")
    with core_rig(tmp_path / "b", remote=shared) as rig:
        assert rig.core.lookup(keys([*labels, "absent"])) == [Status.HIT] * 10 + [Status.MISS]
        assert rig.load(keys([*labels, "absent"])) == [*payloads(labels), None]
        assert rig.count("kvtier_pool_read_blocks_total", source="redis") == 10
        until(lambda: rig.count("kvtier_pool_written_down_blocks_total", tier="disk", result="stored") == 10)
    with core_rig(tmp_path / "b") as rig:
        assert rig.load(keys(labels)) == payloads(labels), "the disk has them now"


def test_a_redis_that_came_back_empty_is_filled_by_reads(tmp_path: Path, shared: RemoteTier) -> None:
    with core_rig(tmp_path, remote=shared) as rig:
        rig.store("a")
        rig.core.drain(WAIT_S)
    shared.inner.discard(keys(["a"]))
    with core_rig(tmp_path, remote=shared) as rig:
        assert rig.load(keys(["a"])) == payloads(["a"])
        until(lambda: has(shared, ["a"]))


def failed(rig: CoreRig) -> float:
    return rig.count("kvtier_pool_written_down_blocks_total", tier="redis", result="failed")


def test_a_redis_that_fails_takes_nothing_away(tmp_path: Path, shared: RemoteTier) -> None:
    shared.fails = True
    with core_rig(tmp_path, remote=shared) as rig:
        for i in range(10):
            assert rig.store(i) is WriteStatus.STORED
        until(lambda: failed(rig) >= 10)
        disk, redis = rig.core.drain(WAIT_S)
        assert (disk.num_memory_only, redis.num_memory_only) == (0, 10)
        assert failed(rig) <= 20, "a drain may try once more what had failed before"
        assert rig.load(keys(range(10))) == payloads(range(10))


def test_discard_reaches_every_tier(tmp_path: Path, shared: RemoteTier) -> None:
    with core_rig(tmp_path, remote=shared) as rig:
        rig.store("a")
        rig.store("a", tenant=BLUE)
        until(lambda: has(shared, ["a"]))
        assert rig.core.discard(keys(["a", "absent"])) == 1
        assert rig.core.lookup(keys(["a"])) == [Status.MISS]
        assert shared.lookup(keys(["a"])) == [Status.MISS]
        assert rig.core.lookup([make_key("a", tenant=BLUE)]) == [Status.HIT]


def test_a_block_that_is_discarded_while_it_is_written_again_and_again_never_comes_back(
    tmp_path: Path, shared: RemoteTier
) -> None:
    with core_rig(tmp_path, remote=shared) as rig, ThreadPoolExecutor(1) as executor:
        for i in range(300):
            writing = executor.submit(rig.store, i)
            while not writing.done():
                rig.core.discard(keys([i]))
            writing.result(WAIT_S)
            rig.core.discard(keys([i]))
        rig.core.drain(WAIT_S)
        assert rig.core.lookup(keys(range(300))) == [Status.MISS] * 300
        assert shared.usage().num_blocks == 0


def test_selective_writes_a_block_at_its_second_use(shared: RemoteTier) -> None:
    with core_rig(remote=shared, policy=SELECTIVE) as rig:
        for i in range(4):
            rig.store(i)
        assert rig.load(keys([1, 3])) == payloads([1, 3])
        until(lambda: has(shared, [1, 3]))
        for _ in range(3):
            rig.load(keys([1, 3]))
        (report,) = rig.core.drain(WAIT_S)
        assert (report.num_abandoned, report.num_memory_only) == (0, 0)
        assert rig.count("kvtier_pool_written_down_blocks_total", tier="redis", result="stored") == 2
        assert shared.lookup(keys(range(4))) == [Status.MISS, Status.HIT, Status.MISS, Status.HIT]


def test_write_back_writes_what_is_about_to_be_evicted(shared: RemoteTier) -> None:
    """2 MiB of memory hold 32 blocks at the most; the coldest two are kept written."""
    with core_rig(remote=shared, policy=WRITE_BACK, memory_bytes=2 * MIB) as rig:
        for i in range(8):
            rig.store(i)
        assert shared.usage().num_blocks == 0
        for i in range(8, 100):
            rig.store(i)
            coldest = range(i - 29) if i >= 31 else range(0)
            until(lambda coldest=coldest: cold_end_is_written(rig.core) and has(shared, coldest))  # type: ignore[misc]
        assert rig.load(keys(range(100))) == payloads(range(100))
        assert rig.count("kvtier_pool_evicted_unwritten_total", tier="redis") == 0
        assert shared.usage().num_blocks < 100, "what memory keeps is not written"


def test_write_back_does_not_count_its_own_reading_as_a_use(shared: RemoteTier) -> None:
    """The coldest blocks are written, and the first to go all the same."""
    with core_rig(remote=shared, policy=WRITE_BACK, memory_bytes=2 * MIB) as rig:
        statuses: list[Status] = []
        while Status.MISS not in statuses:
            assert rig.store(len(statuses)) is WriteStatus.STORED
            until(lambda: cold_end_is_written(rig.core))
            statuses = rig.core._memory.lookup(keys(range(len(statuses) + 1)))
        assert has(shared, [0])
        num_gone = statuses.count(Status.MISS)
        assert statuses == [Status.MISS] * num_gone + [Status.HIT] * (len(statuses) - num_gone)


def test_write_back_forgets_rather_than_waits(tmp_path: Path) -> None:
    with core_rig(tmp_path, policy=WRITE_BACK, memory_bytes=MIB) as rig:
        rig.files.may_write.clear()
        assert [rig.store(i) for i in range(100)] == [WriteStatus.STORED] * 100
        lost = rig.count("kvtier_pool_evicted_unwritten_total", tier="disk")
        assert lost > 50
        rig.files.may_write.set()
        there = [block for block in rig.load(keys(range(100))) if block is not None]
        assert len(there) >= 100 - lost
        rig.core.drain(WAIT_S)


def test_write_back_writes_everything_at_a_stop(tmp_path: Path) -> None:
    with core_rig(tmp_path, policy=WRITE_BACK) as rig:
        for i in range(40):
            rig.store(i)
        rig.core.discard(keys([7]))
        (report,) = rig.core.drain(WAIT_S)
        assert (report.num_written, report.num_abandoned, report.num_memory_only) == (39, 0, 0)
    with core_rig(tmp_path) as rig:
        assert rig.load(keys(range(40))) == [*payloads(range(7)), None, *payloads(range(8, 40))]


def test_write_back_keeps_up_with_cold_reads(tmp_path: Path) -> None:
    """Blocks that come up from the disk evict others, which the disk must have by then."""
    with core_rig(tmp_path, policy=WRITE_BACK, memory_bytes=4 * MIB) as rig:
        for i in range(200):
            rig.store(i)
            until(lambda: cold_end_is_written(rig.core))
        rig.core.drain(WAIT_S)
    with core_rig(tmp_path, policy=WRITE_BACK, memory_bytes=4 * MIB) as rig:
        for i in range(1000, 1060):
            rig.store(i)
            until(lambda: cold_end_is_written(rig.core))
        for i in range(200):
            before = rig.count("kvtier_pool_evicted_unwritten_total", tier="disk")
            rig.load(keys([i]))
            until(lambda: cold_end_is_written(rig.core))
            assert rig.count("kvtier_pool_evicted_unwritten_total", tier="disk") == before


def test_selective_writes_again_what_the_tier_has_lost(shared: RemoteTier) -> None:
    with core_rig(remote=shared, policy=SELECTIVE) as rig:
        rig.store("a")
        rig.load(keys(["a"]))
        until(lambda: has(shared, ["a"]))
        rig.core.discard(keys(["a"]))
        rig.store("a")
        until(lambda: has(shared, ["a"]))


def test_a_block_on_its_way_up_is_a_hit(tmp_path: Path) -> None:
    with core_rig(tmp_path) as rig:
        rig.store("a")
        rig.core.drain(WAIT_S)
    with core_rig(tmp_path) as rig, ThreadPoolExecutor(2) as executor:
        rig.files.may_read.clear()
        first = executor.submit(rig.load, keys(["a"]))
        assert rig.files.reading.acquire(timeout=WAIT_S)
        assert rig.core.lookup(keys(["a"])) == [Status.HIT]
        second = executor.submit(rig.load, keys(["a"]))
        rig.files.may_read.set()
        assert first.result(WAIT_S) == second.result(WAIT_S) == payloads(["a"])


def test_tiers_drain_side_by_side(tmp_path: Path, shared: RemoteTier) -> None:
    with core_rig(tmp_path, remote=shared, policy=WRITE_BACK) as rig:
        rig.files.may_write.clear()
        for i in range(40):
            rig.store(i)
        disk, redis = rig.core.drain(3.0)
        assert (disk.num_written, disk.num_abandoned) == (0, 40)
        assert (redis.num_written, redis.num_abandoned) == (40, 0)


def test_a_tier_that_works_again_gets_what_it_missed_at_the_stop(shared: RemoteTier) -> None:
    shared.fails = True
    with core_rig(remote=shared) as rig:
        for i in range(20):
            rig.store(i)
        until(lambda: rig.count("kvtier_pool_written_down_blocks_total", tier="redis", result="failed") >= 20)
        shared.fails = False
        (report,) = rig.core.drain(WAIT_S)
        assert (report.num_written, report.num_memory_only) == (20, 0)


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_readers_writers_and_discards_over_three_tiers(tmp_path: Path, shared: RemoteTier, policy: WritePolicy) -> None:
    """Each worker discards labels of its own for good: none of those comes back from anywhere."""
    with core_rig(tmp_path, remote=shared, policy=policy, memory_bytes=MIB, queue_bytes=MIB // 4) as rig:

        def work(worker: int) -> list[object]:
            gone: list[object] = []
            for i in range(60):
                label: object = (i * 7 + worker * 13) % 40
                rig.store(label)
                assert rig.load(keys([label])) in ([None], payloads([label]))
                own = ("own", worker, i)
                rig.store(own)
                rig.load(keys([own]))
                if i % 3 == 0:
                    rig.core.discard(keys([own]))
                    gone.append(own)
            return gone

        with ThreadPoolExecutor(4) as executor:
            gone = [label for labels in executor.map(work, range(4)) for label in labels]
        assert rig.core.lookup(keys(gone)) == [Status.MISS] * len(gone)
        rig.core.drain(WAIT_S)
        assert rig.core.lookup(keys(gone)) == [Status.MISS] * len(gone)
        for i in range(100, 140):  # nothing is left pinned: memory takes new blocks
            assert rig.store(i) is WriteStatus.STORED
    with core_rig(tmp_path, remote=shared) as rig:
        assert rig.core.lookup(keys(gone)) == [Status.MISS] * len(gone)
