"""Which block continues which, and which blocks no cached block continues."""

from kvtier.policies.candidates import Candidates, Segment
from kvtier.policies.use_order import NO_SLOT, length_at_first


class Chains:
    """The parent of each block, as far as it is known. A block that has no children is in a list of the candidates.

    Columns with an entry for each slot. Not thread-safe: the owner's lock guards all of it. Every call is O(1).
    """

    def __init__(self, gone: Segment) -> None:
        """:param gone: the segment of a removed block that has children: its slot becomes free after they are gone."""
        self._gone = gone
        self.candidates = Candidates(gone)
        self.parents = [NO_SLOT] * length_at_first(3)
        """The slot of the block before it, or `NO_SLOT`. The next fields go by slot as well."""
        self.num_children = [0] * length_at_first(4)
        """Cached blocks that continue it, as far as is known."""
        self.depths = [0] * length_at_first(5)
        """Larger than that of the parent, so that no chain is a ring."""
        self.free: list[int] = []
        """Slots that are to be used again. They have neither parents nor children."""
        self.num_gone = 0
        """Removed blocks that have children."""

    def add_slot(self) -> None:
        self.parents.append(NO_SLOT)
        self.num_children.append(0)
        self.depths.append(0)
        self.candidates.add_slot(self._gone)

    def begin(self, slot: int, parent: int) -> None:
        """Gives a block that is in no list, and has no parent, one that is there."""
        if self.depths[parent] < self.depths[slot]:
            if not self.num_children[parent]:
                self.candidates.unlist(parent)
            self.parents[slot] = parent
            self.num_children[parent] += 1

    def continue_with(self, slot: int, child: int) -> None:
        """A block that is in no list turns out to be the parent of another one."""
        if self.parents[child] != slot and self.depths[slot] < self.depths[child]:
            if self.parents[child]:
                self.orphan(child)
            self.parents[child] = slot
            self.num_children[slot] += 1

    def remove(self, slot: int) -> None:
        """Takes out a block. Its slot is free then, or as soon as its children are gone."""
        segments, parent = self.candidates.segments, self.parents[slot]
        if self.num_children[slot]:
            segments[slot] = self._gone
            self.num_gone += 1
        elif self.num_children[parent] == 1 and segments[parent] is segments[slot]:
            self.parents[slot] = NO_SLOT
            self.num_children[parent] = 0
            self.candidates.replace(slot, parent)
            self.free.append(slot)
            return
        else:
            self.candidates.unlist(slot)
            self.free.append(slot)
        if parent:
            self.orphan(slot)

    def orphan(self, slot: int) -> None:
        """Takes a block from its parent."""
        parent = self.parents[slot]
        self.leave_parent(slot)
        self.parents[slot] = NO_SLOT
        if not self.num_children[parent] and self.candidates.segments[parent] is self._gone:
            self.num_gone -= 1
            self.free.append(parent)

    def leave_parent(self, slot: int) -> None:
        """Counts it no more among its parent's children. The parent is a candidate after its last one."""
        parent = self.parents[slot]
        if parent:
            self.num_children[parent] -= 1
            if not self.num_children[parent] and self.candidates.segments[parent] is not self._gone:
                self.candidates.list_first(parent)

    def back_to_parent(self, slot: int) -> None:
        """Undoes `leave_parent`."""
        parent = self.parents[slot]
        if parent:
            if not self.num_children[parent] and self.candidates.segments[parent] is not self._gone:
                self.candidates.unlist(parent)
            self.num_children[parent] += 1
