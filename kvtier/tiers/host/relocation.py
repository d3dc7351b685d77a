"""Slabs that come and go outside the tier's lock: those that are made, and those whose blocks are copied elsewhere."""

from dataclasses import dataclass
from typing import NamedTuple

from kvtier.identity.keys import StoreKey
from kvtier.memory.pages import copy_bytes
from kvtier.tiers.host.entries import Entry
from kvtier.tiers.host.lane import Lane
from kvtier.tiers.host.slab import Slab
from kvtier.tiers.host.tenant_memory import TenantMemory


@dataclass(frozen=True, slots=True)
class Growth:
    """A slab that may be made: it is charged already."""

    number: int
    tenant: TenantMemory
    lane: Lane
    num_slots: int
    cost_bytes: int


class _Target(NamedTuple):
    """The slot that a block goes to."""

    slab: Slab
    place: int
    generation: int


class Relocation:
    """A slab that is being emptied: `begin` under the tier's lock, `copy` without it, `finish` under it again.

    Until `finish` every block is where it was, readable and free to be forgotten; its old slot and its new one are
    given to nobody else. What somebody reads at `finish`, in the old place, stays there.
    """

    def __init__(self, slab: Slab, tenant: TenantMemory, lane: Lane, growth: Growth | None) -> None:
        """
        :param tenant: whose slab it is.
        :param lane: where the blocks go. It has free slots for all of them besides those of `slab`, if there is no
            `growth`.
        :param growth: the slab that is to be made for them.
        """
        self.slab = slab
        self.growth = growth
        self._tenant = tenant
        self._lane = lane
        self._moving: list[tuple[int, Entry[StoreKey]]] = []
        """The blocks, each with its place in `slab`. Guarded by the tier's lock in `begin`, then unchanged."""
        self._targets: list[_Target] = []
        """The new place of each of `_moving`, once there are slots for them. Guarded as `_moving` is."""

    @property
    def nbytes(self) -> int:
        """Bytes of the slots that are copied."""
        return len(self._moving) * self._lane.kind.slot_bytes

    def begin(self) -> None:
        """Reserves the blocks' old slots, and the new ones if they are there: nobody else gets them from now on."""
        self.slab.leaving = True
        if not self.slab.retired:
            self._lane.close(self.slab)
        self._moving = [(place, entry) for place, entry in enumerate(self.slab.entries) if entry is not None]
        for _, entry in self._moving:
            entry.moving = True
        if self.growth is None:
            self._targets = [_reserved(*self._lane.take()) for _ in self._moving]

    def copy(self, made: Slab | None) -> None:
        """Copies the blocks. As their writers' checksums travel along, nobody looks at the bytes.

        :param made: the slab of `growth`, which nobody else knows yet.
        """
        if made is not None:
            self._targets = [_reserved(made, made.take()) for _ in self._moving]
        for (place, entry), to in zip(self._moving, self._targets, strict=True):
            copy_bytes(to.slab.view(to.place, entry.nbytes), self.slab.view(place, entry.nbytes))

    def finish(self, *, copied: bool) -> None:
        """Gives the blocks that nobody uses their new slots, and the others' new slots back.

        :param copied: whether `copy` came to its end.
        """
        may_go = [entry.owner.end_move(entry) for _, entry in self._moving]
        for (place, entry), to, may in zip(self._moving, self._targets, may_go, strict=False):
            to.slab.num_reserved -= 1
            if may and copied:
                self._tenant.free(self.slab, place)
                to.slab.entries[to.place] = entry
                entry.slot = to.slab.slot_id(to.place)
                entry.generation = to.generation
            else:
                self._tenant.free(to.slab, to.place)
        self.slab.leaving = False
        if not self.slab.retired:
            self._lane.open(self.slab)

    def target_slabs(self) -> set[Slab]:
        """The slabs with the new slots."""
        return {to.slab for to in self._targets}


def _reserved(slab: Slab, place: int) -> _Target:
    slab.num_reserved += 1
    return _Target(slab, place, slab.renew(place))
