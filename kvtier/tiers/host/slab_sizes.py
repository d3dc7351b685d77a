"""How large slabs are, and what they cost."""

from kvtier.memory.pages import PAGE_BYTES
from kvtier.memory.slab_layout import WORD_BYTES, slab_bytes
from kvtier.system.open_files import open_files_limit
from kvtier.tiers.host.slab import OWN_PROCESS, SlabKind

_LEAST_PART = 1024
"""A slab has at least this fraction of the capacity, if a slot has no more: a hundred lengths have a hundred slabs that
are half empty, and descriptors are few. Lanes grow by larger ones."""
_LEAST_PART_OF_CAP = 16
"""The smallest slabs of a tenant with a cap are at most this fraction of it, so that several sizes fit into it."""
_PART_OF_LANE = 16
"""A lane grows by this fraction of what it has: so much of it may be free and unused."""
_OWN_PART = 8
"""A slab is at most this fraction of the capacity, so that several tenants and sizes fit beside each other."""
_CLIENT_PART = 32
"""A slab that clients write to is at most this fraction of the capacity: each client has slabs of its own."""
_MOST_SLOTS = 4096
"""The most slots of a slab: tiny blocks must not take memory by the dozens of MiB, nor bookkeeping by the million."""
_FEW_SLABS = 2048
"""The most slabs, and so descriptors, or twice as many slabs of `most_bytes` as fill the capacity, if that is more."""

_PART_OF_OPEN_FILES = 4
"""Slabs that clients map are at most this fraction of the files that the process may have open. Each has two, as a map
of Python's has one of its own: half of all is left for connections, however many writers a tenant has slabs for."""


class SlabSizes:
    """The arithmetic of a tier's capacity. Immutable."""

    def __init__(self, capacity_bytes: int, most_bytes: int, *, shared: bool, block_overhead_bytes: int) -> None:
        """
        :param most_bytes: memory taken at a time, if a slot is not larger.
        :param shared: slabs have words.
        :param block_overhead_bytes: what a slot costs besides its memory.
        """
        self.capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        most_slabs = max(_FEW_SLABS, 2 * self.capacity_bytes // max(1, most_bytes))
        self.most_slabs = min(most_slabs, open_files_limit() // _PART_OF_OPEN_FILES) if shared else most_slabs
        """The most slabs that there may be."""
        self._most_bytes = most_bytes
        self._shared = shared
        self.block_overhead_bytes = block_overhead_bytes
        """What a slot costs besides its memory."""

    def cost(self, slot_bytes: int, num_slots: int) -> int:
        """What a slab of so many slots takes of the capacity."""
        return slab_bytes(slot_bytes, num_slots, shared=self._shared) + num_slots * self.block_overhead_bytes

    def may_hold(self, slot_bytes: int) -> bool:
        """Whether a slot of this size fits at all."""
        return self.cost(slot_bytes, 1) <= self.capacity_bytes

    def least_cost(self, slot_bytes: int, writer: int, cap_bytes: int | None) -> int:
        """What the smallest slab costs that a lane may get, of a tenant with this cap."""
        least_bytes = min(self._least_of(cap_bytes), self._most_of(writer))
        return self.cost(slot_bytes, max(1, self._slots_within(slot_bytes, least_bytes)))

    def slots_of_next(self, kind: SlabKind, *, lane_bytes: int, room_bytes: int, cap_bytes: int | None) -> int:
        """How many slots the next slab has of a lane with `lane_bytes`, within a room for the smallest at least."""
        wanted_bytes = max(self._least_of(cap_bytes), lane_bytes // _PART_OF_LANE)
        return max(1, self._slots_within(kind.slot_bytes, min(room_bytes, wanted_bytes, self._most_of(kind.writer))))

    def _least_of(self, cap_bytes: int | None) -> int:
        """The bytes of the smallest slabs of a tenant with this cap."""
        least_bytes = self.capacity_bytes // _LEAST_PART
        return least_bytes if cap_bytes is None else min(least_bytes, cap_bytes // _LEAST_PART_OF_CAP)

    def _most_of(self, writer: int) -> int:
        """The most bytes of a slab for this writer."""
        return min(self._most_bytes, self.capacity_bytes // (_OWN_PART if writer == OWN_PROCESS else _CLIENT_PART))

    def _slots_within(self, slot_bytes: int, room_bytes: int) -> int:
        """How many slots, at most 4096, fit into a slab that costs at most `room_bytes`."""
        per_slot_bytes = slot_bytes + self.block_overhead_bytes + (WORD_BYTES if self._shared else 0)
        pages_bytes = 2 * PAGE_BYTES + WORD_BYTES if self._shared else PAGE_BYTES
        num_slots = min(_MOST_SLOTS, max(0, room_bytes - pages_bytes) // per_slot_bytes)
        while num_slots < _MOST_SLOTS and self.cost(slot_bytes, num_slots + 1) <= room_bytes:
            num_slots += 1
        return num_slots
