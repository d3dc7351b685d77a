"""How tenants share the memory of a host tier: guarantees, weights, caps, and who gives way to whom at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.errors import InvalidInputError
from kvtier.events import EventKind
from kvtier.identity.keys import StoreKey, TenantId, tenant_id
from kvtier.memory import memfd
from kvtier.metrics import Metrics
from kvtier.testing.contract import make_key
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.shares import Share
from kvtier.tiers.host.reclaim import Reclaim
from kvtier.tiers.host.slots import WriteSlot
from kvtier.tiers.host.tier import BLOCK_OVERHEAD_BYTES, HostTier

KIB = 1024
MIB = 1024 * KIB
RED, BLUE, GREEN = tenant_id("red"), tenant_id("blue"), tenant_id("green")


def put(tier: HostTier, tenant: TenantId, label: object, nbytes: int = 16 * KIB, writer: int = 0) -> WriteStatus:
    slot = tier.prepare(make_key(label, tenant=tenant), nbytes, writer=writer)
    if isinstance(slot, WriteSlot):
        tier.commit(slot, 0)
        return WriteStatus.STORED
    return slot


def fill(tier: HostTier, tenant: TenantId, num_blocks: int = 1024, nbytes: int = 16 * KIB) -> set[WriteStatus]:
    return {put(tier, tenant, i, nbytes) for i in range(num_blocks)}


def used_bytes(tier: HostTier, tenant: TenantId) -> int:
    return tier.usage_of(tenant).used_bytes


def make_tier(**options: float) -> HostTier:
    return HostTier(16 * MIB, prefault=False, min_residency_s=options.get("min_residency_s", 0.0))


def test_one_who_idles_with_a_hundred_lengths_gives_way_at_once() -> None:
    """As in an attack: a hundred lengths, then nothing more. The other has its half after as many bytes as that."""
    tier = make_tier(min_residency_s=1e9)
    for i in range(2000):
        put(tier, RED, i, 2 * KIB + 640 * (i % 100))
    before = used_bytes(tier, RED)
    assert before > 12 * MIB
    assert fill(tier, BLUE, 8 * MIB // (16 * KIB) - 16) == {WriteStatus.STORED}
    assert used_bytes(tier, BLUE) > 7.5 * MIB
    assert used_bytes(tier, RED) > 6 * MIB
    tier.check()


def test_many_lengths_are_no_larger_share() -> None:
    tier = make_tier()
    fill(tier, BLUE)
    for i in range(4000):
        put(tier, RED, i, 2 * KIB + 640 * (i % 100))
    assert used_bytes(tier, BLUE) > 7.5 * MIB
    tier.check()


def test_a_second_length_of_one_who_is_at_its_share_takes_from_itself() -> None:
    tier = make_tier()
    fill(tier, RED)
    fill(tier, BLUE)
    before = used_bytes(tier, RED)
    for i in range(300):
        assert put(tier, BLUE, ("other", i), 24 * KIB, writer=i % 3) is WriteStatus.STORED
    assert used_bytes(tier, RED) >= before - 128 * KIB
    assert tier.lookup([make_key(("other", i), tenant=BLUE) for i in range(290, 300)]) == [Status.HIT] * 10
    tier.check()


def test_what_is_guaranteed_comes_back_and_stays() -> None:
    tier = make_tier()
    tier.set_shares({BLUE: Share(guaranteed_bytes=12 * MIB)})
    fill(tier, RED)
    assert used_bytes(tier, RED) > 15 * MIB  # lent
    assert fill(tier, BLUE) == {WriteStatus.STORED}
    assert used_bytes(tier, BLUE) > 11.5 * MIB
    fill(tier, GREEN)
    fill(tier, RED)
    assert used_bytes(tier, BLUE) > 11.5 * MIB
    assert abs(used_bytes(tier, GREEN) - used_bytes(tier, RED)) < MIB
    tier.check()


def test_the_rest_is_shared_by_weight() -> None:
    tier = make_tier()
    tier.set_shares({BLUE: Share(weight=3.0)})
    for _ in range(3):
        fill(tier, RED)
        fill(tier, BLUE)
    assert used_bytes(tier, BLUE) / used_bytes(tier, RED) == pytest.approx(3, rel=0.1)
    tier.set_shares({BLUE: Share(weight=0.0)})
    fill(tier, RED)
    assert used_bytes(tier, BLUE) < MIB
    tier.check()


def test_nobody_has_more_than_its_cap() -> None:
    tier = make_tier()
    tier.set_shares({RED: Share(cap_bytes=4 * MIB)})
    assert fill(tier, RED) == {WriteStatus.STORED}
    assert 3.9 * MIB < used_bytes(tier, RED) <= 4 * MIB
    tier.check()


def test_a_cap_below_the_smallest_slab_of_others_is_no_ban() -> None:
    tier = HostTier(4096 * MIB, prefault=False)
    tier.set_shares({RED: Share(cap_bytes=MIB)})
    for nbytes in (4 * KIB, 8 * KIB, 64 * KIB):
        assert fill(tier, RED, 8, nbytes) == {WriteStatus.STORED}
        tier.discard([make_key(i, tenant=RED) for i in range(8)])
    assert fill(tier, RED, 1024, 4 * KIB) == {WriteStatus.STORED}
    assert 0.75 * MIB < used_bytes(tier, RED) <= MIB
    tier.set_shares({RED: Share()})
    assert fill(tier, RED, 2048, 4 * KIB) == {WriteStatus.STORED, WriteStatus.EXISTS}
    assert used_bytes(tier, RED) > 7 * MIB
    tier.check()


def hits(tier: HostTier, tenant: TenantId, labels: range) -> int:
    return tier.lookup([make_key(label, tenant=tenant) for label in labels]).count(Status.HIT)


@pytest.mark.parametrize("cap_bytes", [4 * MIB, MIB, 4 * KIB])
def test_a_lowered_cap_takes_the_coldest_blocks_at_once_and_nobody_elses(cap_bytes: int) -> None:
    evicted: list[StoreKey] = []
    metrics = Metrics()
    tier = HostTier(
        16 * MIB,
        prefault=False,
        metrics=metrics,
        on_event=lambda event: evicted.extend(event.keys if event.kind is EventKind.REMOVED else ()),
    )
    fill(tier, BLUE, 128)
    fill(tier, RED, 640)
    tier.set_shares({RED: Share(cap_bytes=cap_bytes)})
    left = used_bytes(tier, RED)
    assert cap_bytes - 640 * KIB < left <= cap_bytes  # the largest slab has a sixteenth
    num_left = left // (16 * KIB)
    assert hits(tier, RED, range(640 - num_left - 8, 640)) == num_left, "a slab or two may go as a whole"
    assert evicted[:384] == [make_key(label, tenant=RED) for label in range(384)]
    assert tier.num_evicted_of(RED) == len(evicted) == metrics.evicted_blocks.labels("host")._value.get()
    assert (tier.num_evicted_of(BLUE), hits(tier, BLUE, range(128))) == (0, 128)
    tier.check()


def test_a_write_that_makes_much_room_lets_go_of_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that takes it again at once would keep all others out."""
    pauses: list[float] = []
    monkeypatch.setattr("kvtier.tiers.host.slab_changes.time.sleep", pauses.append)
    monkeypatch.setattr("kvtier.tiers.host.reclaim._MOST_S", 0.0)
    tier = make_tier()
    fill(tier, RED, 1024, 16 * KIB)
    assert put(tier, RED, "large", MIB) is WriteStatus.STORED
    assert len(pauses) > 8, "one for each step"
    tier.check()


