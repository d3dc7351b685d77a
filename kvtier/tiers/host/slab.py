"""Slabs: the memory of the host tier, each of one tenant, one slot size and one writer."""

import math
import os
from array import array
from collections import OrderedDict

from kvtier.errors import InvariantError
from kvtier.identity.keys import StoreKey, TenantId
from kvtier.memory import memfd
from kvtier.memory.pages import map_memory
from kvtier.memory.slab_layout import SLAB_STRIDE, WORD_BYTES, SharedSlab, slab_bytes, words_of
from kvtier.tiers.host.slot_index import Entry, SlotIndex

SLOT_ALIGN_BYTES = 64
"""Slots start at cache lines; a slot is its payload length rounded up to this."""
OWN_PROCESS = 0
"""The writer of slabs that this process fills itself; other writers are clients that map them."""


class Slab:
    """One piece of memory cut into slots. The tier's lock guards its words."""

    __slots__ = (
        "_generations",
        "descriptor",
        "memory",
        "nbytes",
        "num_pins",
        "num_slots",
        "number",
        "words",
        "writer_slots",
    )

    def __init__(
        self, number: int, writer_slots: "WriterSlots", memory: memoryview, num_slots: int, descriptor: int | None
    ) -> None:
        self.number = number
        self.writer_slots = writer_slots
        self.memory = memory
        self.nbytes = len(memory)
        self.num_slots = num_slots
        self.num_pins = 0
        """Pins of its blocks (`HostTier.pin`): with any it stays, for hours perhaps."""
        self.descriptor = descriptor
        """Descriptor of memory that other processes may map; None once given back, or where it is this process's
        alone."""
        self.words: memoryview | None = None
        """The slab's words (`words_of`); None if memory is not shared. Never read here: its writer could change them,
        too."""
        self._generations = array("Q", bytes(WORD_BYTES * num_slots)) if descriptor is not None else None
        """What `words` says of each slot's content."""
        if descriptor is not None:
            self.words = memory[words_of(num_slots * writer_slots.slot_bytes, num_slots)].cast("Q")
            self.words[0] = 1

    @property
    def slots(self) -> range:
        """Ids of its slots."""
        first = self.number * SLAB_STRIDE
        return range(first, first + self.num_slots)

    def renew(self, place: int) -> int:
        """Begins another generation in a slot, before anybody may write there; returns it, 0 in memory of our own."""
        if self._generations is None or self.words is None:
            return 0
        self._generations[place] += 1
        self.words[place + 1] = self._generations[place]
        return self._generations[place]

    def share(self, writer: int) -> SharedSlab | None:
        """A descriptor for a process that is to map the slab: to write, if the slab is `writer`'s, and else to read.

        A descriptor of its own, which the caller closes; `OSError`: none to be had. None once given back, or where
        the memory is this process's alone.
        """
        if self.descriptor is None:
            return None
        own = self.writer_slots.writer == writer and not self.writer_slots.retired
        descriptor = os.dup(self.descriptor) if own else memfd.reopen_read_only(self.descriptor)
        return SharedSlab(descriptor, own, self.writer_slots.slot_bytes, self.num_slots)

    def give_back(self) -> None:
        """Shared memory goes back to the system at once, whoever maps it; other memory with its last view.

        Slow, a quarter of a millisecond per MiB: hold no lock. Once, after `end`.
        """
        if self.descriptor is not None:
            memfd.punch(self.descriptor, self.nbytes)
            self.close()

    def end(self) -> None:
        """Tells all who map it that nothing in it holds any more."""
        if self.words is not None:
            self.words[:] = memoryview(bytes(self.words.nbytes)).cast("Q")

    def close(self) -> None:
        """Gives up the descriptor; the memory lives until its last view and its last map are gone. Idempotent."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def make_slab(number: int, writer_slots: "WriterSlots", num_slots: int, *, shared: bool, prefault: bool) -> Slab:
    """New memory, not yet part of anything. Slow when prefaulting: hold no lock. `OSError`: there is none."""
    nbytes = slab_bytes(writer_slots.slot_bytes, num_slots, shared=shared)
    if not shared:
        return Slab(number, writer_slots, map_memory(nbytes, prefault=prefault), num_slots, None)
    descriptor = memfd.create("kvtier-slab", nbytes)
    try:
        return Slab(number, writer_slots, memfd.map_new(descriptor, nbytes, prefault=prefault), num_slots, descriptor)
    except BaseException:
        os.close(descriptor)
        raise


class WriterSlots:
    """The slots of a size class that one writer fills: one index, one LRU. The tier's lock guards it."""

    def __init__(self, size_class: "SizeClass", writer: int) -> None:
        self.size_class = size_class
        self.slot_bytes = size_class.slot_bytes
        self.writer = writer
        self.retired = False
        """The writer is gone: what it wrote can be read, and is dropped with its slab."""
        self.index: SlotIndex[StoreKey] = SlotIndex(0)


