"""The memory of a host tier: its slabs, what they cost, and which tenant has them."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping

from kvtier.errors import InvariantError
from kvtier.identity.keys import StoreKey, TenantId
from kvtier.memory.slab_layout import SLAB_STRIDE
from kvtier.policies.base import EvictionPolicy
from kvtier.tiers.common.shares import EQUAL_SHARE, Share, require_room
from kvtier.tiers.host.entries import Entries, Entry
from kvtier.tiers.host.lane import Lane
from kvtier.tiers.host.relocation import Growth, Relocation
from kvtier.tiers.host.slab import Slab, map_slab
from kvtier.tiers.host.slab_sizes import SlabSizes
from kvtier.tiers.host.tenant_memory import TenantMemory


class SlabMemory:
    """The slabs of a tier, within its capacity, and whose they are. The tier's lock guards it, but for `make`, which
    takes none."""

    def __init__(
        self, sizes: SlabSizes, make_policy: Callable[[], EvictionPolicy[StoreKey]], *, shared: bool, prefault: bool
    ) -> None:
        """:param shared: in memory that other processes may map."""
        self.sizes = sizes
        self._make_policy = make_policy
        self._shared = shared
        self._prefault = prefault
        self.blocks: dict[StoreKey, Entry[StoreKey]] = {}
        """The visible blocks of all tenants."""
        self._slabs: dict[int, Slab] = {}
        """All slabs by number."""
        self._tenants: dict[TenantId, TenantMemory] = {}
        """The tenants that have memory, or want some."""
        self._shares: dict[TenantId, Share] = {}
        """What was said of tenants, whether they have memory or not."""
        self._said_bytes = 0
        """The sum of the guarantees in `_shares`."""
        self._said_weight = 0.0
        """The sum of the weights in `_shares`."""
        self._num_unsaid = 0
        """How many of `_tenants` are not in `_shares`."""
        self._cost_bytes = 0
        """What all slabs cost, those being made included."""
        self._overdrawn_bytes = 0
        """The excess over the capacity that is allowed at the moment, while a slab is emptied into a new one."""
        self._being_made: dict[int, Growth] = {}
        """Slabs between `make_room` and `add` or `cancel`, by number."""
        self._orphans: set[int] = set()
        """Numbers in `_being_made` of slabs whose writer has gone in the meantime."""
        self._numbers = itertools.count(1)
        self._dropped: list[Slab] = []
        """Slabs that are no longer part of anything, and are to be given back."""

    def set_shares(self, shares: Mapping[TenantId, Share]) -> None:
        """What tenants are owed from now on; all others have equal shares. `InvalidInputError`, and nothing changed:
        more is guaranteed than there is. O(lanes)."""
        require_room(shares.values(), self.sizes.capacity_bytes)
        self._shares = dict(shares)
        self._said_bytes = sum(share.guaranteed_bytes for share in shares.values())
        self._said_weight = math.fsum(share.weight for share in shares.values())
        self._num_unsaid = len(self._tenants.keys() - shares.keys())
        for there in self._tenants.values():
            there.set_share(self._shares.get(there.tenant, EQUAL_SHARE))

    def owed_bytes(self, tenant: TenantId) -> int:
        """What the tenant could have now though all others who have memory took what they are owed."""
        own = self._shares.get(tenant, EQUAL_SHARE)
        is_new = tenant not in self._shares and tenant not in self._tenants
        rest = self.sizes.capacity_bytes - self._said_bytes
        weights = self._said_weight + (self._num_unsaid + is_new) * EQUAL_SHARE.weight
        owed = own.guaranteed_bytes + (int(rest * own.weight / weights) if weights else 0)
        return owed if own.cap_bytes is None else min(owed, own.cap_bytes)

    def tenant(self, tenant: TenantId) -> TenantMemory:
        """The tenant's memory, made if need be."""
        there = self._tenants.get(tenant)
        if there is None:
            entries = Entries(self._make_policy(), self._free_slot, self.blocks)
            there = self._tenants[tenant] = TenantMemory(tenant, entries, self.sizes)
            there.set_share(self._shares.get(tenant, EQUAL_SHARE))
            self._num_unsaid += tenant not in self._shares
        return there

    def tenants(self, tenant: TenantId | None = None) -> Iterator[TenantMemory]:
        """All that are known, or only this one if it is."""
        return (each for each in self._tenants.values() if tenant is None or each.tenant == tenant)

    @property
    def has_one_tenant(self) -> bool:
        """Whether one tenant alone has memory or wants some."""
        return len(self._tenants) == 1

    def others(self, tenant: TenantMemory) -> list[TenantMemory]:
        """All but this one."""
        return [other for other in self._tenants.values() if other is not tenant]

    @property
    def is_overdrawn(self) -> bool:
        """The capacity is exceeded at the moment."""
        return self._cost_bytes > self.sizes.capacity_bytes

    def has(self, slab: Slab) -> bool:
        """Whether the slab was neither dropped nor forgotten."""
        return slab.number in self._slabs

    def full_tenants(self) -> list[TenantMemory]:
        """The tenants with a lane for which no further slab fits into what is left of the capacity."""
        room_bytes = self._room_bytes()
        return [
            t for t in self._tenants.values() if any(lane.least_cost_bytes > room_bytes for lane in t.lanes.values())
        ]

    def tenant_of(self, slab: Slab) -> TenantMemory:
        """The memory of the tenant that has the slab."""
        return self._tenants[slab.kind.tenant]

    def slab_of(self, entry: Entry[StoreKey]) -> Slab:
        """The slab that an entry's slot is in."""
        return self._slabs[entry.slot // SLAB_STRIDE]

    def view(self, entry: Entry[StoreKey]) -> memoryview:
        """The payload of a block, writable; keeps its slab's memory alive."""
        number, place = divmod(entry.slot, SLAB_STRIDE)
        return self._slabs[number].view(place, entry.nbytes)

    def find(self, tenant: TenantId, number: int) -> Slab | None:
        """A slab of this tenant by number."""
        slab = self._slabs.get(number)
        return slab if slab is not None and slab.kind.tenant == tenant else None

    def take(self, tenant: TenantMemory, lane: Lane, key: StoreKey) -> tuple[Slab, Entry[StoreKey]]:
        """Enters a key that is not there into a free slot of the tenant's lane, which must have one."""
        slab, place = lane.take()
        entry = slab.entries[place] = tenant.entries.enter(key, slab.slot_id(place))
        entry.generation = slab.renew(place)
        return slab, entry

    def make(self, growth: Growth) -> Slab:
        """The memory. Slow when prefaulting. `OSError` when there is none. Call `add` or `cancel` next."""
        memory, descriptor = map_slab(
            growth.lane.kind.slot_bytes, growth.num_slots, shared=self._shared, prefault=self._prefault
        )
        return Slab(growth.number, growth.lane.kind, memory, growth.num_slots, descriptor, growth.cost_bytes)

    def add(self, slab: Slab) -> None:
        """Puts a slab from `make` to use."""
        if self._being_made.pop(slab.number, None) is None:
            slab.close()  # after `clear`
            return
        self._slabs[slab.number] = slab
        self.tenant_of(slab).add(slab)
        if slab.number in self._orphans:
            self._orphans.remove(slab.number)
            self.retire(slab, gone=True)

    def cancel(self, growth: Growth) -> None:
        """There was no memory."""
        if self._being_made.pop(growth.number, None) is None:
            return  # after `clear`
        self._orphans.discard(growth.number)
        self._cost_bytes -= growth.cost_bytes
        growth.tenant.cost_bytes -= growth.cost_bytes
        self.forget_if_empty(growth.tenant, growth.lane)

    def finish(self, relocation: Relocation, *, copied: bool) -> None:
        """Ends a relocation that was carried out, and drops its slab if nothing is left in it, and slabs of a writer
        that has gone meanwhile if nothing has come to them."""
        slab = relocation.slab
        if slab.number not in self._slabs:
            return  # after `clear`
        relocation.finish(copied=copied)
        for target in relocation.target_slabs():
            if target.retired and target.is_empty:
                self.drop(target)
        if slab.is_empty:
            self.drop(slab)
        elif not slab.retired:
            tenant = self.tenant_of(slab)
            tenant.note_room(tenant.lanes[slab.kind])

    def retire(self, slab: Slab, *, gone: bool) -> None:
        """Gives out no slot of this slab again. `gone`: its writer does not map it again either."""
        self.tenant_of(slab).retire(slab)
        if gone:
            slab.writer = None
        if slab.is_empty and not slab.leaving:
            self.drop(slab)

    def retire_writer(self, writer: int) -> None:
        """The writer's slabs can be read, but not written to again. O(slabs)."""
        self._orphans.update(number for number, growth in self._being_made.items() if growth.lane.kind.writer == writer)
        for slab in [slab for slab in self._slabs.values() if slab.writer == writer]:
            self.retire(slab, gone=True)

    def drop(self, slab: Slab) -> None:
        """Gives up a slab in which nothing is held."""
        del self._slabs[slab.number]
        tenant = self.tenant_of(slab)
        tenant.remove(slab)
        self._cost_bytes -= slab.cost_bytes
        self._overdrawn_bytes = max(0, min(self._overdrawn_bytes, self._cost_bytes - self.sizes.capacity_bytes))
        slab.end()
        self._dropped.append(slab)
        self._forget_if_idle(tenant)

    def take_dropped(self) -> list[Slab]:
        """Slabs to be given back by `Slab.give_back`, without the lock and before another one is made."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def clear(self) -> None:
        """Forgets everything; memory in use lives on until its last view and its last map are gone."""
        for slab in (*self._slabs.values(), *self._dropped):
            slab.close()
        self._slabs.clear()
        self._dropped.clear()
        self._being_made.clear()
        self._tenants.clear()
        self._num_unsaid = 0
        self.blocks.clear()
        self._cost_bytes = 0

    def check(self) -> None:
        """Raises `InvariantError`."""
        for tenant in self._tenants.values():
            tenant.check()
            if not self._being_made and tenant.cost_bytes != sum(slab.cost_bytes for slab in tenant.slabs()):
                raise InvariantError("a tenant's memory is miscounted")
        slabs = [slab for tenant in self._tenants.values() for slab in tenant.slabs()]
        if self._slabs != {slab.number: slab for slab in slabs}:
            raise InvariantError("slabs and tenants disagree")
        if sum(tenant.cost_bytes for tenant in self._tenants.values()) != self._cost_bytes:
            raise InvariantError("slab memory is miscounted")
        if self._cost_bytes > self.sizes.capacity_bytes + self._overdrawn_bytes:
            raise InvariantError(f"slabs of {self._cost_bytes} bytes exceed the capacity")
        if self._num_unsaid != len(self._tenants.keys() - self._shares.keys()):
            raise InvariantError("tenants without a share of their own are miscounted")
        if sum(len(tenant.entries) for tenant in self._tenants.values()) != len(self.blocks):
            raise InvariantError("a block is nobody's")

    def forget_if_empty(self, tenant: TenantMemory, lane: Lane) -> None:
        """Keeps nothing of a lane that got no memory."""
        tenant.forget_if_empty(lane)
        self._forget_if_idle(tenant)

    def _forget_if_idle(self, tenant: TenantMemory) -> None:
        if not (tenant.cost_bytes or tenant.lanes or tenant.changing) and self._tenants.get(tenant.tenant) is tenant:
            del self._tenants[tenant.tenant]
            self._num_unsaid -= tenant.tenant not in self._shares

    def _room_bytes(self) -> int:
        """What is left of the capacity; nothing when there are as many slabs as there may be."""
        if len(self._slabs) + len(self._being_made) >= self.sizes.most_slabs:
            return 0
        return max(0, self.sizes.capacity_bytes - self._cost_bytes)

    def growth(self, tenant: TenantMemory, lane: Lane) -> Growth | None:
        """A slab for this lane within what is left and the tenant's cap; None when even a small one does not fit."""
        room_bytes = self._room_bytes()
        if tenant.share.cap_bytes is not None:
            room_bytes = min(room_bytes, tenant.share.cap_bytes - tenant.cost_bytes)
        if room_bytes < lane.least_cost_bytes:
            return None
        num_slots = self.sizes.slots_of_next(
            lane.kind, lane_bytes=lane.nbytes, room_bytes=room_bytes, cap_bytes=tenant.share.cap_bytes
        )
        return self.charge(tenant, lane, num_slots)

    def charge(self, tenant: TenantMemory, lane: Lane, num_slots: int, *, overdraw: bool = False) -> Growth:
        """A slab of this size, whatever room there is. Followed by `make`, then by `add` or `cancel`.

        :param overdraw: the capacity may be exceeded by it until as much was dropped.
        """
        growth = Growth(next(self._numbers), tenant, lane, num_slots, self.sizes.cost(lane.kind.slot_bytes, num_slots))
        self._cost_bytes += growth.cost_bytes
        tenant.cost_bytes += growth.cost_bytes
        self._being_made[growth.number] = growth
        if overdraw:
            self._overdrawn_bytes = max(0, self._cost_bytes - self.sizes.capacity_bytes)
        return growth

    def _free_slot(self, entry: Entry[StoreKey]) -> None:
        """Frees the slot of an entry that nobody holds any more."""
        number, place = divmod(entry.slot, SLAB_STRIDE)
        slab = self._slabs.get(number)
        if slab is None:
            return  # after `clear`
        self.tenant_of(slab).free(slab, place)
        if slab.retired and slab.is_empty and not slab.leaving:
            self.drop(slab)
