"""Pins: what tenants want kept in the pool's memory, as its core keeps it."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clock_rig import StillClock
from kvtier.codec.stored_form import encode_header, parse_header
from kvtier.errors import ConfigError, InvariantError
from kvtier.identity.keys import StoreKey, TenantId
from kvtier.memory import memfd
from kvtier.protocol.retention import PinStatus
from kvtier.store.retention import RetentionLimits
from kvtier.testing.contract import make_key, make_payload
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.host.pins import SlabPin
from kvtier.tiers.host.slots import WriteSlot
from kvtier.tiers.host.tier import HostTier
from kvtier_pool.configured_parts import retention_limits
from pool_rig import BLOCK_BYTES, BLUE, MIB, RED, WAIT_S, CoreRig, core_rig, keys, pool_config, until

PER_SLAB = 15
"""Blocks of a slab of `large_slabs` in a core with 8 MiB: an eighth, and what is kept of each block is part of it."""
SLAB_BYTES = PER_SLAB * BLOCK_BYTES
TWO_SLABS = RetentionLimits(max_s=3600.0, most_bytes=2 * SLAB_BYTES, several_tenants=False)
PINNED, MISS, FULL = PinStatus.PINNED, PinStatus.MISS, PinStatus.FULL


@pytest.fixture(autouse=True)
def large_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a tenant with much memory has them: several blocks are in each."""
    monkeypatch.setattr("kvtier.tiers.host.slab_sizes._LEAST_PART", 8)


