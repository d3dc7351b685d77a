"""The host tier: leases, write slots and pins, and how tenants and sizes share its memory."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.errors import ClosedError, InvalidInputError
from kvtier.identity.keys import StoreKey, TenantId, tenant_id
from kvtier.memory.pages import map_memory
from kvtier.testing.contract import (
    MakeTier,
    TierContract,
    make_key,
    make_payload,
    read_blocks,
    summed,
    tier_state_machine,
)
from kvtier.tiers.base import Item, Status, WriteStatus
from kvtier.tiers.host.pins import ReadPin
from kvtier.tiers.host.slots import WriteSlot
from kvtier.tiers.host.tier import HostTier

KIB = 1024
RED, BLUE = tenant_id("red"), tenant_id("blue")


class TestHostTier(TierContract):
    verifies = False

    @pytest.fixture
    def make_tier(self) -> MakeTier:
        return HostTier


class TestOddSizes(TierContract):
    verifies = False
    payload_bytes = 5003

    @pytest.fixture
    def make_tier(self) -> MakeTier:
        return lambda capacity_bytes: HostTier(capacity_bytes, slab_bytes=20_000, prefault=False)


TestHostTierStates = tier_state_machine(HostTier).TestCase


def block(label: object, *, tenant: TenantId = RED, nbytes: int = 4 * KIB) -> Item[bytes]:
    return summed(make_key(label, tenant=tenant), make_payload(label, nbytes))


def acquire(tier: HostTier, key: StoreKey) -> ReadPin:
    (lease,) = tier.acquire([key])
    assert lease is not None
    return lease


def prepare(tier: HostTier, key: StoreKey, nbytes: int) -> WriteSlot:
    slot = tier.prepare(key, nbytes)
    assert isinstance(slot, WriteSlot)
    return slot


def test_a_lease_shows_the_payload_read_only_with_its_checksum() -> None:
    tier = HostTier(64 * KIB)
    key, payload, checksum = block("a")
    tier.write([(key, payload, checksum)])
    lease = acquire(tier, key)
    assert lease.view == payload
    assert lease.view.readonly
    assert lease.checksum == checksum
    assert tier.acquire([make_key("absent")]) == [None]
    tier.release([lease, None])


def test_a_leased_block_stays_in_place_while_everything_else_is_evicted() -> None:
    tier = HostTier(32 * KIB)
    key, payload, checksum = block("held")
    tier.write([(key, payload, checksum)])
    lease = acquire(tier, key)
    for i in range(40):
        assert tier.write([block(i)]) == [WriteStatus.STORED]
    assert lease.view == payload
    assert tier.lookup([key]) == [Status.HIT]
    tier.release([lease])
    for i in range(40, 60):
        tier.write([block(i)])
    assert tier.lookup([key]) == [Status.MISS]
    tier.check()


def test_a_discarded_block_is_readable_under_its_lease_and_nowhere_else() -> None:
    tier = HostTier(4 * KIB)
    key, payload, checksum = block("a")
    tier.write([(key, payload, checksum)])
    lease = acquire(tier, key)
    assert tier.discard([key]) == 1
    assert tier.lookup([key]) == [Status.MISS]
    assert tier.write([block("b")]) == [WriteStatus.FULL]
    assert lease.view == payload
    tier.release([lease])
    tier.release([lease])
    assert tier.write([block("b")]) == [WriteStatus.STORED]
    tier.check()


def test_everything_leased_is_full() -> None:
    tier = HostTier(8 * KIB)
    keys = [block(i)[0] for i in range(2)]
    assert tier.write([block(0), block(1)]) == [WriteStatus.STORED] * 2
    leases = tier.acquire(keys)
    assert tier.write([block(2)]) == [WriteStatus.FULL]
    assert tier.write([block(2, tenant=BLUE)]) == [WriteStatus.FULL]
    tier.release(leases)
    assert tier.write([block(2)]) == [WriteStatus.STORED]
    tier.check()


def test_a_write_slot_is_pending_until_commit() -> None:
    tier = HostTier(64 * KIB)
    key, payload, checksum = block("a", nbytes=5000)
    slot = prepare(tier, key, 5000)
    assert len(slot.view) == 5000
    assert tier.lookup([key]) == [Status.PENDING]
    assert tier.prepare(key, 5000) is WriteStatus.EXISTS
    assert tier.write([(key, payload, checksum)]) == [WriteStatus.EXISTS]
    assert read_blocks(tier, [key], 5000) == [None]
    assert tier.acquire([key]) == [None]
    assert tier.usage().num_blocks == 0
    slot.view[:] = payload
    tier.commit(slot, checksum)
    assert read_blocks(tier, [key], 5000) == [payload]
    with pytest.raises(InvalidInputError):
        tier.commit(slot, 0)
    tier.abort(slot)
    assert tier.lookup([key]) == [Status.HIT]
    tier.check()


def test_an_aborted_write_leaves_nothing() -> None:
    tier = HostTier(4 * KIB)
    key, payload, _ = block("a")
    slot = prepare(tier, key, len(payload))
    assert tier.write([block("b")]) == [WriteStatus.FULL]
    tier.abort(slot)
    assert tier.lookup([key]) == [Status.MISS]
    assert tier.write([block("b")]) == [WriteStatus.STORED]
    tier.check()


def test_a_key_discarded_while_written_stays_forgotten() -> None:
    tier = HostTier(64 * KIB)
    key, payload, _ = block("a")
    slot = prepare(tier, key, len(payload))
    assert tier.discard([key]) == 0
    again = prepare(tier, key, len(payload))
    tier.commit(slot, 1)
    assert tier.lookup([key]) == [Status.PENDING]
    again.view[:] = payload
    tier.commit(again, 2)
    assert read_blocks(tier, [key], len(payload)) == [payload]
    tier.check()


def test_a_failing_copy_gives_its_slots_back() -> None:
    tier = HostTier(8 * KIB)
    strided = memoryview(bytes(8 * KIB))[::2]
    with pytest.raises(BufferError, match="contiguous"):
        tier.write([block("a"), (make_key("b"), strided, 0)])
    assert tier.lookup([make_key("a"), make_key("b")]) == [Status.HIT, Status.MISS]
    assert tier.write([block("b")]) == [WriteStatus.STORED]
    tier.check()


def test_the_tail_of_a_batch_is_evicted_first() -> None:
    tier = HostTier(32 * KIB)
    batch = [block(i) for i in range(8)]
    tier.write(batch)
    tier.write([block("new")])
    assert tier.lookup([key for key, _, _ in batch]) == [Status.HIT] * 7 + [Status.MISS]
    read_blocks(tier, [key for key, _, _ in batch[3:6]], 4 * KIB)
    tier.write([block("newer"), block("newest"), block("last"), block("of all")])
    kept = [tier.lookup([key])[0] is Status.HIT for key, _, _ in batch]
    assert kept == [False, False, False, True, True, True, False, False]


def test_a_tenant_that_holds_less_gets_slabs_of_the_largest_until_shares_are_even() -> None:
    tier = HostTier(128 * KIB, slab_bytes=16 * KIB)
    tier.write([block(i) for i in range(32)])
    for i in range(64):
        assert tier.write([block(i, tenant=BLUE)]) == [WriteStatus.STORED]
        tier.check()
    red = tier.lookup([block(i)[0] for i in range(32)])
    blue = tier.lookup([block(i, tenant=BLUE)[0] for i in range(64)])
    assert red.count(Status.HIT) == 16
    assert blue.count(Status.HIT) == 16
    for i in range(100, 200):
        tier.write([block(i)])
    assert blue == tier.lookup([block(i, tenant=BLUE)[0] for i in range(64)])


def test_a_slab_with_a_reader_is_not_dropped() -> None:
    tier = HostTier(32 * KIB, slab_bytes=4 * KIB)
    tier.write([block(i) for i in range(8)])
    leases = tier.acquire([block(i)[0] for i in range(1, 8)])
    assert tier.write([block("b", tenant=BLUE)]) == [WriteStatus.STORED]
    assert tier.lookup([block(i)[0] for i in range(8)]) == [Status.MISS] + [Status.HIT] * 7
    tier.release(leases)
    tier.check()


def test_payloads_larger_than_a_slab() -> None:
    tier = HostTier(64 * KIB, slab_bytes=4 * KIB)
    tier.write([block(i) for i in range(16)])
    large = block("large", nbytes=40 * KIB)
    assert tier.write([large, block("too large", nbytes=64 * KIB + 1)]) == [WriteStatus.STORED, WriteStatus.FULL]
    assert read_blocks(tier, [large[0]], 40 * KIB) == [large[1]]
    tier.check()


def test_memory_that_the_system_does_not_have_is_full(caplog: pytest.LogCaptureFixture) -> None:
    tier = HostTier(2**50, prefault=False)
    assert tier.prepare(make_key("a"), 2**48) is WriteStatus.FULL
    assert "lower its capacity" in caplog.text
    assert tier.lookup([make_key("a")]) == [Status.MISS]
    assert tier.write([block("a")]) == [WriteStatus.STORED]
    tier.check()


def test_an_empty_payload() -> None:
    tier = HostTier(64 * KIB)
    assert tier.write([summed(make_key("a"), b"")]) == [WriteStatus.STORED]
    assert read_blocks(tier, [make_key("a")], 0) == [b""]


def test_writers_that_need_a_slab_at_once_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    num_mapped = 0
    another = threading.Event()

    def map_slowly(nbytes: int, *, prefault: bool) -> memoryview:
        nonlocal num_mapped
        num_mapped += 1
        if num_mapped > 1:
            another.set()
        another.wait(0.3)  # time enough for a second writer to make its own, if it did not wait
        return map_memory(nbytes, prefault=prefault)

    monkeypatch.setattr("kvtier.tiers.host.slab.map_memory", map_slowly)
    tier = HostTier(32 * KIB * KIB, slab_bytes=32 * KIB)
    start = threading.Barrier(8)

    def write(i: int) -> WriteStatus:
        start.wait(10)
        return tier.write([block(i)])[0]

    with ThreadPoolExecutor(8) as executor:
        assert list(executor.map(write, range(8))) == [WriteStatus.STORED] * 8
    assert num_mapped == 1
    tier.check()


def test_nobody_waits_for_ever_for_memory_that_another_writer_is_getting(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def map_late(nbytes: int, *, prefault: bool) -> memoryview:
        begun.set()
        assert may_end.wait(10)
        return map_memory(nbytes, prefault=prefault)

    monkeypatch.setattr("kvtier.tiers.host.slab.map_memory", map_late)
    monkeypatch.setattr("kvtier.tiers.host.slots._SLAB_WAIT_S", 0.05)
    tier = HostTier(32 * KIB * KIB, slab_bytes=32 * KIB)
    with ThreadPoolExecutor(1) as executor:
        first = executor.submit(tier.write, [block(0)])
        assert begun.wait(10)
        assert tier.write([block(1)]) == [WriteStatus.THROTTLED]
        may_end.set()
        assert first.result(10) == [WriteStatus.STORED]
    assert tier.write([block(1)]) == [WriteStatus.STORED]
    tier.check()


def test_leases_and_slots_outlive_the_tier() -> None:
    tier = HostTier(64 * KIB)
    key, payload, checksum = block("a")
    tier.write([(key, payload, checksum)])
    lease = acquire(tier, key)
    slot = prepare(tier, make_key("b"), 4 * KIB)
    tier.close()
    assert lease.view == payload
    slot.view[:] = payload
    with pytest.raises(ClosedError):
        tier.commit(slot, 0)
    tier.abort(slot)
    tier.release([lease])


@pytest.mark.parametrize(("capacity_bytes", "slab_bytes"), [(0, 64 * KIB), (4095, 64 * KIB), (64 * KIB, 0)])
def test_sizes_that_hold_nothing_are_refused(capacity_bytes: int, slab_bytes: int) -> None:
    with pytest.raises(InvalidInputError, match=str(capacity_bytes)):
        HostTier(capacity_bytes, slab_bytes=slab_bytes)