@pytest.fixture
def shrinks_with_each_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every 10 ms."""
    monkeypatch.setattr("kvtier.tiers.host.slab_changes._SHRINK_AGAIN_S", 0.0)


def test_others_do_not_wait_for_a_tenant_that_stays_above_its_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its writes look for what may go, and not each of them."""
    monkeypatch.setattr("kvtier.tiers.host.slab_changes._SHRINK_AGAIN_S", 1000.0)
    looks: list[int] = []
    shrink = Reclaim.shrink
    monkeypatch.setattr(Reclaim, "shrink", lambda *arguments: looks.append(1) or shrink(*arguments))
    tier = make_tier()
    fill(tier, RED, 640)
    leases = tier.acquire([make_key(label, tenant=RED) for label in range(0, 640, 8)])
    tier.set_shares({RED: Share(cap_bytes=MIB)})
    looks.clear()
    assert {put(tier, RED, ("later", i)) for i in range(48)} == {WriteStatus.STORED}
    assert len(looks) == 1
    tier.release(leases)
    tier.check()


@pytest.mark.usefixtures("shrinks_with_each_write")
def test_what_is_in_use_stays_above_a_lowered_cap_and_goes_with_a_write_after_that() -> None:
    tier = make_tier()
    fill(tier, RED, 640)
    read = range(0, 640, 8)  # in all slabs
    leases = tier.acquire([make_key(label, tenant=RED) for label in read])
    tier.set_shares({RED: Share(cap_bytes=MIB)})
    assert put(tier, RED, "meanwhile") is WriteStatus.STORED
    assert hits(tier, RED, read) == len(read)
    assert used_bytes(tier, RED) > MIB
    tier.check()
    tier.release(leases)
    assert {put(tier, RED, ("later", i)) for i in range(48)} == {WriteStatus.STORED}
    assert MIB // 4 < used_bytes(tier, RED) <= MIB
    tier.check()


