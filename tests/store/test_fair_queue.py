"""The queue to a lower tier by itself: in which order blocks leave it, and how much room each tenant has."""

from collections import Counter
from types import SimpleNamespace
from typing import cast

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.identity.keys import StoreKey, TenantId, tenant_id, tenant_of
from kvtier.store.fair_queue import _LEAST_BYTES, _TURN_BYTES, FairQueue
from kvtier.store.fair_room import FairRoom
from kvtier.store.keys_in_turn import KeysInTurn
from kvtier.store.write_queue import WriteQueue
from kvtier.testing.contract import make_key
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.host.pins import ReadPin
from pool_rig import BLUE, RED

GREEN = tenant_id("green")
TENANTS = [RED, BLUE, GREEN]
ROOM = 64 * _LEAST_BYTES


def lease(nbytes: int) -> ReadPin:
    return cast(ReadPin, SimpleNamespace(view=range(nbytes)))


def cost(nbytes: int) -> int:
    return max(_LEAST_BYTES, nbytes)


class TestTurns:
    @given(st.lists(st.lists(st.integers(1, 3 * _TURN_BYTES), min_size=1), min_size=2, max_size=5), st.integers(1, 16))
    def test_tenants_that_wait_get_equal_parts_in_the_order_of_their_blocks(
        self, sizes: list[list[int]], most: int
    ) -> None:
        queue = FairQueue()
        tenants = [tenant_id(f"tenant-{i}") for i in range(len(sizes))]
        lengths = {
            make_key(j, tenant=t): n for t, of_one in zip(tenants, sizes, strict=True) for j, n in enumerate(of_one)
        }
        for key, nbytes in lengths.items():
            queue.push(key, lease(nbytes))
        largest = max(map(cost, lengths.values()))
        served = Counter[TenantId]()
        taken: list[StoreKey] = []
        while batch := queue.take(most):
            assert len(batch) <= most
            taken += batch
            for key in batch:
                served[tenant_of(key)] += cost(lengths[key])
            waiting = [served[tenant] for tenant in queue.tenants]
            if waiting:
                assert max(waiting) - min(waiting) <= _TURN_BYTES + 2 * largest
        assert sorted(taken) == sorted(lengths)
        for tenant in tenants:
            assert [key for key in taken if key[:16] == tenant] == [key for key in lengths if key[:16] == tenant]

    @given(st.integers(1, 400), st.integers(1, 40), st.integers(1, 4 * _TURN_BYTES))
    def test_who_comes_last_waits_for_a_turn_of_each_other_one(
        self, num_each: int, num_before: int, nbytes: int
    ) -> None:
        queue = FairQueue()
        for tenant in (RED, GREEN):
            for i in range(num_each):
                queue.push(make_key(i, tenant=tenant), lease(nbytes))
        assume(num_before < 2 * num_each)
        queue.take(num_before)
        queue.push(blue := make_key(0, tenant=BLUE), lease(1))
        before = Counter(tenant_of(key) for key in _until(queue, blue))
        assert all(before[tenant] * cost(nbytes) <= _TURN_BYTES + cost(nbytes) for tenant in (RED, GREEN))

    def test_small_blocks_have_no_endless_turn(self) -> None:
        queue = FairQueue()
        for i in range(1000):
            queue.push(make_key(i, tenant=RED), lease(1))
        queue.push(blue := make_key(0, tenant=BLUE), lease(_TURN_BYTES))
        assert len(_until(queue, blue)) <= _TURN_BYTES // _LEAST_BYTES

    def test_keys_without_sizes_take_turns_too(self) -> None:
        keys = KeysInTurn()
        reds, blues = ([make_key(i, tenant=tenant) for i in range(4)] for tenant in (RED, BLUE))
        for key in [*reds, *blues, *reds]:
            keys.add(key)
        assert keys.take(3) == [reds[0], blues[0], reds[1]]
        assert keys.take(2) == [blues[1], reds[2]]
        assert keys.take(4, among=[*reds, blues[3]], but={reds[3]}) == [blues[3]]
        assert sorted(keys.take(9)) == sorted([reds[3], blues[2]])
        assert not keys
        assert not keys.take(1)


class TestRoom:
    def test_one_that_is_alone_has_all_of_it_and_leaves_as_much(self) -> None:
        room = FairRoom(1024)
        assert room.fits(RED, 1024)
        room.add(RED, 1024)
        assert room.is_full_for(RED)
        assert not room.fits(RED, 1)
        assert room.fits(BLUE, 512)
        room.add(BLUE, 512)
        assert room.is_full_for(BLUE)
        assert room.fits(GREEN, 256)
        room.add(RED, -1024)
        assert not room.is_full_for(BLUE)
        assert room.fits(RED, 768)

    def test_those_who_all_want_more_end_up_with_equal_parts(self) -> None:
        room = FairRoom(3000)
        room.add(RED, 3000)
        for _ in range(10_000):  # a byte is written down, in turn, and everybody offers more
            for tenant in TENANTS:
                if room.taken_by(tenant):
                    room.add(tenant, -1)
                while not room.is_full_for(tenant):
                    room.add(tenant, 1)
        assert [room.taken_by(tenant) for tenant in TENANTS] == [pytest.approx(1500, abs=3)] * 3

    def test_one_that_has_nothing_waiting_is_not_refused_for_what_others_had_under_way(self) -> None:
        room = FairRoom(1024)
        room.add(RED, 10_000)
        assert room.is_full_for(RED)
        assert not room.is_full_for(BLUE)
        room.add(BLUE, 1)
        assert room.is_full_for(BLUE)