class SizeClass:
    """All slabs of one tenant and slot size, whoever writes them. The tier's lock guards it."""

    def __init__(self, tenant: TenantId, slot_bytes: int) -> None:
        self.tenant = tenant
        self.slot_bytes = slot_bytes
        self.nbytes = 0
        """Memory of its slabs."""
        self._slabs: OrderedDict[int, Slab] = OrderedDict()
        """The slabs by number, the one used longest ago first."""
        self._writers: dict[int, WriterSlots] = {}
        """The lanes of the writers that are still there, by writer."""

    def writer_slots(self, writer: int) -> WriterSlots:
        """The writer's lane, made if need be."""
        writer_slots = self._writers.get(writer)
        if writer_slots is None:
            writer_slots = self._writers[writer] = WriterSlots(self, writer)
        return writer_slots

    def writers(self) -> list[WriterSlots]:
        """The lanes that have memory, those of retired writers included. O(slabs)."""
        return list({slab.writer_slots: None for slab in self._slabs.values()})

    def slabs(self) -> list[Slab]:
        """All slabs, the one used longest ago first."""
        return list(self._slabs.values())

    def slab(self, number: int) -> Slab | None:
        return self._slabs.get(number)

    def add(self, slab: Slab) -> None:
        """Takes in a new slab. One whose writer has gone meanwhile holds nothing, and should be dropped."""
        self._slabs[slab.number] = slab
        self.nbytes += slab.nbytes
        slab.writer_slots.index.add_slots(slab.slots)

    def retire(self, writer: int) -> list[Slab]:
        """Lets nobody write to the writer's slabs again; returns those that were dropped because they hold nothing."""
        writer_slots = self._writers.pop(writer, None)
        if writer_slots is None:
            return []
        writer_slots.retired = True
        return [slab for slab in self.slabs() if slab.writer_slots is writer_slots and self.drop_empty(slab)]

    def drop_empty(self, slab: Slab) -> bool:
        """Drops a slab of a retired lane in which nothing is held; False when it is something else."""
        if not slab.writer_slots.retired or slab.writer_slots.index.holds(slab.slots):
            return False
        return self._drop(slab) is not None

    def drop_coldest(self, stop_at: WriterSlots | None, *, young_s: float) -> tuple[Slab, list[StoreKey]] | None:
        """Drops the slab used longest ago that nobody reads or writes; returns it and the keys it held.

        :param stop_at: give up at this lane's coldest slab without pins; what follows it was used later.
        :param young_s: slabs with blocks committed after that stay.
        """
        for slab in self._slabs.values():
            if slab.num_pins:  # were it to stop anybody, a lane could have nothing that it may drop, for hours
                continue
            if slab.writer_slots is stop_at:
                return None
            evicted = self._drop(slab, young_s=young_s)
            if evicted is not None:
                return slab, evicted
        return None

    def view(self, entry: Entry[StoreKey], nbytes: int) -> memoryview:
        """The first `nbytes` of the entry's slot, writable; keeps the slab's memory alive."""
        number, place = divmod(entry.slot, SLAB_STRIDE)
        start = place * self.slot_bytes
        return self._slabs[number].memory[start : start + nbytes]

    def slab_of(self, entry: Entry[StoreKey]) -> Slab:
        """The slab that an entry's slot is in."""
        return self._slabs[entry.slot // SLAB_STRIDE]

    def renew(self, entry: Entry[StoreKey]) -> None:
        """Begins another generation in the entry's slot: a reader that still copies the old content will notice."""
        number, place = divmod(entry.slot, SLAB_STRIDE)
        entry.generation = self._slabs[number].renew(place)

    def note_use(self, writer_slots: WriterSlots, entry: Entry[StoreKey]) -> None:
        """Touches the block and its slab."""
        writer_slots.index.touch(entry.key)
        self._slabs.move_to_end(entry.slot // SLAB_STRIDE)

    def check(self) -> None:
        """Raises `InvariantError` when slabs and indexes disagree."""
        for writer_slots in self.writers():
            writer_slots.index.check()
            if writer_slots.index.num_slots != sum(
                slab.num_slots for slab in self.slabs() if slab.writer_slots is writer_slots
            ):
                raise InvariantError(f"size class {self.slot_bytes}: index and slabs differ in slots")
        if any(
            slab.num_pins < 0 or (slab.num_pins and not slab.writer_slots.index.holds(slab.slots))
            for slab in self.slabs()
        ):
            raise InvariantError(f"size class {self.slot_bytes}: pins are miscounted")
        if self.nbytes != sum(slab.nbytes for slab in self.slabs()):
            raise InvariantError(f"size class {self.slot_bytes}: memory is miscounted")

    def _drop(self, slab: Slab, *, young_s: float = math.inf) -> list[StoreKey] | None:
        """The keys that it held; None, and nothing changed, when it is in use or holds what is too young."""
        evicted = slab.writer_slots.index.remove_slots(slab.slots, young_s=young_s)
        if evicted is not None:
            del self._slabs[slab.number]
            self.nbytes -= slab.nbytes
            slab.end()
        return evicted
