"""Memory for a block that finds no slot: who gives it up, which blocks are evicted, and which slab is emptied."""

import math

from kvtier.clock import MONOTONIC
from kvtier.identity.keys import StoreKey
from kvtier.tiers.common.shares import gives_way
from kvtier.tiers.host.lane import Lane
from kvtier.tiers.host.relocation import Growth, Relocation
from kvtier.tiers.host.slab import OWN_PROCESS, Slab
from kvtier.tiers.host.slab_memory import SlabMemory
from kvtier.tiers.host.tenant_memory import TenantMemory

_MOST_STEPS, _MOST_S = 512, 2e-3
"""Blocks that are evicted, and the time that this may take, until the lock is let go of once: others wait meanwhile."""
_MOST_IDLE = 4
"""When one in so many bytes of a tenant is free and no slab can be emptied all the same, as each has readers or is the
only one of its lane, a slab is dropped with what is in it. Else nearly all would be evicted before one is empty."""


class Reclaim:
    """Finds slots for lanes that have none. The tier's lock guards it.

    A lane without a free slot gets a slab of what is left of the capacity. When nothing is left, blocks are evicted,
    the coldest first, until the lane has a slot again or some other slab can be emptied and given back: blocks of
    the tenant that is furthest above its share, if the lane's tenant is owed what that one has, and else of its
    own tenant (`kvtier.tiers.common.shares`).
    """

    def __init__(self, memory: SlabMemory) -> None:
        self._memory = memory
        self._evicted: list[StoreKey] = []
        """Keys that were evicted since somebody asked."""

    def make_room(
        self, tenant: TenantMemory, lane: Lane, *, young_s: float, most_moved_bytes: int
    ) -> Growth | Relocation | bool:
        """Evicts until this lane of the tenant has a free slot, or may have one when what is returned was carried out.

        True: look again, perhaps at once. False: nothing may go.

        :param young_s: blocks of its own tenant that were committed after that stay, if it has any memory.
        :param most_moved_bytes: not more than that is to be copied.
        """
        young_s = young_s if lane.slabs else math.inf  # else a writer without a pause would keep all others out
        barren: set[TenantMemory] = set()
        lender: TenantMemory | None = None
        until_s = MONOTONIC() + _MOST_S
        for _ in range(_MOST_STEPS):
            if lane.num_free:
                return True
            growth = self._memory.growth(tenant, lane)
            if growth is not None:
                return growth
            lender = lender or self._lender(tenant, lane, barren)
            own = lender is tenant
            outcome = self._give_way(lender, young_s if own else math.inf, most_moved_bytes, own=own)
            if isinstance(outcome, Relocation):
                return outcome
            if outcome is None and own:
                if not self._evict_of(tenant, lane, young_s):
                    self._memory.forget_if_empty(lender, lane)
                    return False
            elif outcome is None:
                barren.add(lender)
            elif MONOTONIC() >= until_s:
                return True
            lender = lender if outcome is False else None
        return True

    def shrink(self, tenant: TenantMemory, young_s: float, most_moved_bytes: int) -> Relocation | bool:
        """Evicts what the tenant has above its cap, as `make_room` does for the tenant itself.

        True: look again, there is more. False: it has no more than its cap, or the rest may not go now.
        """
        until_s = MONOTONIC() + _MOST_S
        for _ in range(_MOST_STEPS):
            outcome = self._give_way(tenant, young_s, most_moved_bytes, own=True) if tenant.is_above_cap else None
            if outcome is None:
                return False
            if isinstance(outcome, Relocation):
                return outcome
            if MONOTONIC() >= until_s:
                return True
        return True

    def take_evicted(self) -> list[StoreKey]:
        """The keys that were evicted since the last time, in order."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def _lender(self, own: TenantMemory, lane: Lane, barren: set[TenantMemory]) -> TenantMemory:
        """The tenant that gives up a slab: the one furthest above its share if it must give way, else `own`."""
        nbytes = lane.least_cost_bytes
        if own.share.cap_bytes is not None and own.cost_bytes + nbytes > own.share.cap_bytes:
            return own
        if self._memory.has_one_tenant:
            return own
        others = [tenant for tenant in self._memory.others(own) if tenant not in barren and tenant.may_lend]
        furthest = max(others, key=lambda tenant: tenant.share.excess(tenant.cost_bytes), default=own)
        if furthest is not own and gives_way(furthest.share, furthest.cost_bytes, own.share, own.cost_bytes, nbytes):
            return furthest
        return own

    def _give_way(
        self, lender: TenantMemory, young_s: float, most_moved_bytes: int, *, own: bool
    ) -> Relocation | bool | None:
        """Does one thing so that the lender has a slab less: what is returned, or that it was dropped (True), or that
        something was evicted for it (False). None: nothing may go."""
        spare_bytes = None if own else lender.cost_bytes - lender.share.guaranteed_bytes
        slab = lender.slab_to_empty(most_moved_bytes, spare_bytes)
        if slab is not None and slab.is_empty:
            self._memory.drop(slab)
            return True
        if slab is not None and (relocation := self._relocation(slab)) is not None:
            return relocation
        if lender.idle_bytes * _MOST_IDLE <= lender.cost_bytes:
            if self._evict(lender, young_s):
                return False
            if lender.entries.coldest(1):  # which is too young, as all behind it are
                return None
        slab = lender.slab_to_drop(spare_bytes, young_s)
        if slab is not None:
            self._evict_all(slab)
            return True
        return None

    def _evict(self, tenant: TenantMemory, young_s: float) -> bool:
        """Evicts the tenant's coldest block that may go."""
        entry = tenant.entries.evict(young_s)
        if entry is not None:
            self._evicted.append(entry.key)
        return entry is not None

    def _evict_all(self, slab: Slab) -> None:
        """Evicts what is in a slab that is at rest, and drops it."""
        for entry in list(slab.entries):
            if entry is not None:
                self._evicted.append(entry.key)
                entry.owner.forget(entry, evicted=True)
        if self._memory.has(slab):  # a retired one has gone with its last block
            self._memory.drop(slab)

    def _evict_of(self, tenant: TenantMemory, lane: Lane, young_s: float) -> bool:
        """Evicts a lane's coldest block, if it is among the coldest of its tenant and may go. O(blocks looked at)."""
        if tenant.entries.are_all_young(young_s):
            return False
        for key in tenant.entries.coldest(_MOST_STEPS):
            entry = self._memory.blocks[key]
            may_go = entry.is_at_rest and entry.since_s <= young_s
            if may_go and self._memory.slab_of(entry).number in lane.slabs:
                self._evicted.append(key)
                entry.owner.forget(entry, evicted=True)
                return True
        return False

    def _relocation(self, slab: Slab) -> Relocation | None:
        """Begins to empty a slab that is at rest: into free slots of its lane, or of this process's own if it has none.

        If those are not enough, into a slab that is made for it, for which the capacity is exceeded until then. None:
        it is exceeded already.
        """
        tenant, growth = self._memory.tenant_of(slab), None
        lane = tenant.lane(slab.kind.slot_bytes, OWN_PROCESS if slab.retired else slab.kind.writer)
        if slab.retired and lane.num_free < slab.num_held:
            if self._memory.is_overdrawn:
                self._memory.forget_if_empty(tenant, lane)
                return None
            # With room for those of other such slabs, or each of them would have one of its own again.
            growth = self._memory.charge(tenant, lane, max(slab.num_held, slab.num_slots // 2), overdraw=True)
        relocation = Relocation(slab, tenant, lane, growth)
        relocation.begin()
        return relocation
