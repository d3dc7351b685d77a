"""The slabs of a host tier between the moment they are charged and the moment they are put to use."""

from kvtier.identity.keys import tenant_id
from kvtier.policies.lru import LRU
from kvtier.tiers.host.slab_memory import SlabMemory
from kvtier.tiers.host.slab_sizes import SlabSizes

KIB = 1024


def test_a_lane_that_is_forgotten_while_its_first_slab_is_made_loses_no_slab() -> None:
    sizes = SlabSizes(1024 * KIB, 64 * KIB, shared=False, block_overhead_bytes=0)
    memory = SlabMemory(sizes, LRU, shared=False, prefault=False)
    tenant = memory.tenant(tenant_id("red"))
    lane = tenant.lane(4 * KIB, 0)
    first = memory.growth(tenant, lane)
    assert first is not None
    memory.forget_if_empty(tenant, lane)
    again = tenant.lane(4 * KIB, 0)
    second = memory.charge(tenant, again, 4)
    memory.add(memory.make(first))
    memory.add(memory.make(second))
    memory.check()
    assert again.num_slots == first.num_slots + second.num_slots
    memory.clear()
