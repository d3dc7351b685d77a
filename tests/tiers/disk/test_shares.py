"""Shares of tenants on disk: what is guaranteed stays, caps hold, what is lent comes back, weights divide the rest."""

import contextlib
import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from disk_tier_rig import KIB, MIB, reopening
from gated_files import GatedFiles
from kvtier.errors import InvalidInputError
from kvtier.events import EventKind
from kvtier.identity.keys import StoreKey, TenantId, tenant_id
from kvtier.testing.blocks import make_key, make_payload, summed
from kvtier.testing.faults import FaultyFiles
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.shares import Share
from kvtier.tiers.disk.medium.files import OsFiles
from kvtier.tiers.disk.reclaim.space import SpaceManager
from kvtier.tiers.disk.tier import DiskTier
from pool_rig import until

RED, BLUE, GREEN = tenant_id("red"), tenant_id("blue"), tenant_id("green")
CAPACITY = 4 * MIB
NBYTES = 32 * KIB
MANY = 3 * CAPACITY // (2 * NBYTES)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    with reopening(tmp_path / "disk") as open_one:
        yield open_one(CAPACITY, write_amplification=1.0)


def write(tier: DiskTier, tenant: TenantId, labels: range, nbytes: int = NBYTES) -> list[WriteStatus]:
    """One after the other, so that eviction goes on between them."""
    statuses = []
    for label in labels:
        statuses += tier.write([summed(make_key(label, tenant=tenant), make_payload((label, tenant), nbytes))])
    tier.check()
    return statuses


def held(tier: DiskTier, tenant: TenantId) -> int:
    return tier.usage_of(tenant).used_bytes


