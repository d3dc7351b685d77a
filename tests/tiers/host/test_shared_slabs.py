"""The host tier in memory that other processes map: places, generations, writers, and what is given back."""

import mmap
import os
from functools import partial

import pytest

from kvtier.codec.checksums import checksum
from kvtier.identity.keys import StoreKey, TenantId, tenant_id
from kvtier.memory import memfd
from kvtier.memory.slab_layout import SLAB_STRIDE, SharedSlab, slab_bytes, words_of
from kvtier.protocol.shared_memory import PLACE
from kvtier.testing.contract import MakeTier, TierContract, make_key, make_payload, summed, tier_state_machine
from kvtier.testing.leaks import Holdings, require_nothing_beyond
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.host.slots import WriteSlot
from kvtier.tiers.host.tier import HostTier

pytestmark = pytest.mark.skipif(not memfd.available(), reason="shared memory needs Linux")
KIB = 1024
MIB = 1024 * KIB
RED, BLUE = tenant_id("red"), tenant_id("blue")
CLIENT, OTHER_CLIENT = 1, 2
PAYLOAD_BYTES = 64 * KIB


class TestSharedHostTier(TierContract):
    verifies = False

    @pytest.fixture
    def make_tier(self) -> MakeTier:
        return partial(HostTier, shared=True)


TestSharedHostTierStates = tier_state_machine(partial(HostTier, shared=True)).TestCase


class Mapped:
    """A slab as a client has it."""

    def __init__(self, slab: SharedSlab) -> None:
        self.slab = slab
        self.nbytes = slab_bytes(slab.slot_bytes, slab.num_slots, shared=True)
        self.memory = memfd.map_descriptor(slab.descriptor, self.nbytes, writable=slab.writable)
        self._words = self.memory[words_of(slab.slot_bytes * slab.num_slots, slab.num_slots)].cast("Q")

    def slot(self, slot_id: int) -> memoryview:
        start = slot_id % SLAB_STRIDE * self.slab.slot_bytes
        return self.memory[start : start + PAYLOAD_BYTES]

    def generation(self, slot_id: int) -> int:
        return self._words[1 + slot_id % SLAB_STRIDE]

    @property
    def in_use(self) -> bool:
        return self._words[0] == 1


