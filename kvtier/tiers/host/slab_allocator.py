"""How size classes share the memory of a host tier: which slab is made next, and which one goes for it."""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvtier.errors import InvariantError
from kvtier.identity.keys import StoreKey, TenantId
from kvtier.memory.pages import PAGE_BYTES
from kvtier.memory.slab_layout import SLAB_STRIDE, WORD_BYTES, slab_bytes
from kvtier.tiers.host.slab import OWN_PROCESS, SizeClass, Slab, WriterSlots, make_slab

_SLABS_AT_LEAST = 8
"""A slab is at most this fraction of the capacity, so that several tenants and sizes fit beside each other."""
_CLIENT_SLABS_AT_LEAST = 32
"""A slab that clients write to is at most this fraction of the capacity: each client has slabs of its own."""

_MOST_SLOTS = 4096
"""The most slots of a slab: tiny blocks must not take memory by the dozens of MiB, nor bookkeeping by the million."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A slab that may be made: its memory is accounted for."""

    number: int
    writer_slots: WriterSlots
    num_slots: int
    nbytes: int


class SlabMemory:
    """The slabs of a tier, within its capacity. The tier's lock guards it, but for `make`, which takes none.

    A class that needs room takes what is left of the capacity, then a slab of the class that holds most, until
    shares are even. Within a class, the slab used longest ago goes first, whoever wrote it. Slabs in which somebody
    reads or writes stay, and so do those with pins, which count in their class's share.
    """

    def __init__(self, capacity_bytes: int, most_bytes: int, *, shared: bool, prefault: bool) -> None:
        """
        :param most_bytes: memory taken at a time, if a slot is not larger.
        :param shared: in memory that other processes may map.
        """
        self.capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        self._most_bytes = most_bytes
        self._shared = shared
        self._prefault = prefault
        self._classes: dict[tuple[TenantId, int], SizeClass] = {}
        """The size classes by tenant and slot size."""
        self._total_bytes = 0
        """Memory of all slabs, those being made included."""
        self._numbers = itertools.count(1)
        self._dropped: list[Slab] = []
        """Slabs that are no longer part of anything, and are to be given back."""

    def writer_slots(self, tenant: TenantId, slot_bytes: int, writer: int) -> WriterSlots:
        """The lane of this writer, made if need be."""
        size_class = self._classes.get((tenant, slot_bytes))
        if size_class is None:
            size_class = self._classes[tenant, slot_bytes] = SizeClass(tenant, slot_bytes)
        return size_class.writer_slots(writer)

    def writers(self, tenant: TenantId | None = None) -> Iterator[WriterSlots]:
        """All lanes that have memory, or only those of one tenant."""
        for size_class in self._classes.values():
            if tenant is None or size_class.tenant == tenant:
                yield from size_class.writers()

    def full_lanes(self) -> Iterator[WriterSlots]:
        """The lanes for which no further slab fits into what is left of the capacity."""
        room_bytes = self.capacity_bytes - self._total_bytes
        return (writer_slots for writer_slots in self.writers() if self._slab_bytes(writer_slots, 1) > room_bytes)

    def may_hold(self, slot_bytes: int) -> bool:
        """Whether a slot of this size fits at all."""
        return slab_bytes(slot_bytes, 1, shared=self._shared) <= self.capacity_bytes

    def grow(self, writer_slots: WriterSlots, *, young_s: float) -> tuple[Growth | None, list[StoreKey]]:
        """The next slab for this lane, if it should have one, and the keys that were evicted for it.

        :param young_s: slabs with blocks committed after that are not dropped for it.
        """
        evicted: list[StoreKey] = []
        wanted = self._wanted(writer_slots)
        while (num_slots := self._slots_within(writer_slots, self.capacity_bytes - self._total_bytes, wanted)) == 0:
            keys = self._drop_for(writer_slots, wanted, young_s)
            if keys is None:
                self._forget_if_empty(writer_slots.size_class)
                return None, evicted
            evicted += keys
        growth = Growth(next(self._numbers), writer_slots, num_slots, self._slab_bytes(writer_slots, num_slots))
        self._total_bytes += growth.nbytes
        return growth, evicted

    def take_dropped(self) -> list[Slab]:
        """Slabs to be given back by `Slab.give_back`, without the lock and before another one is made."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def make(self, growth: Growth) -> Slab:
        """The memory. Slow when prefaulting. `OSError` when there is none. Call `add` or `cancel` next."""
        return make_slab(
            growth.number, growth.writer_slots, growth.num_slots, shared=self._shared, prefault=self._prefault
        )

    def add(self, slab: Slab) -> None:
        """Puts a slab from `make` to use."""
        size_class = slab.writer_slots.size_class
        self._classes[size_class.tenant, size_class.slot_bytes] = size_class
        size_class.add(slab)
        if size_class.drop_empty(slab):  # its writer has gone in the meantime
            self._count_dropped(size_class, slab)

    def cancel(self, growth: Growth) -> None:
        """There was no memory."""
        self._total_bytes -= growth.nbytes
        self._forget_if_empty(growth.writer_slots.size_class)

    def retire(self, writer: int) -> None:
        """The writer's slabs can be read, but not written to again."""
        for size_class in list(self._classes.values()):
            for slab in size_class.retire(writer):
                self._count_dropped(size_class, slab)
            self._forget_if_empty(size_class)

    def note_freed(self, writer_slots: WriterSlots, slot: int) -> None:
        """A block of this lane was forgotten, or unpinned: a slab that nobody will write to again may be empty now."""
        size_class = writer_slots.size_class
        if self._classes.get((size_class.tenant, size_class.slot_bytes)) is not size_class:
            return  # after `clear`
        slab = size_class.slab(slot // SLAB_STRIDE)
        if slab is not None and size_class.drop_empty(slab):
            self._count_dropped(size_class, slab)

    def find(self, tenant: TenantId, number: int) -> Slab | None:
        """A slab of this tenant by number."""
        for size_class in self._classes.values():
            if size_class.tenant == tenant and (slab := size_class.slab(number)) is not None:
                return slab
        return None

    def clear(self) -> None:
        """Forgets everything; memory in use lives on until its last view and its last map are gone."""
        for size_class in self._classes.values():
            for slab in size_class.slabs():
                slab.close()
        self._classes.clear()
        self._total_bytes = 0

    def check(self, *, being_made: bool) -> None:
        """Raises `InvariantError`. `being_made`: between `grow` and `add` or `cancel`."""
        for size_class in self._classes.values():
            size_class.check()
        if self._total_bytes > self.capacity_bytes:
            raise InvariantError(f"slabs of {self._total_bytes} bytes exceed the capacity")
        if not being_made and sum(c.nbytes for c in self._classes.values()) != self._total_bytes:
            raise InvariantError("slab memory is miscounted")

    def _drop_for(self, writer_slots: WriterSlots, wanted: int, young_s: float) -> Iterable[StoreKey] | None:
        """Drops one slab so that `writer_slots` gets its room; None when it has to make do with its own."""
        own = writer_slots.size_class
        wanted_bytes = self._slab_bytes(writer_slots, wanted)
        if not writer_slots.index.num_slots:  # else a writer without a pause would keep all others out
            young_s = math.inf
        for other in sorted(self._classes.values(), key=lambda c: c.nbytes, reverse=True):
            uneven = other.nbytes - wanted_bytes >= own.nbytes + wanted_bytes
            if other is own or not (uneven or own.nbytes == 0):
                break
            dropped = other.drop_coldest(None, young_s=young_s)
            if dropped is not None:
                return self._note_dropped(other, *dropped)
        dropped = own.drop_coldest(writer_slots, young_s=young_s)
        return self._note_dropped(own, *dropped) if dropped is not None else None

    def _note_dropped(self, size_class: SizeClass, slab: Slab, evicted: list[StoreKey]) -> list[StoreKey]:
        self._count_dropped(size_class, slab)
        return evicted

    def _count_dropped(self, size_class: SizeClass, slab: Slab) -> None:
        self._total_bytes -= slab.nbytes
        self._dropped.append(slab)
        self._forget_if_empty(size_class)

    def _forget_if_empty(self, size_class: SizeClass) -> None:
        """Classes without memory are not kept, or a thousand sizes would be a thousand classes."""
        if not size_class.nbytes:
            self._classes.pop((size_class.tenant, size_class.slot_bytes), None)

    def _wanted(self, writer_slots: WriterSlots) -> int:
        """How many slots a slab of this lane should have."""
        share = _SLABS_AT_LEAST if writer_slots.writer == OWN_PROCESS else _CLIENT_SLABS_AT_LEAST
        return max(
            1, self._slots_within(writer_slots, min(self._most_bytes, self.capacity_bytes // share), _MOST_SLOTS)
        )

    def _slots_within(self, writer_slots: WriterSlots, room_bytes: int, most: int) -> int:
        """How many slots, at most `most`, fit into a slab of at most `room_bytes`."""
        overhead_bytes = 2 * PAGE_BYTES + WORD_BYTES if self._shared else PAGE_BYTES
        per_slot_bytes = writer_slots.slot_bytes + (WORD_BYTES if self._shared else 0)
        num_slots = max(0, room_bytes - overhead_bytes) // per_slot_bytes
        while num_slots < most and self._slab_bytes(writer_slots, num_slots + 1) <= room_bytes:
            num_slots += 1
        return min(most, num_slots)

    def _slab_bytes(self, writer_slots: WriterSlots, num_slots: int) -> int:
        return slab_bytes(writer_slots.slot_bytes, num_slots, shared=self._shared)