def test_a_guarantee_outlasts_whatever_others_write(tier: DiskTier) -> None:
    tier.set_shares({BLUE: Share(guaranteed_bytes=2 * MIB)})
    few = range(MIB // NBYTES)
    write(tier, BLUE, few)
    assert set(write(tier, RED, range(MANY))) == set(write(tier, GREEN, range(MANY))) == {WriteStatus.STORED}
    assert tier.lookup([make_key(label, tenant=BLUE) for label in few]) == [Status.HIT] * len(few)


def test_what_is_lent_is_handed_back_when_its_owner_writes(tier: DiskTier) -> None:
    tier.set_shares({BLUE: Share(guaranteed_bytes=2 * MIB)})
    write(tier, RED, range(MANY))
    assert held(tier, RED) > 3 * MIB
    write(tier, BLUE, range(MANY))
    assert held(tier, BLUE) >= 2 * MIB
    before = held(tier, BLUE)
    write(tier, RED, range(MANY, 2 * MANY))
    assert held(tier, BLUE) >= 2 * MIB - 256 * KIB
    assert held(tier, BLUE) <= before


def test_a_cap_holds_though_there_is_room_and_own_blocks_go_first(tier: DiskTier) -> None:
    tier.set_shares({RED: Share(cap_bytes=MIB)})
    write(tier, BLUE, range(8))
    assert set(write(tier, RED, range(MANY))) == {WriteStatus.STORED}
    assert MIB // 2 < held(tier, RED) <= MIB
    assert tier.usage_of(BLUE).num_blocks == 8
    assert tier.lookup([make_key(MANY - 1, tenant=RED), make_key(0, tenant=RED)]) == [Status.HIT, Status.MISS]
    assert write(tier, RED, range(MANY, MANY + 1), nbytes=2 * MIB) == [WriteStatus.FULL]
    assert tier.lookup([make_key(MANY - 1, tenant=RED)]) == [Status.HIT], "a block that is too large evicts nothing"


def test_shares_change_while_the_tier_runs(tier: DiskTier) -> None:
    write(tier, RED, range(MANY))
    assert held(tier, RED) > 3 * MIB
    tier.set_shares({RED: Share(cap_bytes=MIB)})
    write(tier, RED, range(MANY, MANY + 80))
    assert held(tier, RED) <= MIB
    tier.set_shares({RED: Share()})
    write(tier, RED, range(2 * MANY, 3 * MANY))
    assert held(tier, RED) > 3 * MIB


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes when the shares are set."""
    monkeypatch.setattr(SpaceManager, "shrink", lambda *_: False)


@contextlib.contextmanager
def two_tenants(folder: Path) -> Iterator[tuple[DiskTier, list[StoreKey]]]:
    """A tier of which red has most and blue little, and the keys that it removes, as it says so."""
    removed: list[StoreKey] = []
    with reopening(folder) as open_one:
        tier = open_one(
            2 * CAPACITY,
            write_amplification=1.0,
            on_event=lambda event: removed.extend(event.keys if event.kind is EventKind.REMOVED else ()),
        )
        write(tier, BLUE, range(8))
        write(tier, RED, range(MANY))
        yield tier, removed


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("cap_bytes", [MIB, 256 * KIB, 40 * KIB, 4 * KIB])
def test_a_lowered_cap_holds_with_the_next_write_and_costs_others_nothing(tmp_path: Path, cap_bytes: int) -> None:
    with two_tenants(tmp_path / "other") as (tier, removed):
        before, num_blue = held(tier, RED), held(tier, BLUE)
        assert before > 3 * MIB
        tier.set_shares({RED: Share(cap_bytes=cap_bytes)})
        fits = cap_bytes > NBYTES + 8 * KIB
        assert write(tier, RED, range(MANY, MANY + 1)) == [WriteStatus.STORED if fits else WriteStatus.FULL]
        assert held(tier, RED) <= cap_bytes
        assert (tier.usage_of(BLUE).num_blocks, held(tier, BLUE)) == (8, num_blue)
        first = MANY + fits - tier.usage_of(RED).num_blocks
        assert tier.lookup([make_key(n, tenant=RED) for n in range(first, MANY + fits)]).count(Status.MISS) == 0
        assert removed == [make_key(label, tenant=RED) for label in range(first)]
        write(tier, RED, range(2 * MANY, 3 * MANY))
        assert held(tier, RED) <= cap_bytes


@pytest.mark.usefixtures("idle")
def test_one_write_removes_a_bounded_part_of_what_is_above_a_lowered_cap(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiers.disk.reclaim.space._MOST_OWN", 2)
    write(tier, RED, range(MANY))
    tier.set_shares({RED: Share(cap_bytes=512 * KIB)})
    num_writes = 0
    while held(tier, RED) > 512 * KIB:
        before = held(tier, RED)
        assert write(tier, RED, range(MANY + num_writes, MANY + num_writes + 1)) == [WriteStatus.STORED]
        assert 0 < before - held(tier, RED) <= 5 * 256 * KIB
        num_writes += 1
    assert 2 < num_writes < 16


@pytest.mark.usefixtures("idle")
def test_what_is_being_written_above_a_lowered_cap_goes_with_a_later_write(tmp_path: Path) -> None:
    files = GatedFiles()
    with reopening(tmp_path / "other") as open_one, ThreadPoolExecutor(1) as thread:
        tier = open_one(CAPACITY, write_amplification=1.0, files=files)
        write(tier, RED, range(MANY // 2 + 1))  # so that the segment that takes extents has room
        files.begin()
        files.may_write.clear()
        late = thread.submit(write, tier, RED, range(MANY, MANY + 1))
        assert files.writing.acquire(timeout=10)
        tier.set_shares({RED: Share(cap_bytes=4 * KIB)})
        assert write(tier, RED, range(MANY + 1, MANY + 2)) == [WriteStatus.FULL]
        assert 0 < held(tier, RED) <= 256 * KIB
        files.may_write.set()
        assert late.result() == [WriteStatus.STORED]
        assert write(tier, RED, range(MANY + 1, MANY + 2)) == [WriteStatus.FULL]
        assert held(tier, RED) <= 4 * KIB


@pytest.mark.parametrize("cap_bytes", [MIB, 4 * KIB])
def test_a_lowered_cap_holds_soon_though_its_tenant_writes_nothing(tmp_path: Path, cap_bytes: int) -> None:
    with two_tenants(tmp_path / "other") as (tier, removed):
        num_blue = held(tier, BLUE)
        tier.set_shares({RED: Share(cap_bytes=cap_bytes)})
        until(lambda: held(tier, RED) <= cap_bytes)
        first = MANY - tier.usage_of(RED).num_blocks
        until(lambda: removed == [make_key(label, tenant=RED) for label in range(first)])
        assert cap_bytes - 384 * KIB < held(tier, RED) <= cap_bytes
        assert (tier.usage_of(BLUE).num_blocks, held(tier, BLUE)) == (8, num_blue)


def test_a_tier_closes_while_a_tenant_comes_down_to_its_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go, shrink = threading.Event(), threading.Event(), SpaceManager.shrink

    def one_step(space: SpaceManager, tenant: TenantId) -> bool:
        begun.set()
        assert may_go.wait(10)
        return shrink(space, tenant)

    monkeypatch.setattr(SpaceManager, "shrink", one_step)
    with reopening(tmp_path / "other") as open_one, ThreadPoolExecutor(1) as thread:
        tier = open_one(CAPACITY, write_amplification=1.0)
        write(tier, RED, range(MANY // 2))
        tier.set_shares({RED: Share(cap_bytes=4 * KIB)})
        assert begun.wait(10)
        closed = thread.submit(tier.close)
        until(lambda: tier._closing)
        may_go.set()
        closed.result(10)
        tier = open_one(CAPACITY, write_amplification=1.0)
        assert MANY // 2 - 8 <= tier.usage_of(RED).num_blocks < MANY // 2


def test_nothing_more_is_hidden_of_a_tenant_above_its_cap_where_files_cannot_be_removed(tmp_path: Path) -> None:
    files = FaultyFiles(OsFiles(direct=False))
    with reopening(tmp_path / "other") as open_one:
        tier = open_one(CAPACITY, write_amplification=1.0, files=files)
        write(tier, RED, range(MANY // 2))
        for op in ("remove", "truncate"):
            files.fail_next(op, errno.EROFS, times=10_000)
        tier.set_shares({RED: Share(cap_bytes=4 * KIB)})
        tier._parts.shrinking.submit(lambda: None).result(10)
        assert MANY // 2 - 8 <= tier.usage_of(RED).num_blocks < MANY // 2


def test_weights_divide_what_is_not_guaranteed(tier: DiskTier) -> None:
    tier.set_shares({RED: Share(weight=3.0)})
    for start in range(0, 2 * MANY, 16):
        write(tier, RED, range(start, start + 16))
        write(tier, BLUE, range(start, start + 16))
    assert 2.2 < held(tier, RED) / held(tier, BLUE) < 3.8


def test_a_newcomer_takes_nothing_from_those_below_their_share(tier: DiskTier) -> None:
    tier.set_shares({RED: Share(guaranteed_bytes=3 * MIB), BLUE: Share(guaranteed_bytes=MIB)})
    write(tier, RED, range(MANY))
    write(tier, BLUE, range(MANY))
    before = held(tier, RED)
    write(tier, GREEN, range(MANY))
    assert held(tier, RED) >= min(before, 3 * MIB) - 256 * KIB


def test_no_more_is_guaranteed_than_there_is(tier: DiskTier) -> None:
    tier.set_shares({RED: Share(guaranteed_bytes=3 * MIB)})
    with pytest.raises(InvalidInputError, match="guarantee less"):
        tier.set_shares({RED: Share(guaranteed_bytes=3 * MIB), BLUE: Share(guaranteed_bytes=2 * MIB)})
    tier.set_shares({RED: Share(guaranteed_bytes=MIB), BLUE: Share(guaranteed_bytes=2 * MIB)})


def test_what_is_preallocated_is_not_used(tier: DiskTier) -> None:
    write(tier, RED, range(3))
    assert 3 * NBYTES <= held(tier, RED) <= 3 * (NBYTES + 8 * KIB)


def test_shares_outlive_the_blocks(tmp_path: Path) -> None:
    with reopening(tmp_path / "other") as open_one:
        tier = open_one(CAPACITY, write_amplification=1.0)
        tier.set_shares({BLUE: Share(cap_bytes=MIB)})
        write(tier, BLUE, range(8))
        assert tier.purge(BLUE) == 8
        write(tier, BLUE, range(MANY))
        assert held(tier, BLUE) <= MIB


def test_a_tenant_with_a_cap_keeps_what_it_reads_as_one_with_a_small_disk_does(tmp_path: Path) -> None:
    hits: list[int] = []
    for capacity_bytes, cap_bytes in ((2 * MIB, None), (16 * MIB, 2 * MIB)):
        tier = DiskTier.open(
            tmp_path / str(capacity_bytes),
            capacity_bytes,
            reserve_bytes=0,
            segment_bytes=MIB // 2,
            write_amplification=2.0,
        )
        tier.set_shares({RED: Share(cap_bytes=cap_bytes)})
        read = [make_key(("read", i), tenant=RED) for i in range(10)]
        tier.write([summed(key, bytes(8 * KIB)) for key in read])
        hits.append(0)
        for number in range(0, 1600, 4):
            tier.write([summed(make_key(number + i, tenant=RED), bytes(8 * KIB)) for i in range(4)])
            into = [memoryview(bytearray(8 * KIB)) for _ in read]
            hits[-1] += tier.read(read, into).count(Status.HIT)
        tier.close()
    assert hits[1] >= hits[0] > 1000