class Queue(RuleBasedStateMachine):
    """A `WriteQueue` beside what it was told: it forgets nothing that is promised, and stays within its room."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WriteQueue(ROOM, self._note_pinned)
        self.pinned_bytes = 0
        self.num = 0
        self.queued: dict[TenantId, dict[StoreKey, int]] = {tenant: {} for tenant in TENANTS}
        self.writing: list[dict[StoreKey, ReadPin | None]] = []
        self.put_off: set[StoreKey] = set()
        self.barred: set[StoreKey] = set()

    def _note_pinned(self, nbytes: int) -> None:
        self.pinned_bytes = nbytes

    @rule(tenant=st.sampled_from(TENANTS), nbytes=st.integers(1, 8 * _LEAST_BYTES), number=st.integers(1, 30))
    def write(self, tenant: TenantId, nbytes: int, number: int) -> None:
        """Blocks of a client: taken, acknowledged and queued while the tenant is not behind."""
        for _ in range(number):
            if self.queue.is_full_for(tenant):
                assert self.own_bytes(tenant), "a tenant that has nothing waiting is never refused"
                return
            self.num += 1
            key = make_key(self.num, tenant=tenant)
            self.queue.push(key, lease(nbytes))
            self.queued[tenant][key] = nbytes

    @rule(most=st.integers(1, 16))
    def take(self, most: int) -> None:
        batch = self.queue.take_queued(most)
        assert len(batch) == min(most, sum(map(len, self.queued.values())))
        for tenant, line in self.queued.items():
            mine = [key for key in batch if tenant_of(key) == tenant]
            assert mine == list(line)[: len(mine)], "the oldest first"
            for key in mine:
                del line[key]
        if batch:
            self.writing.append(batch)

    @rule(status=st.sampled_from([WriteStatus.STORED, WriteStatus.FULL, WriteStatus.FAILED]))
    def finish(self, status: WriteStatus) -> None:
        if self.writing:
            batch = self.writing.pop(0)
            self.queue.note_answers(dict.fromkeys(batch, status))
            for key, held in batch.items():
                self.queue.finish(key, held)
                if status is not WriteStatus.STORED:
                    self.queue.put_off(key)
                    self.put_off.add(key)

    @rule(most=st.integers(1, 16))
    def try_again(self, most: int) -> None:
        again = self.queue.take_put_off(most)
        assert len(again) == min(most, len(self.put_off))
        self.put_off.difference_update(again)
        if again:
            batch: dict[StoreKey, ReadPin | None] = {key: lease(1) for key in again}
            self.queue.pin(batch)
            self.writing.append(batch)

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        keys = [key for line in self.queued.values() for key in line] + sorted(self.put_off)
        if keys:
            gone = set(data.draw(st.lists(st.sampled_from(keys), max_size=9)))
            assert len(self.queue.bar(gone)) == len(gone - self.put_off)
            self.queue.unbar(gone)
            self.put_off -= gone
            for line in self.queued.values():
                for key in gone & line.keys():
                    del line[key]

    @rule()
    def make_room(self) -> None:
        waiting = [tenant for tenant in TENANTS if self.queued[tenant]]
        before = {tenant: self.own_bytes(tenant) for tenant in waiting}
        num = len(self.queue.unpin())
        if waiting:
            most = [t for t in waiting if before[t] == max(before.values()) and len(self.queued[t]) == num]
            chosen = next(t for t in most if not any(map(self.queue.is_on_its_way, self.queued[t])))
            self.put_off.update(self.queued[chosen])
            self.queued[chosen].clear()
        else:
            assert num == 0

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.queue.num_waiting == sum(map(len, self.queued.values()))
        assert self.queue.num_memory_only == len(self.put_off)
        assert all(self.queue.is_on_its_way(key) for line in self.queued.values() for key in line)

    @invariant()
    def the_room_is_kept(self) -> None:
        own = [self.own_bytes(tenant) for tenant in TENANTS]
        assert self.queue.pinned_bytes == self.pinned_bytes == sum(own)
        tried_again = sum(map(len, self.writing))
        assert max(own) <= ROOM + 8 * _LEAST_BYTES + tried_again
        assert sum(own) <= 2 * ROOM + len(TENANTS) * 8 * _LEAST_BYTES + tried_again

    def own_bytes(self, tenant: TenantId) -> int:
        """What is pinned of a tenant."""
        held = [pin for batch in self.writing for key, pin in batch.items() if tenant_of(key) == tenant and pin]
        return sum(self.queued[tenant].values()) + sum(len(pin.view) for pin in held)


TestQueue = Queue.TestCase


def _until(queue: FairQueue, key: StoreKey) -> list[StoreKey]:
    """What is taken before this block."""
    before: list[StoreKey] = []
    while key not in (batch := queue.take(1)):
        before += batch
    return before
