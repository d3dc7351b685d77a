"""What one tenant has of a host tier's memory: its blocks in one order, and the slabs that hold them."""

from collections.abc import Iterator

from kvtier.errors import InvariantError
from kvtier.identity.keys import StoreKey, TenantId
from kvtier.tiers.common.shares import EQUAL_SHARE, Share
from kvtier.tiers.host.entries import Entries
from kvtier.tiers.host.lane import Lane
from kvtier.tiers.host.slab import Slab, SlabKind
from kvtier.tiers.host.slab_sizes import SlabSizes

_WORTH_EMPTYING = 8
"""A retired slab is emptied when one in so many of its slots is free: sooner, more would be copied for less room."""
_TRIED_SLABS = 4
"""Retired slabs that are looked at when one is to be emptied."""
_TRIED_TO_DROP = 16
"""Slabs that are looked at when one has to be dropped with its blocks."""


class TenantMemory:
    """Lanes and retired slabs of one tenant, and what they cost. The tier's lock guards it.

    `entries` has the one order in which blocks are evicted, whatever their size, their writer and their slab.
    """

    def __init__(self, tenant: TenantId, entries: Entries[StoreKey], sizes: SlabSizes) -> None:
        self.tenant = tenant
        self._sizes = sizes
        self.entries = entries
        self.share: Share = EQUAL_SHARE
        """Changed by `set_share` only."""
        self.cost_bytes = 0
        """What its slabs take of the capacity, those being made included."""
        self.changing = False
        """A thread makes or empties a slab for it, outside the lock."""
        self.shrinks_from_s = 0.0
        """The time from which a write makes more go, if it is above its cap."""
        self.lanes: dict[SlabKind, Lane] = {}
        """Its lanes; those without memory are not kept."""
        self.retired: dict[int, Slab] = {}
        """Slabs that take no more blocks, by number."""
        self._dead_bytes = 0
        """Bytes of free slots of retired slabs."""
        self._roomy: dict[Lane, None] = {}
        """Lanes that may yield a slab: all that do are here, and some that no longer do."""
        self._sparse: dict[int, Slab] = {}
        """Retired slabs that are worth emptying; likewise."""

    @property
    def may_lend(self) -> bool:
        """It has a slab more than what is guaranteed to it."""
        spare_bytes = self.cost_bytes - self.share.guaranteed_bytes
        if not self.share.guaranteed_bytes:
            return spare_bytes > 0
        return any(slab.cost_bytes <= spare_bytes for slab in self.slabs())

    @property
    def is_above_cap(self) -> bool:
        """It has more than it may have, as its cap was lowered."""
        return self.share.cap_bytes is not None and self.cost_bytes > self.share.cap_bytes

    def may_grow(self, lane: Lane) -> bool:
        """Whether the smallest slab for this lane is within the cap, if the tenant had nothing else."""
        return self.share.cap_bytes is None or lane.least_cost_bytes <= self.share.cap_bytes

    def set_share(self, share: Share) -> None:
        """What it is owed from now on. O(lanes)."""
        self.share = share
        for lane in self.lanes.values():
            lane.least_cost_bytes = self._sizes.least_cost(lane.kind.slot_bytes, lane.kind.writer, share.cap_bytes)

    def lane(self, slot_bytes: int, writer: int) -> Lane:
        """The lane of this writer, made if need be."""
        kind = SlabKind(self.tenant, slot_bytes, writer)
        lane = self.lanes.get(kind)
        if lane is None:
            least_cost_bytes = self._sizes.least_cost(slot_bytes, writer, self.share.cap_bytes)
            lane = self.lanes[kind] = Lane(kind, least_cost_bytes)
        return lane

    def slabs(self) -> Iterator[Slab]:
        """All its slabs."""
        for lane in self.lanes.values():
            yield from lane.slabs.values()
        yield from self.retired.values()

    @property
    def num_slots(self) -> int:
        """Slots that blocks may be in. O(lanes)."""
        return sum(lane.num_slots for lane in self.lanes.values()) + sum(s.num_held for s in self.retired.values())

    @property
    def num_free(self) -> int:
        """Slots that blocks may have without an eviction. O(lanes)."""
        return sum(lane.num_free for lane in self.lanes.values())

    def free(self, slab: Slab, place: int) -> None:
        """Frees a slot of one of its slabs, which nobody holds any more."""
        if slab.retired:
            slab.free(place)
            self._dead_bytes += slab.kind.slot_bytes
            self._note_sparse(slab)
            return
        lane = self.lanes[slab.kind]
        if lane.free(slab, place):
            self._roomy[lane] = None

    def add(self, slab: Slab) -> None:
        """Takes in a new slab, which is charged already."""
        lane = self.lane(slab.kind.slot_bytes, slab.kind.writer)
        lane.add(slab)
        self.note_room(lane)

    def note_room(self, lane: Lane) -> None:
        """The lane has more free slots than before, or smaller slabs."""
        if lane.may_yield:
            self._roomy[lane] = None

    def retire(self, slab: Slab) -> None:
        """Keeps new blocks out of this slab. Idempotent."""
        if slab.retired:
            return
        lane = self.lanes[slab.kind]
        lane.remove(slab)
        slab.retired = True
        self.retired[slab.number] = slab
        self._dead_bytes += slab.num_free * slab.kind.slot_bytes
        self._note_sparse(slab)
        self.forget_if_empty(lane)

    def remove(self, slab: Slab) -> None:
        """Lets go of a slab in which nothing is held."""
        if slab.retired:
            del self.retired[slab.number]
            self._dead_bytes -= slab.num_free * slab.kind.slot_bytes
            self._sparse.pop(slab.number, None)
        else:
            lane = self.lanes[slab.kind]
            lane.remove(slab)
            self.forget_if_empty(lane)
        self.cost_bytes -= slab.cost_bytes

    def forget_if_empty(self, lane: Lane) -> None:
        """Lanes without memory are not kept, or a thousand sizes would be a thousand lanes."""
        if not lane.slabs and self.lanes.get(lane.kind) is lane:
            del self.lanes[lane.kind]
            self._roomy.pop(lane, None)

    def slab_to_empty(self, most_bytes: int, most_cost_bytes: int | None) -> Slab | None:
        """A slab that is empty or whose blocks can be copied to other slots, the emptiest of its lane.

        :param most_bytes: not more than that is to be copied.
        :param most_cost_bytes: of what the slab costs; None: whatever it is.
        """
        if not (self._roomy or self._sparse):
            return None
        for lane in list(self._roomy):
            slab = lane.slab_to_empty(most_bytes) if lane.may_yield else None
            if slab is None:
                del self._roomy[lane]  # until another of its slots is freed
            elif most_cost_bytes is None or slab.cost_bytes <= most_cost_bytes:
                return slab
        return self._retired_to_empty(most_bytes, most_cost_bytes)

    @property
    def idle_bytes(self) -> int:
        """Bytes of slots in which there is no block. O(lanes)."""
        return sum(lane.num_free * lane.kind.slot_bytes for lane in self.lanes.values()) + self._dead_bytes

    def slab_to_drop(self, most_cost_bytes: int | None, young_s: float) -> Slab | None:
        """The slab with the fewest blocks for its size that nobody uses and that may all go; none without a block.

        :param young_s: blocks that were committed after that stay. O(slabs), and O(slots) of some.
        """
        fitting = [
            slab
            for slab in self.slabs()
            if not (slab.leaving or slab.num_pins or slab.num_reserved)
            and (most_cost_bytes is None or slab.cost_bytes <= most_cost_bytes)
        ]
        fitting.sort(key=lambda slab: slab.num_held / slab.num_slots)
        for slab in fitting[:_TRIED_TO_DROP]:
            if slab.is_at_rest and all(entry is None or entry.since_s <= young_s for entry in slab.entries):
                return slab
        return None

    def check(self) -> None:
        """Raises `InvariantError`. O(slots)."""
        for lane in self.lanes.values():
            lane.check()
            if lane.num_slots and lane.num_free == lane.num_slots and lane not in self._roomy:
                raise InvariantError(f"lane of {lane.kind.slot_bytes} bytes: its memory is idle, and nobody knows")
        if self._dead_bytes != sum(slab.num_free * slab.kind.slot_bytes for slab in self.retired.values()):
            raise InvariantError("free slots of retired slabs are miscounted")
        if any(not slab.retired for slab in self.retired.values()):
            raise InvariantError("a slab that takes blocks is among those that do not")
        if any(slab.is_empty and not slab.leaving for slab in self.retired.values()):
            raise InvariantError("a slab that takes no blocks is kept though it is empty")
        for slab in self.slabs():
            held = sum(entry is not None for entry in slab.entries)
            if held != slab.num_held or slab.num_reserved < 0:
                raise InvariantError(f"slab {slab.number}: slots are miscounted")
            pinned = sum(entry is not None and entry.pins > 0 for entry in slab.entries)
            if slab.num_pins < 0 or (slab.num_pins and not pinned):
                raise InvariantError(f"slab {slab.number}: pins are miscounted")
            for place, entry in enumerate(slab.entries):
                if entry is not None and entry.slot != slab.slot_id(place):
                    raise InvariantError(f"slab {slab.number}: the block at {place} says it is elsewhere")
        self.entries.check_held(e for slab in self.slabs() for e in slab.entries if e is not None)

    def _note_sparse(self, slab: Slab) -> None:
        if slab.num_free * _WORTH_EMPTYING >= slab.num_slots:
            self._sparse[slab.number] = slab

    def _retired_to_empty(self, most_bytes: int, most_cost_bytes: int | None) -> Slab | None:
        fitting = [
            slab
            for slab in self._sparse.values()
            if not (slab.leaving or slab.num_pins)
            and slab.num_held * slab.kind.slot_bytes <= most_bytes
            and (most_cost_bytes is None or slab.cost_bytes <= most_cost_bytes)
        ]
        fitting.sort(key=lambda slab: slab.num_held / slab.num_slots)
        for slab in fitting[:_TRIED_SLABS]:
            if slab.is_at_rest:
                return slab
            del self._sparse[slab.number]  # until another of its slots is freed
        return None
