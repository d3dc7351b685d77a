"""Takes everything of one tenant out of a host tier."""

from collections.abc import Iterator

from kvtier.identity.keys import StoreKey, TenantId
from kvtier.tiers.host.slab_changes import give_back
from kvtier.tiers.host.slots import HostSlots


def keys_of(slots: HostSlots, tenant: TenantId) -> Iterator[list[StoreKey]]:
    """All keys of a tenant, those being written included, a slab's at a time. What changes meanwhile may be missed.

    Holds the lock for one slab at a time.
    """
    with slots.lock:
        numbers = [slab.number for each in slots.memory.tenants(tenant) for slab in each.slabs()]
    for number in numbers:
        with slots.lock:
            slab = slots.memory.find(tenant, number)
            held = slab.entries if slab is not None else []
            found = [e.key for e in held if e is not None and slots.memory.blocks.get(e.key) is e]
        yield found


def retire_tenant(slots: HostSlots, tenant: TenantId) -> int:
    """Retires all slabs of the tenant: none takes another block, and those without any go back to the system. Returns
    the bytes of all others, which go with the last block that is in use there. O(slabs)."""
    with slots.lock:
        for each in list(slots.memory.tenants(tenant)):
            for slab in list(each.slabs()):
                slots.memory.retire(slab, gone=False)
        left_bytes = sum(each.cost_bytes for each in slots.memory.tenants(tenant))
        dropped = slots.memory.take_dropped()
    give_back(dropped)
    return left_bytes
