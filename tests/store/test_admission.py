"""Blocks that a tier's admission keeps out: what stays in memory, what is offered again, and what is counted."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.identity.keys import StoreKey
from kvtier.store.store import Store
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.write_policy import WritePolicy
from pool_rig import BLOCK_BYTES, BLUE, MIB, RED, WAIT_S, CoreRig, core_rig, keys, payloads, until
from remote_tier import RemoteTier, remote_tier

shared = pytest.fixture(remote_tier)


def on_disk(core: Store, wanted: Sequence[StoreKey]) -> list[bool]:
    return [status is Status.HIT for status in core._below.tiers[0].lookup(wanted)]


def written(rig: CoreRig, result: str, tier: str = "disk") -> float:
    return rig.count("kvtier_pool_written_down_blocks_total", tier=tier, result=result)


def declined(rig: CoreRig, condition: str, tier: str = "disk") -> float:
    return rig.count("kvtier_tier_declined_blocks_total", tier=tier, condition=condition)


@pytest.mark.parametrize("policy", WritePolicy)
def test_the_second_use_lands_on_disk(tmp_path: Path, policy: WritePolicy) -> None:
    """Under `write_through_selective` the second use is the first that is offered."""
    selective = policy is WritePolicy.WRITE_THROUGH_SELECTIVE
    with core_rig(tmp_path, policy=policy, admission="second-use") as rig:
        for label in range(4):
            assert rig.store(label) is WriteStatus.STORED
        assert declined(rig, "second-use") == written(rig, "declined") == (0 if selective else 4)
        used = keys([0, 1])
        for _ in range(2 if selective else 1):
            assert rig.load(used) == payloads([0, 1]), "what is kept out is in memory"
        (report,) = rig.core.drain(WAIT_S)
        assert on_disk(rig.core, keys(range(4))) == [True, True, False, False]
        assert report.num_written <= 2, "what was written before the drain is none of its"
        assert (report.num_abandoned, report.num_memory_only) == (0, 0)
        assert declined(rig, "second-use") == (2 if selective else 4)
        assert written(rig, "stored") == 2


def test_a_read_through_shared_memory_is_a_use(tmp_path: Path) -> None:
    with core_rig(tmp_path, admission="second-use", shared=True) as rig:
        rig.store("a")
        rig.core.release_places(rig.core.acquire_places(keys(["a"]), [BLOCK_BYTES]))
        until(lambda: on_disk(rig.core, keys(["a"])) == [True])


def test_a_request_is_one_use_however_often_it_names_a_block(tmp_path: Path) -> None:
    with core_rig(tmp_path, admission="frequency:4", shared=True) as rig:
        rig.store("a")
        for num_declined in (2, 3, 3):
            rig.core.release_places(rig.core.acquire_places(keys(["a", "a"]), [BLOCK_BYTES] * 2))
            assert declined(rig, "frequency") == num_declined
        until(lambda: on_disk(rig.core, keys(["a"])) == [True])


def test_what_memory_gives_up_is_no_loss_and_its_next_write_is_its_second_use(tmp_path: Path) -> None:
    with core_rig(tmp_path, admission="second-use", memory_bytes=MIB) as rig:
        for label in range(100):
            assert rig.store(label) is WriteStatus.STORED
        assert rig.core.lookup(keys([0])) == [Status.MISS]
        assert rig.count("kvtier_pool_evicted_unwritten_total", tier="disk") == 0
        assert not on_disk(rig.core, keys(range(100))).count(True)
        waiting = rig.core._below._ways[0]._waiting
        with waiting.changed:
            assert len(waiting._declined) <= MIB // BLOCK_BYTES, "bounded by what memory holds"
        rig.store(0)
        until(lambda: on_disk(rig.core, keys([0])) == [True])


@pytest.mark.parametrize(("admission", "evicts"), [(None, True), ("second-use", False)])
def test_what_is_acknowledged_stays_for_its_time_where_the_disk_may_not_have_it(
    tmp_path: Path, admission: str | None, evicts: bool
) -> None:
    """A disk that takes all of it has what memory evicts, so that nothing has to stay in memory for a time."""
    with core_rig(tmp_path, admission=admission, memory_bytes=MIB, min_residency_s=3600.0) as rig:
        statuses = []
        for label in range(40):
            statuses.append(rig.store(label))
            until(lambda: not rig.core._below._ways[0]._waiting.pinned_bytes)
        assert (WriteStatus.FULL not in statuses) == evicts


def test_a_budget_of_bytes_stops_writes_and_not_reads(tmp_path: Path) -> None:
    num_blocks = 5
    per_day = 24 * num_blocks * BLOCK_BYTES
    with core_rig(tmp_path, admission=f"bytes-per-day:{per_day}") as rig:
        for label in range(20):
            assert rig.store(label) is WriteStatus.STORED
        rig.core.drain(WAIT_S)
        assert on_disk(rig.core, keys(range(20))).count(True) == num_blocks
        assert declined(rig, "bytes-per-day") == 20 - num_blocks
        assert rig.load(keys(range(20))) == payloads(range(20))


def test_what_is_on_disk_is_not_offered(tmp_path: Path) -> None:
    with core_rig(tmp_path) as rig:
        rig.store("a")
        rig.core.drain(WAIT_S)
    with core_rig(tmp_path, admission="second-use") as rig:
        assert rig.store("a") is WriteStatus.STORED
        until(lambda: written(rig, "exists") == 1)
        assert declined(rig, "second-use") == 0


def test_a_tenant_has_its_share_of_the_disk_also_after_a_restart(tmp_path: Path) -> None:
    """The share is a quarter of 64 MiB, by what the disk itself counts."""
    big = 2 * MIB
    for first in (0, 100):
        with core_rig(tmp_path, admission="tenant-share:0.25", memory_bytes=48 * MIB, queue_bytes=48 * MIB) as rig:
            for label in range(first, first + 10):
                rig.store(label, nbytes=big)
                until(lambda: not rig.core._below._ways[0]._waiting.pinned_bytes)  # not counted yet
            rig.core.drain(WAIT_S)
            assert 6 <= on_disk(rig.core, keys([*range(10), *range(100, 110)])).count(True) <= 8
            assert rig.store("other", tenant=BLUE) in (WriteStatus.STORED, WriteStatus.EXISTS)
    assert declined(rig, "tenant-share") == 10


def test_a_redis_has_an_admission_of_its_own(shared: RemoteTier) -> None:
    with core_rig(remote=shared, admission="frequency:3") as rig:
        rig.store("a")
        rig.load(keys(["a"]))
        assert declined(rig, "frequency", tier="redis") == 2
        rig.load(keys(["a"]))
        until(lambda: shared.lookup(keys(["a"])) == [Status.HIT])


def test_blocks_of_one_request_are_a_run_though_they_come_in_pieces(tmp_path: Path) -> None:
    with core_rig(tmp_path, admission="min-run:4") as rig:
        for label in "abc":
            rig.store(label)
        assert declined(rig, "min-run") == 3
        for start in (0, 2):
            with rig.core.read(keys("abc")[start : start + 2], BLOCK_BYTES, run_blocks=4):
                pass
        until(lambda: on_disk(rig.core, keys("abc")) == [True] * 3)


def test_discards_and_writes_at_once_leave_nothing_behind(tmp_path: Path) -> None:
    with core_rig(tmp_path, admission="second-use") as rig, ThreadPoolExecutor(2) as executor:
        for label in range(200):
            busy = [executor.submit(rig.store, label), executor.submit(rig.load, keys([label]))]
            rig.core.discard(keys([label]))
            for each in busy:
                each.result(WAIT_S)
            rig.core.discard(keys([label]))
        rig.core.drain(WAIT_S)
        assert rig.core.lookup(keys(range(200))) == [Status.MISS] * 200
        waiting = rig.core._below._ways[0]._waiting
        with waiting.changed:
            assert not waiting._declined
        assert rig.core.usage(RED)[1].num_blocks == 0
