"""Slabs: the memory of the host tier, each of one tenant and one slot size."""

from kvtier.errors import InvariantError
from kvtier.eviction import LRU
from kvtier.keys import StoreKey, TenantId
from kvtier.tiers.memory import PAGE_BYTES, map_memory, round_up
from kvtier.tiers.slot_index import Entry, SlotIndex

SLOT_ALIGN_BYTES = 64
"""Slots start at cache lines; a slot is its payload length rounded up to this."""
_SLAB_STRIDE = 1 << 32
"""Slot id = slab number * stride + place in the slab, so that a slab's ids are one range."""


class Slab:
    """One piece of memory cut into slots. Immutable but for `last_use`."""

    __slots__ = ("last_use", "memory", "nbytes", "num_slots")

    def __init__(self, memory: memoryview, num_slots: int) -> None:
        self.memory = memory
        self.nbytes = len(memory)
        self.num_slots = num_slots
        self.last_use = 0
        """Counter value of the last use of one of its blocks. Guarded by the tier's lock."""


class SizeClass:
    """All slabs of one tenant and slot size, under one index and one LRU. The tier's lock guards it."""

    def __init__(self, tenant: TenantId, slot_bytes: int) -> None:
        self.tenant = tenant
        self.slot_bytes = slot_bytes
        self.index: SlotIndex[StoreKey] = SlotIndex(0, LRU())
        self.nbytes = 0
        """Memory of its slabs."""
        self._slabs: dict[int, Slab] = {}
        self._next_number = 0
        """Slab numbers are never used again, so a slot id means one place for good."""

    def slots_within(self, room_bytes: int) -> int:
        """How many slots fit into a slab of at most `room_bytes`, whole pages counted."""
        return room_bytes // PAGE_BYTES * PAGE_BYTES // self.slot_bytes

    def map_slab(self, num_slots: int, *, prefault: bool) -> Slab:
        """New memory, not yet part of the class. Slow when prefaulting: hold no lock."""
        return Slab(map_memory(self.slab_bytes(num_slots), prefault=prefault), num_slots)

    def slab_bytes(self, num_slots: int) -> int:
        """Memory of a slab of `num_slots`: whole pages."""
        return round_up(num_slots * self.slot_bytes, PAGE_BYTES)

    def add(self, slab: Slab) -> None:
        first = self._next_number * _SLAB_STRIDE
        self._slabs[self._next_number] = slab
        self._next_number += 1
        self.nbytes += slab.nbytes
        self.index.add_slots(range(first, first + slab.num_slots))

    def drop_coldest(self) -> tuple[int, list[StoreKey]] | None:
        """Gives back the slab used longest ago that nobody reads or writes: its size and the keys it held."""
        for number, slab in sorted(self._slabs.items(), key=lambda item: item[1].last_use):
            first = number * _SLAB_STRIDE
            evicted = self.index.remove_slots(range(first, first + slab.num_slots))
            if evicted is not None:
                del self._slabs[number]
                self.nbytes -= slab.nbytes
                return slab.nbytes, evicted
        return None

    def view(self, entry: Entry[StoreKey], nbytes: int) -> memoryview:
        """The first `nbytes` of the entry's slot, writable; keeps the slab's memory alive."""
        number, place = divmod(entry.slot, _SLAB_STRIDE)
        start = place * self.slot_bytes
        return self._slabs[number].memory[start : start + nbytes]

    def note_use(self, entry: Entry[StoreKey], now: int) -> None:
        """Touches the block and its slab. `now` grows with every use of the tier."""
        self.index.touch(entry.key)
        self._slabs[entry.slot // _SLAB_STRIDE].last_use = now

    def check(self) -> None:
        """Raises `InvariantError` when slabs and index disagree."""
        self.index.check()
        if self.index.num_slots != sum(slab.num_slots for slab in self._slabs.values()):
            raise InvariantError(f"size class {self.slot_bytes}: index and slabs differ in slots")
        if self.nbytes != sum(slab.nbytes for slab in self._slabs.values()):
            raise InvariantError(f"size class {self.slot_bytes}: memory is miscounted")