def open_slab(tier: HostTier, slot_id: int, writer: int, tenant: TenantId = RED) -> Mapped:
    slab = tier.open_slab(tenant, slot_id // SLAB_STRIDE, writer)
    assert slab is not None
    try:
        return Mapped(slab)
    finally:
        os.close(slab.descriptor)


def key_of(label: object, tenant: TenantId = RED) -> StoreKey:
    return make_key(label, tenant=tenant)


def write_as(tier: HostTier, writer: int, label: object, tenant: TenantId = RED) -> WriteStatus:
    slot = tier.prepare(key_of(label, tenant), PAYLOAD_BYTES, writer=writer)
    if not isinstance(slot, WriteSlot):
        return slot
    payload = make_payload(label, PAYLOAD_BYTES)
    open_slab(tier, slot.slot, writer, tenant).slot(slot.slot)[:] = payload
    tier.commit(slot, checksum(slot.key, payload))
    return WriteStatus.STORED


def place_of(tier: HostTier, label: object) -> tuple[int, int, int]:
    held = tier.acquire_places([key_of(label)], [PAYLOAD_BYTES])
    tier.release_places(held)
    assert held.statuses == bytes([Status.HIT])
    slot, generation, digest = PLACE.unpack(held.places)
    return slot, generation, digest


def test_what_one_client_writes_others_read() -> None:
    tier = HostTier(4 * MIB, shared=True)
    assert write_as(tier, CLIENT, "a") is WriteStatus.STORED
    slot, generation, digest = place_of(tier, "a")
    seen = open_slab(tier, slot, OTHER_CLIENT)
    payload = make_payload("a", PAYLOAD_BYTES)
    assert (seen.slot(slot), seen.generation(slot), digest) == (payload, generation, checksum(key_of("a"), payload))
    assert not seen.slab.writable
    assert seen.memory.readonly
    tier.check()
    tier.close()


def test_a_slab_is_writable_for_its_writer_only_and_its_tenants_only() -> None:
    tier = HostTier(4 * MIB, shared=True)
    tier.write([summed(key_of("own"), make_payload("own", PAYLOAD_BYTES))])
    write_as(tier, CLIENT, "a")
    own, theirs = place_of(tier, "own")[0], place_of(tier, "a")[0]
    assert own // SLAB_STRIDE != theirs // SLAB_STRIDE
    assert open_slab(tier, theirs, CLIENT).slab.writable
    assert not open_slab(tier, theirs, OTHER_CLIENT).slab.writable
    assert not open_slab(tier, own, CLIENT).slab.writable
    assert tier.open_slab(BLUE, theirs // SLAB_STRIDE, CLIENT) is None
    assert tier.open_slab(RED, 999, CLIENT) is None
    slab = tier.open_slab(RED, own // SLAB_STRIDE, CLIENT)
    assert slab is not None
    with pytest.raises(PermissionError):
        mmap.mmap(slab.descriptor, PAYLOAD_BYTES, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    own_copy = tier.open_slab(RED, theirs // SLAB_STRIDE, CLIENT)
    assert own_copy is not None
    with pytest.raises(PermissionError):
        os.ftruncate(own_copy.descriptor, 0)  # a size that changed would be a SIGBUS for readers
    os.close(slab.descriptor)
    os.close(own_copy.descriptor)
    tier.close()


def test_another_generation_begins_before_a_slot_is_written_again() -> None:
    tier = HostTier(slab_bytes(PAYLOAD_BYTES, 1, shared=True), shared=True)
    tier.write([summed(key_of("a"), make_payload("a", PAYLOAD_BYTES))])
    slot, generation, _ = place_of(tier, "a")
    reader = open_slab(tier, slot, CLIENT)
    other = tier.prepare(key_of("b"), PAYLOAD_BYTES)
    assert isinstance(other, WriteSlot)
    assert other.slot == slot
    assert reader.generation(slot) == generation + 1
    assert reader.slot(slot) == make_payload("a", PAYLOAD_BYTES)  # not written to yet
    tier.abort(other)
    tier.close()


def test_a_held_place_is_not_written_again_until_it_is_released() -> None:
    tier = HostTier(slab_bytes(PAYLOAD_BYTES, 1, shared=True), shared=True)
    tier.write([summed(key_of("a"), make_payload("a", PAYLOAD_BYTES))])
    held = tier.acquire_places([key_of("a"), key_of("absent"), key_of("a")], [PAYLOAD_BYTES, PAYLOAD_BYTES, 7])
    assert held.statuses == bytes([Status.HIT, Status.MISS, Status.MISS])
    assert len(held.places) == PLACE.size
    assert tier.prepare(key_of("b"), PAYLOAD_BYTES) is WriteStatus.FULL
    tier.release_places(held)
    tier.release_places(held)
    assert isinstance(tier.prepare(key_of("b"), PAYLOAD_BYTES), WriteSlot)
    tier.close()


def test_what_a_writer_left_is_read_until_its_slab_goes_as_a_whole() -> None:
    tier = HostTier(4 * MIB, shared=True)
    write_as(tier, CLIENT, "left")
    slot = place_of(tier, "left")[0]
    unfinished = tier.prepare(key_of("unfinished"), PAYLOAD_BYTES, writer=CLIENT)
    assert isinstance(unfinished, WriteSlot)
    tier.abort(unfinished)
    tier.retire_writer(CLIENT)
    tier.check()
    assert place_of(tier, "left")[0] == slot
    assert not open_slab(tier, slot, CLIENT).slab.writable
    seen = open_slab(tier, slot, OTHER_CLIENT)
    i = 0
    while tier.lookup([key_of("left")]) == [Status.HIT]:  # others need room; none of them gets the dead writer's slots
        assert write_as(tier, OTHER_CLIENT, i) is WriteStatus.STORED
        assert place_of(tier, i)[0] // SLAB_STRIDE != slot // SLAB_STRIDE
        i += 1
    assert i >= 50
    assert not seen.in_use
    assert seen.generation(slot) == 0
    assert bytes(seen.slot(slot)) == bytes(PAYLOAD_BYTES)
    tier.check()
    tier.close()


def test_what_a_writer_left_goes_though_it_was_read_and_nobody_reads_what_is_newer() -> None:
    tier = HostTier(4 * MIB, shared=True)
    for i in range(30):
        assert write_as(tier, OTHER_CLIENT, ("before", i)) is WriteStatus.STORED
    write_as(tier, CLIENT, "left")
    tier.retire_writer(CLIENT)
    place_of(tier, "left")
    for i in range(100):
        assert write_as(tier, OTHER_CLIENT, i) is WriteStatus.STORED
    assert tier.lookup([key_of("left")]) == [Status.MISS]
    tier.check()
    tier.close()


def test_a_writer_that_left_nothing_costs_nothing() -> None:
    tier = HostTier(4 * MIB, shared=True)
    slot = tier.prepare(key_of("a"), PAYLOAD_BYTES, writer=CLIENT)
    assert isinstance(slot, WriteSlot)
    seen = open_slab(tier, slot.slot, CLIENT)
    tier.abort(slot)
    write_as(tier, OTHER_CLIENT, "b")
    tier.retire_writer(CLIENT)
    assert not seen.in_use
    tier.retire_writer(OTHER_CLIENT)
    theirs = open_slab(tier, place_of(tier, "b")[0], CLIENT)
    assert theirs.in_use
    tier.discard([key_of("b")])
    assert not theirs.in_use
    tier.check()
    tier.close()


def test_memory_that_was_given_back_is_gone_whoever_maps_it() -> None:
    tier = HostTier(4 * MIB, shared=True)
    write_as(tier, CLIENT, "a")
    slot = place_of(tier, "a")[0]
    slab = tier.open_slab(RED, slot // SLAB_STRIDE, OTHER_CLIENT)
    assert slab is not None
    seen = Mapped(slab)
    assert os.fstat(slab.descriptor).st_blocks > 0
    tier.retire_writer(CLIENT)
    tier.discard([key_of("a")])
    assert os.fstat(slab.descriptor).st_blocks == 0
    assert not seen.in_use
    os.close(slab.descriptor)
    tier.close()


def test_many_writers_share_one_capacity() -> None:
    tier = HostTier(8 * MIB, shared=True)
    for i in range(300):
        writer = 1 + i % 7
        assert write_as(tier, writer, i, tenant=RED if i % 3 else BLUE) is WriteStatus.STORED
        tier.check()
    for writer in range(1, 8):
        tier.retire_writer(writer)
        tier.check()
    assert tier.usage().num_blocks > 64
    for i in range(300, 400):
        assert tier.write([summed(key_of(i), make_payload(i, PAYLOAD_BYTES))]) == [WriteStatus.STORED]
    tier.check()
    tier.close()


def test_a_young_block_is_not_evicted() -> None:
    now_s = 100.0
    tier = HostTier(512 * KIB, min_residency_s=5.0, clock=lambda: now_s)
    statuses = [tier.write([summed(key_of(i), make_payload(i, PAYLOAD_BYTES))])[0] for i in range(9)]
    assert statuses == [WriteStatus.STORED] * 8 + [WriteStatus.FULL]
    now_s += 5.0
    assert tier.write([summed(key_of("c"), make_payload("c", PAYLOAD_BYTES))]) == [WriteStatus.STORED]
    assert tier.write([summed(key_of("d"), make_payload("d", PAYLOAD_BYTES))]) == [WriteStatus.STORED]
    tier.check()
    tier.close()


def test_a_newcomer_gets_a_slab_however_young_the_blocks_of_others_are() -> None:
    tier = HostTier(4 * MIB, min_residency_s=1e9, shared=True)
    while write_as(tier, CLIENT, tier.usage().num_blocks) is WriteStatus.STORED:
        pass
    assert write_as(tier, OTHER_CLIENT, "same size") is WriteStatus.STORED
    assert write_as(tier, CLIENT, "of blue", tenant=BLUE) is WriteStatus.STORED
    tier.check()
    tier.close()


def test_what_a_client_writes_into_the_words_of_its_slab_hurts_nobody_else() -> None:
    tier = HostTier(4 * MIB, shared=True)
    write_as(tier, CLIENT, "a")
    slot, _, _ = place_of(tier, "a")
    slab = open_slab(tier, slot, CLIENT)
    slab.memory[words_of(slab.slab.slot_bytes * slab.slab.num_slots, slab.slab.num_slots)] = bytes(
        [255] * (8 * (1 + slab.slab.num_slots))
    )
    for i in range(200):
        assert write_as(tier, CLIENT, i) is WriteStatus.STORED
        assert place_of(tier, i)[1] < 100
    tier.retire_writer(CLIENT)
    tier.check()
    tier.close()


def test_slots_that_are_held_in_the_largest_class_do_not_keep_others_out() -> None:
    tier = HostTier(4 * MIB, shared=True)
    held = [tier.prepare(key_of(("held", i)), 256 * KIB, writer=CLIENT) for i in range(8)]
    assert all(isinstance(slot, WriteSlot) for slot in held)
    for i in range(20):
        assert write_as(tier, OTHER_CLIENT, i) is WriteStatus.STORED
    assert write_as(tier, OTHER_CLIENT, "of blue", tenant=BLUE) is WriteStatus.STORED
    for slot in held:
        assert isinstance(slot, WriteSlot)
        tier.abort(slot)
    tier.check()
    tier.close()


def test_sizes_that_are_refused_leave_nothing_behind() -> None:
    tier = HostTier(1 * MIB, shared=True)
    slots = [tier.prepare(key_of(i), 100 * KIB) for i in range(20)]
    for i in range(1000):
        assert tier.prepare(key_of(("odd", i)), 200 * KIB + 64 * i) is WriteStatus.FULL
    assert [len(tenant.lanes) for tenant in tier._slots.memory.tenants()] == [1]
    for slot in slots:
        if isinstance(slot, WriteSlot):
            tier.abort(slot)
    tier.close()


def test_a_block_of_another_length_is_not_held() -> None:
    tier = HostTier(slab_bytes(PAYLOAD_BYTES, 1, shared=True), shared=True)
    tier.write([summed(key_of("a"), make_payload("a", PAYLOAD_BYTES))])
    held = tier.acquire_places([key_of("a")], [1])
    assert held.statuses == bytes([Status.MISS])
    assert isinstance(tier.prepare(key_of("b"), PAYLOAD_BYTES), WriteSlot)
    tier.close()


def test_a_block_that_another_client_is_writing_is_not_said_to_be_there() -> None:
    tier = HostTier(4 * MIB, shared=True)
    slot = tier.prepare(key_of("a"), PAYLOAD_BYTES, writer=CLIENT)
    assert isinstance(slot, WriteSlot)
    assert tier.prepare(key_of("a"), PAYLOAD_BYTES, writer=OTHER_CLIENT) is WriteStatus.THROTTLED
    tier.abort(slot)
    assert write_as(tier, OTHER_CLIENT, "a") is WriteStatus.STORED
    tier.close()


def test_a_slab_that_goes_as_a_slot_is_found_is_given_back_at_once() -> None:
    before = Holdings.now()
    tier = HostTier(128 * KIB, shared=True, block_overhead_bytes=64)
    per_slab = 0
    for i, (kib, writer) in enumerate([(1, 1), (20, 0), (20, 1), (1, 2), (20, 1), (20, 2), (20, 0)]):
        slot = tier.prepare(key_of(i), kib * KIB, writer=writer)
        assert isinstance(slot, WriteSlot)
        per_slab = per_slab or len(Holdings.now().beyond(before))
        num_slabs = sum(len(list(tenant.slabs())) for tenant in tier._slots.memory.tenants())
        assert len(Holdings.now().beyond(before)) == per_slab * num_slabs
        tier.commit(slot, 0)
    del slot
    tier.close()
    require_nothing_beyond(before)
