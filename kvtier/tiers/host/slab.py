"""Slabs: the memory of the host tier, each of one tenant, one slot size and one writer."""

import os
from array import array
from typing import NamedTuple

from kvtier.identity.keys import StoreKey, TenantId
from kvtier.memory import memfd
from kvtier.memory.pages import map_memory
from kvtier.memory.slab_layout import SLAB_STRIDE, WORD_BYTES, SharedSlab, slab_bytes, words_of
from kvtier.tiers.host.entries import Entry

SLOT_ALIGN_BYTES = 64
"""Slots start at cache lines; a slot is its payload length rounded up to this."""
OWN_PROCESS = 0
"""The writer of slabs that this process fills itself; other writers are clients that map them."""


class SlabKind(NamedTuple):
    """The tenant that has the slots, their size and their writer: a lane has the slabs of one kind."""

    tenant: TenantId
    slot_bytes: int
    writer: int


class Slab:
    """One piece of memory cut into slots. The tier's lock guards it."""

    __slots__ = (
        "_free",
        "_generations",
        "cost_bytes",
        "descriptor",
        "entries",
        "kind",
        "leaving",
        "memory",
        "nbytes",
        "num_pins",
        "num_reserved",
        "num_slots",
        "number",
        "retired",
        "words",
        "writer",
    )

    def __init__(
        self, number: int, kind: SlabKind, memory: memoryview, num_slots: int, descriptor: int | None, cost_bytes: int
    ) -> None:
        self.number = number
        self.kind = kind
        """The tenant, slot size and writer that it belongs to, or did when it was retired."""
        self.memory = memory
        self.nbytes = len(memory)
        self.cost_bytes = cost_bytes
        """What it takes of the capacity: its memory, and the bookkeeping of as many blocks as it has slots."""
        self.num_slots = num_slots
        self.entries: list[Entry[StoreKey] | None] = [None] * num_slots
        """The block that holds each slot, by place."""
        self._free = list(range(num_slots - 1, -1, -1))
        """Places that nobody holds."""
        self.num_reserved = 0
        """Places that blocks of other slabs are being copied to."""
        self.num_pins = 0
        """Pins of its blocks (`HostTier.pin`): with any it stays, for hours perhaps."""
        self.writer: int | None = kind.writer
        """The one that may map it for writing. None: that client is gone."""
        self.retired = False
        """Takes no new block: its writer is gone, or may write to it at any time. It goes when it is empty."""
        self.leaving = False
        """Its blocks are being copied to other slabs, and it takes no new one."""
        self.descriptor = descriptor
        """Descriptor of memory that other processes may map; None once given back, or where it is this process's
        alone."""
        self.words: memoryview | None = None
        """The slab's words (`words_of`); None if memory is not shared. Never read here: its writer could change them,
        too."""
        self._generations = array("Q", bytes(WORD_BYTES * num_slots)) if descriptor is not None else None
        """What `words` says of each slot's content."""
        if descriptor is not None:
            self.words = memory[words_of(num_slots * kind.slot_bytes, num_slots)].cast("Q")
            self.words[0] = 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Slots with a block, readable or not, or one being written."""
        return self.num_slots - len(self._free) - self.num_reserved

    @property
    def is_empty(self) -> bool:
        return len(self._free) == self.num_slots

    @property
    def is_at_rest(self) -> bool:
        """All its blocks may be copied elsewhere: nobody writes to it or reads from it. O(slots)."""
        return not self.num_reserved and all(entry is None or entry.is_at_rest for entry in self.entries)

    def slot_id(self, place: int) -> int:
        """The slot's number among all slots."""
        return self.number * SLAB_STRIDE + place

    def take(self) -> int:
        """A free place, the caller's from now on."""
        return self._free.pop()

    def free(self, place: int) -> None:
        """Frees a place that nobody holds any more."""
        self.entries[place] = None
        self._free.append(place)

    def view(self, place: int, nbytes: int) -> memoryview:
        """The first `nbytes` of a slot, writable; keeps the slab's memory alive."""
        start = place * self.kind.slot_bytes
        return self.memory[start : start + nbytes]

    def renew(self, place: int) -> int:
        """Begins another generation in a slot, before anybody may write there; returns it, 0 in memory of our own.

        A reader that still copies the old content will notice.
        """
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
        own = self.writer == writer
        descriptor = os.dup(self.descriptor) if own else memfd.reopen_read_only(self.descriptor)
        return SharedSlab(descriptor, own, self.kind.slot_bytes, self.num_slots)

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


def map_slab(slot_bytes: int, num_slots: int, *, shared: bool, prefault: bool) -> tuple[memoryview, int | None]:
    """New memory for a slab, and its descriptor if it is shared. Slow when prefaulting: hold no lock.

    `OSError`: there is none.
    """
    nbytes = slab_bytes(slot_bytes, num_slots, shared=shared)
    if not shared:
        return map_memory(nbytes, prefault=prefault), None
    descriptor = memfd.create("kvtier-slab", nbytes)
    try:
        return memfd.map_new(descriptor, nbytes, prefault=prefault), descriptor
    except BaseException:
        os.close(descriptor)
        raise
