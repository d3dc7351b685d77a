"""Lanes: the slots that one writer fills for one tenant, all of one size, in however many slabs."""

import sys

from kvtier.errors import InvariantError
from kvtier.tiers.host.slab import Slab, SlabKind

_TRIED_SLABS = 4
"""Slabs of a lane that are looked at before it is left alone until another of its slots is freed: a look takes a
microsecond per 20 slots, and those that are read from or written to stay so for a while."""


class Lane:
    """Hands out slots and takes them back; it does not decide which block loses its slot. The tier's lock guards it."""

    def __init__(self, kind: SlabKind, least_cost_bytes: int) -> None:
        self.kind = kind
        self.least_cost_bytes = least_cost_bytes
        """What the smallest slab costs that it may get."""
        self.nbytes = 0
        """Memory of its slabs."""
        self.num_slots = 0
        """Slots of its slabs, those that are leaving included."""
        self.num_free = 0
        """Slots that can be taken: none of slabs that are leaving."""
        self.slabs: dict[int, Slab] = {}
        """Its slabs by number; retired ones are not among them."""
        self._open: dict[Slab, None] = {}
        """Slabs with slots that can be taken, in the order in which they are filled."""
        self._smallest = sys.maxsize
        """Slots of its smallest slab; more than there can be if it has none."""

    @property
    def may_yield(self) -> bool:
        """Whether so many slots are free that all blocks of some slab may fit into the others."""
        return self.num_free >= self._smallest

    def add(self, slab: Slab) -> None:
        """Takes in a new slab."""
        self.slabs[slab.number] = slab
        self.nbytes += slab.nbytes
        self.num_slots += slab.num_slots
        self._smallest = min(self._smallest, slab.num_slots)
        self.open(slab)

    def remove(self, slab: Slab) -> None:
        """Lets go of a slab, with what is in it. O(slabs)."""
        self.close(slab)
        del self.slabs[slab.number]
        self.nbytes -= slab.nbytes
        self.num_slots -= slab.num_slots
        self._smallest = min((other.num_slots for other in self.slabs.values()), default=sys.maxsize)

    def take(self) -> tuple[Slab, int]:
        """A free slot, of which there must be one: its slab and place."""
        slab = next(iter(self._open))
        place = slab.take()
        self.num_free -= 1
        if not slab.num_free:
            del self._open[slab]
        return slab, place

    def free(self, slab: Slab, place: int) -> bool:
        """Frees a slot of one of its slabs, which nobody holds any more. Returns whether it `may_yield` now."""
        slab.free(place)
        if slab.leaving:
            return False
        self._open[slab] = None
        self.num_free += 1
        return self.num_free >= self._smallest

    def close(self, slab: Slab) -> None:
        """Takes no more slots from this slab. Idempotent."""
        if slab in self._open:
            del self._open[slab]
            self.num_free -= slab.num_free

    def open(self, slab: Slab) -> None:
        """Slots may be taken from this slab, which was closed."""
        if slab.num_free:
            self._open[slab] = None
            self.num_free += slab.num_free

    def slab_to_empty(self, most_bytes: int) -> Slab | None:
        """The slab with the fewest blocks, if they fit into free slots of the others and may be copied there now.

        :param most_bytes: not more than that is to be copied. O(slabs), and O(slots) of a few.
        """
        fitting = [
            slab
            for slab in self.slabs.values()
            if slab.num_slots <= self.num_free
            and not (slab.leaving or slab.num_pins or slab.num_reserved)
            and slab.num_held * self.kind.slot_bytes <= most_bytes
        ]
        fitting.sort(key=lambda slab: slab.num_held)
        return next((slab for slab in fitting[:_TRIED_SLABS] if slab.is_at_rest), None)

    def check(self) -> None:
        """Raises `InvariantError` when it is miscounted. O(slots)."""
        slabs = self.slabs.values()
        taking = [slab for slab in slabs if not slab.leaving and slab.num_free]
        if set(taking) != self._open.keys() or self.num_free != sum(slab.num_free for slab in taking):
            raise InvariantError(f"lane of {self.kind.slot_bytes} bytes: free slots are miscounted")
        if (self.nbytes, self.num_slots) != (sum(s.nbytes for s in slabs), sum(s.num_slots for s in slabs)):
            raise InvariantError(f"lane of {self.kind.slot_bytes} bytes: slabs are miscounted")
        if any(slab.retired or slab.kind != self.kind for slab in slabs):
            raise InvariantError(f"lane of {self.kind.slot_bytes} bytes: has a slab that is not its own")