@pytest.mark.usefixtures("shrinks_with_each_write")
def test_young_blocks_stay_above_a_lowered_cap_until_they_are_old() -> None:
    now_s = 0.0
    tier = HostTier(16 * MIB, prefault=False, min_residency_s=60.0, clock=lambda: now_s)
    fill(tier, RED, 640)
    tier.set_shares({RED: Share(cap_bytes=MIB)})
    assert used_bytes(tier, RED) == 10 * MIB
    now_s = 61.0
    assert {put(tier, RED, ("later", i)) for i in range(48)} == {WriteStatus.STORED}
    assert MIB // 4 < used_bytes(tier, RED) <= MIB
    assert hits(tier, RED, range(640)) < 16
    tier.check()


@pytest.mark.usefixtures("shrinks_with_each_write")
def test_a_write_gives_up_a_bounded_part_of_what_is_above_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left when the shares are set goes with the next writes, and none of them does it all."""
    monkeypatch.setattr("kvtier.tiers.host.slab_changes._COME_DOWN_S", 0.0)
    monkeypatch.setattr("kvtier.tiers.host.reclaim._MOST_STEPS", 32)
    tier = make_tier()
    fill(tier, RED, 640)
    tier.set_shares({RED: Share(cap_bytes=MIB)})
    num_writes = 0
    while used_bytes(tier, RED) > MIB:
        before = tier.num_evicted_of(RED)
        assert put(tier, RED, ("later", num_writes)) is WriteStatus.STORED
        assert tier.num_evicted_of(RED) - before <= 64
        num_writes += 1
    assert 9 <= num_writes <= 80
    tier.check()


@pytest.mark.usefixtures("shrinks_with_each_write")
def test_a_block_above_the_cap_is_refused_and_costs_only_what_is_above_it() -> None:
    tier = make_tier()
    fill(tier, RED, 64, 32 * KIB)
    leases = tier.acquire([make_key(0, tenant=RED)])
    tier.discard([make_key(1, tenant=RED)])  # beside the one that is read there is a free slot
    tier.set_shares({RED: Share(cap_bytes=16 * KIB)})
    assert put(tier, RED, "large", 32 * KIB) is WriteStatus.FULL
    tier.release(leases)
    assert put(tier, RED, "large", 32 * KIB) is WriteStatus.FULL
    assert (used_bytes(tier, RED), put(tier, RED, "small", 4 * KIB)) == (0, WriteStatus.STORED)
    assert put(tier, RED, "large", 32 * KIB) is WriteStatus.FULL
    assert tier.lookup([make_key("small", tenant=RED)]) == [Status.HIT]
    tier.check()


def test_caps_change_while_their_tenants_write_and_read() -> None:
    tier = make_tier()
    stop = threading.Event()

    def use(tenant: TenantId, nbytes: int) -> None:
        label = 0
        while not stop.is_set():
            put(tier, tenant, label, nbytes)
            tier.release(tier.acquire([make_key(label - back, tenant=tenant) for back in range(0, 64, 8)]))
            label += 1

    with ThreadPoolExecutor(4) as threads:
        users = [threads.submit(use, tenant, nbytes) for tenant in (RED, BLUE) for nbytes in (16 * KIB, 40 * KIB)]
        try:
            for cap_bytes in (8 * MIB, 2 * MIB, 16 * KIB, 6 * MIB) * 4:
                tier.set_shares({RED: Share(cap_bytes=cap_bytes)})
                stop.wait(0.05)
                tier.check()
        finally:
            stop.set()
        for user in users:
            user.result()
    tier.set_shares({RED: Share(cap_bytes=MIB)})
    assert used_bytes(tier, RED) <= MIB
    tier.check()


def test_what_a_tenant_is_owed() -> None:
    tier = make_tier()
    assert tier.owed_bytes(RED) == 16 * MIB
    put(tier, BLUE, "a")
    assert tier.owed_bytes(RED) == 8 * MIB
    tier.set_shares({RED: Share(guaranteed_bytes=8 * MIB, weight=0.0)})
    assert (tier.owed_bytes(RED), tier.owed_bytes(BLUE)) == (8 * MIB, 8 * MIB)
    tier.set_shares({RED: Share(guaranteed_bytes=8 * MIB, weight=0.0), BLUE: Share(cap_bytes=2 * MIB)})
    assert tier.owed_bytes(BLUE) == 2 * MIB


def test_what_is_owed_follows_tenants_that_come_and_go_and_shares_that_change() -> None:
    tier = make_tier()
    others = [tenant_id(str(i)) for i in range(6)]
    for i, tenant in enumerate(others):
        put(tier, tenant, "a", writer=1 + i)
    assert (tier.owed_bytes(others[0]), tier.owed_bytes(RED)) == (16 * MIB // 6, 16 * MIB // 7)
    tier.set_shares({others[0]: Share(weight=0.5), RED: Share(guaranteed_bytes=MIB, weight=2.5)})
    assert tier.owed_bytes(others[1]) == 15 * MIB // 8
    assert tier.owed_bytes(RED) == MIB + int(15 * MIB * 2.5 / 8)
    put(tier, RED, "a")
    assert tier.owed_bytes(RED) == MIB + int(15 * MIB * 2.5 / 8)
    for writer in (1, 2, 3):
        tier.discard([make_key("a", tenant=others[writer - 1])])
        tier.retire_writer(writer)
    tier.check()
    assert tier.owed_bytes(others[5]) == 15 * MIB // 6, "two have gone of whom nothing was said"
    tier.set_shares({})
    tier.check()
    assert tier.owed_bytes(others[0]) == 16 * MIB // 5
    tier.close()
    assert tier.owed_bytes(RED) == 16 * MIB


def test_shares_that_make_no_sense_are_refused() -> None:
    tier = make_tier()
    tier.set_shares({RED: Share(guaranteed_bytes=10 * MIB)})
    with pytest.raises(InvalidInputError, match="guarantee less"):
        tier.set_shares({RED: Share(guaranteed_bytes=10 * MIB), BLUE: Share(guaranteed_bytes=7 * MIB)})
    assert tier.owed_bytes(RED) == 16 * MIB, "what is wrong changes nothing"
    tier.set_shares({RED: Share(guaranteed_bytes=9 * MIB), BLUE: Share(guaranteed_bytes=7 * MIB)})
    for wrong in ({"guaranteed_bytes": -1}, {"weight": -1.0}, {"weight": float("nan")}):
        with pytest.raises(InvalidInputError, match="0 or more"):
            Share(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="raise it"):
        Share(guaranteed_bytes=2, cap_bytes=1)


@pytest.mark.skipif(not memfd.available(), reason="shared memory needs Linux")
def test_slots_that_are_held_do_not_keep_others_from_their_share() -> None:
    """What is prepared and not committed stays; all else of the tenant's gives way."""
    tier = HostTier(16 * MIB, shared=True, block_overhead_bytes=BLOCK_OVERHEAD_BYTES)
    held = [tier.prepare(make_key(i, tenant=RED), 64 * KIB + 64 * (i % 9), writer=1 + i % 5) for i in range(64)]
    for i in range(64, 400):
        put(tier, RED, i, 64 * KIB + 64 * (i % 9), writer=1 + i % 5)
    assert fill(tier, BLUE, 400) == {WriteStatus.STORED}
    assert used_bytes(tier, BLUE) > 6 * MIB
    tier.abandon([slot for slot in held if isinstance(slot, WriteSlot)])
    tier.check()
    assert fill(tier, BLUE, 480) <= {WriteStatus.STORED, WriteStatus.EXISTS}
    assert used_bytes(tier, BLUE) > 7 * MIB
    tier.check()
    tier.close()