@pytest.fixture
def ended_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that call `end_due` themselves: the thread that does it does not wake up."""
    monkeypatch.setattr("kvtier.store.retention._TICK_S", 3600.0)


@contextlib.contextmanager
def pin_rig(
    limits: RetentionLimits = TWO_SLABS, *, disk_dir: Path | None = None, shared: bool = False
) -> Iterator[tuple[CoreRig, StillClock]]:
    clock = StillClock()
    with core_rig(disk_dir, pins=limits, clock=clock, shared=shared) as rig:
        yield rig, clock


def store(rig: CoreRig, labels: Sequence[object], tenant: TenantId = RED) -> None:
    for label in labels:
        assert rig.store(label, tenant=tenant) is WriteStatus.STORED


def churn(rig: CoreRig, num_bytes: int, tenant: TenantId = RED) -> None:
    """Writes so much that nobody wants."""
    for i in range(num_bytes // BLOCK_BYTES):
        assert rig.store(("churn", i), tenant=tenant) is WriteStatus.STORED
    rig.core.discard(keys([("churn", i) for i in range(num_bytes // BLOCK_BYTES)], tenant))


def there(rig: CoreRig, labels: Sequence[object], tenant: TenantId = RED) -> int:
    return rig.core.lookup(keys(labels, tenant)).count(Status.HIT)


def test_what_is_pinned_stays_and_the_rest_goes() -> None:
    with pin_rig() as (rig, _):
        store(rig, range(20))
        assert rig.core.pin(RED, keys([*range(10), "absent"]), 60.0) == [PINNED] * 10 + [MISS]
        assert rig.pinned() == (10, 10 * BLOCK_BYTES, SLAB_BYTES)
        churn(rig, 40 * MIB)
        assert (there(rig, range(10)), there(rig, range(10, 20))) == (10, 0)
        assert rig.load(keys(range(10))) == [make_payload(i, BLOCK_BYTES) for i in range(10)]
        assert rig.core.unpin(keys([*range(10), "absent"])) == 10
        assert rig.core.unpin(keys(range(10))) == 0
        assert rig.pinned() == (0, 0, 0)
        assert there(rig, range(10)) == 10
        churn(rig, 40 * MIB)
        assert there(rig, range(10)) == 0


def test_a_pin_ends_by_its_time() -> None:
    with pin_rig() as (rig, clock):
        store(rig, range(3))
        rig.core.pin(RED, keys(range(2)), 60.0)
        rig.core.pin(RED, keys([2]), 30.0)
        clock.now_s += 59.9
        until(lambda: rig.pinned()[0] == 2)  # the thread has seen that one is over
        churn(rig, 40 * MIB)
        assert there(rig, range(3)) == 2
        clock.now_s += 0.1
        until(lambda: rig.pinned() == (0, 0, 0))
        churn(rig, 40 * MIB)
        assert there(rig, range(3)) == 0


@pytest.mark.usefixtures("ended_by_hand")
def test_pinned_again_a_block_stays_until_the_later_end() -> None:
    with pin_rig() as (rig, clock):
        store(rig, "ab")
        rig.core.pin(RED, keys("ab"), 60.0)
        assert rig.core.pin(RED, keys("aab"), 10.0) == [PINNED] * 3  # shorter, and one named twice
        assert rig.pinned()[0] == 2
        clock.now_s += 50.0
        assert rig.core.pin(RED, keys("a"), 30.0) == [PINNED]
        assert rig.core.pin(RED, keys("a"), 20.0) == [PINNED]
        clock.now_s += 10.0
        assert rig.core.pins.end_due() == 1
        clock.now_s += 19.0
        assert rig.core.pins.end_due() == 0
        clock.now_s += 1.0
        assert rig.core.pins.end_due() == 1
        assert rig.core.unpin(keys("ab")) == 0


def test_a_pin_that_was_made_often_ends_at_once() -> None:
    with pin_rig() as (rig, _):
        store(rig, "a")
        for _ in range(5):
            assert rig.core.pin(RED, keys("a"), 60.0) == [PINNED]
        assert rig.core.unpin(keys("aa")) == 1
        churn(rig, 40 * MIB)
        assert there(rig, "a") == 0


@pytest.mark.usefixtures("ended_by_hand")
def test_no_pin_lasts_longer_than_the_longest() -> None:
    with pin_rig() as (rig, clock):
        store(rig, "a")
        assert rig.core.pin(RED, keys("a"), 1e12) == [PINNED]
        clock.now_s += TWO_SLABS.max_s
        assert rig.core.pins.end_due() == 1


@pytest.mark.parametrize(
    ("several_tenants", "most_slabs"), [(False, 2), (True, 1)], ids=["the only tenant", "one of several"]
)
def test_whole_slabs_count_and_the_first_blocks_get_the_room(several_tenants: bool, most_slabs: int) -> None:
    limits = RetentionLimits(max_s=60.0, most_bytes=2 * SLAB_BYTES, several_tenants=several_tenants)
    with pin_rig(limits) as (rig, _):
        labels = range(4 * PER_SLAB)
        store(rig, labels)
        room = most_slabs * PER_SLAB
        assert rig.core.pin(RED, keys(labels), 60.0) == [PINNED] * room + [FULL] * (len(labels) - room)
        assert rig.pinned() == (room, room * BLOCK_BYTES, most_slabs * SLAB_BYTES)
        assert rig.core.pin(RED, keys(labels[:3]), 60.0) == [PINNED] * 3  # those that are need no more room
        rig.core.unpin(keys(labels[1:room]))
        assert rig.pinned() == (1, BLOCK_BYTES, SLAB_BYTES)
        assert rig.core.pin(RED, keys(labels[1:room]), 60.0) == [PINNED] * (room - 1)
        rig.core.unpin(keys(labels[:PER_SLAB]))
        assert rig.core.pin(RED, keys(labels[room:]), 60.0).count(PINNED) == PER_SLAB


def test_one_tenant_leaves_half_of_the_room_to_others() -> None:
    limits = RetentionLimits(max_s=60.0, most_bytes=2 * SLAB_BYTES)
    with pin_rig(limits) as (rig, _):
        for tenant in (RED, BLUE):
            store(rig, range(2 * PER_SLAB), tenant)
        for tenant in (RED, BLUE):
            statuses = rig.core.pin(tenant, keys(range(2 * PER_SLAB), tenant), 60.0)
            assert statuses == [PINNED] * PER_SLAB + [FULL] * PER_SLAB
        churn(rig, 40 * MIB)
        churn(rig, 40 * MIB, BLUE)
        assert there(rig, range(PER_SLAB)) == there(rig, range(PER_SLAB), BLUE) == PER_SLAB


def test_the_number_of_pins_is_bounded() -> None:
    with pin_rig(RetentionLimits(max_s=60.0, most_bytes=8 * MIB, most_blocks=7)) as (rig, _):
        store(rig, range(8))
        store(rig, range(8), BLUE)
        assert rig.core.pin(RED, keys(range(8)), 60.0) == [PINNED] * 3 + [FULL] * 5
        assert rig.core.pin(BLUE, keys(range(8), BLUE), 60.0) == [PINNED] * 3 + [FULL] * 5


def test_pins_that_come_and_go_leave_no_books_behind() -> None:
    with pin_rig() as (rig, _):
        store(rig, range(4))
        for _ in range(1000):
            rig.core.pin(RED, keys(range(4)), 3600.0)
            rig.core.unpin(keys(range(4)))
        assert len(rig.core.pins._ends) < 100


@pytest.mark.usefixtures("ended_by_hand")
def test_a_writer_who_finds_nothing_but_pinned_blocks_hears_full() -> None:
    with pin_rig(RetentionLimits(max_s=60.0, most_bytes=8 * MIB, several_tenants=False)) as (rig, clock):
        labels = range(8 * PER_SLAB)
        store(rig, labels)
        assert rig.core.pin(RED, keys(labels), 60.0) == [PINNED] * len(labels)
        assert rig.store("one more") is WriteStatus.FULL
        assert rig.store("one more", tenant=BLUE) is WriteStatus.FULL
        clock.now_s += 60.0
        rig.core.pins.end_due()
        assert rig.store("one more") is WriteStatus.STORED
        assert rig.store("one more", tenant=BLUE) is WriteStatus.STORED


def test_discard_ends_a_pin() -> None:
    with pin_rig() as (rig, _):
        store(rig, range(PER_SLAB))
        rig.core.pin(RED, keys(range(PER_SLAB)), 60.0)
        assert rig.core.discard(keys([0, 1])) == 2
        assert rig.pinned()[0] == PER_SLAB - 2
        assert rig.core.lookup(keys([0, 1])) == [Status.MISS] * 2
        store(rig, [0])  # what is stored anew is not pinned
        assert rig.core.unpin(keys([0, 1])) == 0
        rig.core.discard(keys(range(PER_SLAB)))
        assert rig.pinned() == (0, 0, 0)


@pytest.mark.parametrize("stored_again", [False, True])
def test_a_block_discarded_while_it_is_being_pinned_is_not(monkeypatch: pytest.MonkeyPatch, stored_again: bool) -> None:
    with pin_rig() as (rig, _):
        store(rig, "ab")
        pin = HostTier.pin

        def pin_and_lose(memory: HostTier, batch: Sequence[StoreKey]) -> list[SlabPin | None]:
            pins = pin(memory, batch)
            rig.core.discard(keys("a"))
            if stored_again:
                store(rig, "a")
            return pins

        with monkeypatch.context() as patch:
            patch.setattr(HostTier, "pin", pin_and_lose)
            assert rig.core.pin(RED, keys("ab"), 60.0) == [MISS, PINNED]
        assert rig.pinned()[0] == 1
        assert rig.core.unpin(keys("ab")) == 1


def test_blocks_that_are_only_below_are_pinned_once_they_were_read(tmp_path: Path) -> None:
    with pin_rig(disk_dir=tmp_path) as (rig, _):
        store(rig, range(3))
        rig.core.drain(WAIT_S)
    with pin_rig(disk_dir=tmp_path) as (rig, _):
        assert there(rig, range(3)) == 3
        assert rig.core.pin(RED, keys(range(3)), 60.0) == [MISS] * 3
        rig.load(keys(range(3)))
        assert rig.core.pin(RED, keys(range(3)), 60.0) == [PINNED] * 3


def test_a_block_that_is_being_written_is_not_pinned() -> None:
    with pin_rig() as (rig, _):
        header = parse_header(encode_header(make_key("a"), make_payload("a", BLOCK_BYTES)))
        slot = rig.core.begin_write(RED, header.key, header.stored_length)
        assert isinstance(slot, WriteSlot)
        assert rig.core.pin(RED, keys("a"), 60.0) == [MISS]
        rig.core.abort_write(slot)


@pytest.mark.skipif(not memfd.available(), reason="shared memory needs Linux")
def test_what_a_dead_client_wrote_stays_as_long_as_it_is_pinned() -> None:
    with pin_rig(shared=True) as (rig, _):
        slots = [rig.core.begin_write(RED, key, BLOCK_BYTES, 7) for key in keys(range(2))]
        rig.core.commit_all([slot for slot in slots if isinstance(slot, WriteSlot)], [1, 2])
        assert rig.core.pin(RED, keys(range(2)), 60.0) == [PINNED] * 2
        rig.core.retire_writer(7)
        churn(rig, 40 * MIB)
        assert there(rig, range(2)) == 2
        rig.core.discard(keys([0]))
        assert rig.pinned()[:2] == (1, BLOCK_BYTES)
        num_slabs = len(slabs(rig))
        rig.core.discard(keys([1]))
        assert rig.pinned() == (0, 0, 0)
        assert len(slabs(rig)) == num_slabs - 1  # nobody writes to it again, so it is given back at once


def slabs(rig: CoreRig) -> list[object]:
    return [slab for tenant in rig.core._memory._slots.memory.tenants() for slab in tenant.slabs()]


def test_a_thread_that_is_gone_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pins: object) -> int:
        raise RuntimeError("broken")

    with pin_rig() as (rig, _):
        assert rig.core.problem() is None
        store(rig, "a")
        assert rig.core.pin(RED, keys("a"), 60.0) == [PINNED]  # without pins, the thread has nothing to do
        monkeypatch.setattr(threading, "excepthook", lambda *_: None)
        monkeypatch.setattr("kvtier.store.retention.Retention.end_due", fail)
        until(lambda: rig.core.problem() == "the thread that ends pins is gone")
        monkeypatch.undo()


def test_check_finds_miscounted_pins() -> None:
    with pin_rig() as (rig, _):
        store(rig, "a")
        rig.core.pin(RED, keys("a"), 60.0)
        rig.core.pins._all.slab_bytes += 1
        with pytest.raises(InvariantError, match="pins"):
            rig.core.check()
        rig.core.pins._all.slab_bytes -= 1


def test_pins_and_discards_of_many_threads_leave_nothing_held() -> None:
    with pin_rig() as (rig, _):

        def work(worker: int) -> None:
            for i in range(100):
                labels = [(i * 7 + worker * 13 + j) % 40 for j in range(6)]
                for label in labels:
                    rig.store(label)
                rig.core.pin(RED, keys(labels), 60.0)
                rig.load(keys(labels))
                if i % 3 == worker % 3:
                    rig.core.discard(keys(labels[:3]))
                elif i % 3 == 0:
                    rig.core.unpin(keys(labels[3:]))

        with ThreadPoolExecutor(4) as executor:
            for future in [executor.submit(work, worker) for worker in range(4)]:
                future.result(WAIT_S)
        rig.core.check()
        rig.core.unpin(keys(range(40)))
        assert rig.pinned() == (0, 0, 0)
        churn(rig, 40 * MIB)
        assert there(rig, range(40)) == 0


def test_what_the_configuration_says_of_pins() -> None:
    def limits(num_tenants: int = 2, **table: object) -> RetentionLimits:
        return retention_limits(pool_config(16 * MIB, **table).pool_service, num_tenants=num_tenants)

    assert limits(num_tenants=1) == RetentionLimits(max_s=86_400.0, most_bytes=4 * MIB, several_tenants=False)
    assert limits(pin_share=0.5) == RetentionLimits(max_s=86_400.0, most_bytes=8 * MIB)
    assert limits(max_pin_s=0.0).max_s == 0
    for field, value in (("max_pin_s", -1.0), ("pin_share", 1.5), ("pin_share", float("nan"))):
        with pytest.raises(ConfigError, match="pin"):
            limits(**{field: value})


def test_a_core_is_without_pins_unless_told() -> None:
    with core_rig() as rig:
        store(rig, "a")
        assert (rig.core.max_pin_s, rig.core.pin(RED, keys("a"), 60.0)) == (0.0, [FULL])
        assert "kvtier-pins" not in {thread.name for thread in threading.enumerate()}
