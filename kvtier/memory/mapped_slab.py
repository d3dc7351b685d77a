"""A slab of another process, mapped into this one."""

import itertools
import os
import secrets

import numpy as np
import numpy.typing as npt

from kvtier.errors import InvalidInputError
from kvtier.memory import memfd
from kvtier.memory.slab_layout import SLAB_STRIDE, SharedSlab, slab_bytes, words_of

_serials = itertools.count(1 + secrets.randbits(62))
"""Numbers above 0 that no other process gives to its slabs."""


class MappedSlab:
    """Memory of the pool. Unmapped with the last view of it; what it shows may change at any time.

    A `kvtier.memory.slot_memory.SlotMemory`.
    """

    __slots__ = ("_memory", "_words", "num_slots", "serial", "slot_bytes", "writable")

    def __init__(self, memory: memoryview, slot_bytes: int, num_slots: int, *, writable: bool) -> None:
        """Called by `map` with memory that it has mapped and checked."""
        self._memory = memory
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self._words = memory[words_of(slot_bytes * num_slots, num_slots)].toreadonly().cast("Q")
        self.writable = writable
        self.serial = next(_serials)
        """The serial number of this map, in whatever process: the pool's numbers begin anew with each pool."""

    @classmethod
    def map(cls, shared: SharedSlab) -> "MappedSlab":
        """Maps the slab and closes its descriptor. `OSError`: no room for it in this process.

        `InvalidInputError`: it is not what the pool says, and reading it could end this process.
        """
        descriptor, writable, slot_bytes, num_slots = shared
        try:
            nbytes = slab_bytes(slot_bytes, num_slots, shared=True)
            if not memfd.is_sealed(descriptor, nbytes):
                raise InvalidInputError(f"garbled answer of the pool: a slab that is not {nbytes} sealed bytes")
            return cls(
                memfd.map_descriptor(descriptor, nbytes, writable=writable), slot_bytes, num_slots, writable=writable
            )
        finally:
            os.close(descriptor)

    @property
    def in_use(self) -> bool:
        """False once the pool has given the slab up."""
        return self._words[0] != 0

    def slot(self, slot: int, nbytes: int) -> memoryview:
        """The first bytes of a slot, by its id. `InvalidInputError`: there is no such slot, or it is smaller."""
        place = slot % SLAB_STRIDE
        if place >= self.num_slots or nbytes > self.slot_bytes:
            raise InvalidInputError(f"garbled answer of the pool: slot {place} of {self.num_slots} for {nbytes} bytes")
        start = place * self.slot_bytes
        return self._memory[start : start + nbytes]

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """`[num_slots, slot_bytes]`, a view of all slots."""
        payload = self._memory[: self.num_slots * self.slot_bytes]
        return np.frombuffer(payload, dtype=np.uint8).reshape(self.num_slots, self.slot_bytes)

    def generation(self, slot: int) -> int:
        """Returns the generation of what the slot holds now, by the slot's id."""
        return self._words[1 + slot % SLAB_STRIDE]
