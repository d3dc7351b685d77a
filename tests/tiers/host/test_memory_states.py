"""The books of a host tier, driven by a state machine: several tenants, lengths and writers, and little memory."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvtier.identity.keys import StoreKey, TenantId, tenant_id
from kvtier.memory import memfd
from kvtier.policies.registry import by_name
from kvtier.testing.contract import make_key
from kvtier.tiers.base import Status
from kvtier.tiers.common.shares import Share
from kvtier.tiers.host.pins import PinnedSlots, ReadPin, SlabPin
from kvtier.tiers.host.relocation import Relocation
from kvtier.tiers.host.slab import Slab
from kvtier.tiers.host.slots import WriteSlot
from kvtier.tiers.host.tier import HostTier

KIB = 1024
TENANTS = [tenant_id("red"), tenant_id("blue")]
SIZES = [1 * KIB, 4 * KIB, 20 * KIB]
keys = st.builds(lambda label, tenant: make_key(label, tenant=tenant), st.integers(0, 40), st.sampled_from(TENANTS))
pytestmark = pytest.mark.skipif(not memfd.available(), reason="shared memory needs Linux")


def content(key: StoreKey, nbytes: int) -> bytes:
    return (key[-4:] * (nbytes // 4 + 1))[:nbytes]


class Memory(RuleBasedStateMachine):
    """Whatever is readable has the bytes that were written, and the books agree after every step."""

    writing = Bundle("writing")
    leases = Bundle("leases")
    places = Bundle("places")
    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("kvtier.tiers.host.slab_sizes._LEAST_PART", 8)
        self.shares: dict[TenantId, Share] = {}
        self.now_s = 0.0
        self.meanwhile: list[StoreKey] = []
        """Discarded while the next slab is emptied."""
        copy = Relocation.copy

        def copy_late(relocation: Relocation, made: Slab | None) -> None:
            self.tier.discard(self.meanwhile)
            self.meanwhile = []
            copy(relocation, made)
            self.tier.check()

        self.patch.setattr(Relocation, "copy", copy_late)

    @initialize(policy=st.sampled_from(["lru", "default", "slru", "s3fifo", "arc"]), young_s=st.sampled_from([0, 3]))
    def open(self, policy: str, young_s: int) -> None:
        self.tier = HostTier(
            128 * KIB,
            shared=True,
            prefault=False,
            block_overhead_bytes=64,
            make_policy=lambda: by_name(policy),
            min_residency_s=young_s,
            clock=lambda: self.now_s,
        )

    @rule(seconds=st.sampled_from([0.5, 1.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(key=keys, nbytes=st.sampled_from(SIZES), writer=st.integers(0, 3))
    def store(self, key: StoreKey, nbytes: int, writer: int) -> None:
        slot = self.prepare_as(key, nbytes, writer)
        if slot is not None:
            self.tier.commit(slot, nbytes)
            assert self.tier.lookup([key]) == [Status.HIT]

    @rule(
        tenant=st.sampled_from(TENANTS),
        first=st.integers(0, 30),
        nbytes=st.sampled_from(SIZES),
        writer=st.integers(0, 3),
        step=st.integers(1, 3),
    )
    def store_many(self, tenant: TenantId, first: int, nbytes: int, writer: int, step: int) -> None:
        """As many as make others give way; every second or third stays as it was used."""
        some = [make_key(label, tenant=tenant) for label in range(first, first + 20)]
        for key in some:
            self.store(key, nbytes, writer)
        self.tier.release(self.tier.acquire(some[::step]))

    @rule(target=writing, key=keys, nbytes=st.sampled_from(SIZES), writer=st.integers(0, 3))
    def prepare(self, key: StoreKey, nbytes: int, writer: int) -> object:
        slot = self.prepare_as(key, nbytes, writer)
        return multiple() if slot is None else slot

    def prepare_as(self, key: StoreKey, nbytes: int, writer: int) -> WriteSlot | None:
        slot = self.tier.prepare(key, nbytes, writer=writer)
        if not isinstance(slot, WriteSlot):
            return None
        slot.view[:] = content(key, nbytes)
        return slot

    @rule(slot=consumes(writing), end=st.sampled_from(["commit", "abort", "abandon"]))
    def finish(self, slot: WriteSlot, end: str) -> None:
        if end == "commit":
            self.tier.commit(slot, len(slot.view))
        elif end == "abort":
            self.tier.abort(slot)
        else:
            self.tier.abandon([slot])

    @rule(target=leases, key=keys, touch=st.booleans())
    def acquire(self, key: StoreKey, touch: bool) -> object:
        (lease,) = self.tier.acquire([key], touch=touch)
        if lease is None:
            return multiple()
        assert bytes(lease.view) == content(key, lease.checksum)
        return key, lease

    @rule(held=consumes(leases))
    def release(self, held: tuple[StoreKey, ReadPin]) -> None:
        key, lease = held
        assert bytes(lease.view) == content(key, lease.checksum)
        self.tier.release([lease])

    @rule(target=places, key=keys, nbytes=st.sampled_from(SIZES))
    def acquire_place(self, key: StoreKey, nbytes: int) -> PinnedSlots:
        return self.tier.acquire_places([key], [nbytes])

    @rule(held=consumes(places))
    def release_place(self, held: PinnedSlots) -> None:
        self.tier.release_places(held)

    @rule(target=pins, key=keys)
    def pin(self, key: StoreKey) -> object:
        (pin,) = self.tier.pin([key])
        return multiple() if pin is None else pin

    @rule(pin=consumes(pins))
    def unpin(self, pin: SlabPin) -> None:
        self.tier.unpin([pin])

    @rule(key=keys)
    def discard(self, key: StoreKey) -> None:
        self.tier.discard([key])
        assert self.tier.lookup([key]) == [Status.MISS]

    @rule(key=keys)
    def discard_while_blocks_move(self, key: StoreKey) -> None:
        self.meanwhile.append(key)

    @rule(writer=st.integers(1, 3))
    def retire(self, writer: int) -> None:
        self.tier.retire_writer(writer)

    @rule(
        tenant=st.sampled_from(TENANTS),
        kib=st.integers(0, 48),
        more_kib=st.sampled_from([None, 0, 8, 40]),
        weight=st.sampled_from([0.0, 1.0, 2.5]),
    )
    def set_share(self, tenant: TenantId, kib: int, more_kib: int | None, weight: float) -> None:
        """:param more_kib: how far the cap is above what is guaranteed."""
        cap_bytes = None if more_kib is None else max(1, (kib + more_kib) * KIB)
        self.shares[tenant] = Share(guaranteed_bytes=kib * KIB, cap_bytes=cap_bytes, weight=weight)
        self.tier.set_shares(self.shares)

    @invariant()
    def books_agree(self) -> None:
        self.tier.check()

    def teardown(self) -> None:
        self.tier.close()
        self.patch.undo()


Memory.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestMemory = Memory.TestCase
