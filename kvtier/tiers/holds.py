"""What callers hold of the host tier: leases, write slots, pins, places in memory that others map."""

from typing import NamedTuple

from kvtier.keys import StoreKey
from kvtier.tiers.slab import Lane, Slab
from kvtier.tiers.slot_index import Entry
from kvtier.wire.shared_memory import PLACE


class Lease:
    """A committed block that stays in place until `HostTier.release`."""

    __slots__ = ("_entry", "_lane", "checksum", "view")

    def __init__(self, view: memoryview, entry: Entry[StoreKey], lane: Lane) -> None:
        self.view = view
        """The payload, read-only. Do not use it after release: the slot may hold another block."""
        self.checksum = entry.checksum
        """What was given to commit: by convention the stored form's (`kvtier.codec.checksum`)."""
        self._entry: Entry[StoreKey] | None = entry
        """None once released. Guarded by the tier's lock."""
        self._lane = lane


class WriteSlot:
    """Room for one block, until `HostTier.commit` or `HostTier.abort`; lookups answer PENDING meanwhile."""

    __slots__ = ("_entry", "_lane", "key", "slab_bytes", "slot", "view")

    def __init__(self, key: StoreKey, view: memoryview, entry: Entry[StoreKey], lane: Lane) -> None:
        self.key = key
        self.view = view
        """Exactly the payload's length, writable, content undefined. Do not use it after commit or abort."""
        self.slot = entry.slot
        """Which slab, and which place in it: `kvtier.tiers.slab.SLAB_STRIDE`."""
        self.slab_bytes = lane.size_class.slab_of(entry).nbytes
        """Of that slab, which cannot be dropped meanwhile."""
        self._entry: Entry[StoreKey] | None = entry
        """None once committed or aborted. Guarded by the tier's lock."""
        self._lane = lane


class Pin:
    """A committed block that stays in memory until `HostTier.unpin`, for as long as the caller likes."""

    __slots__ = ("_entry", "_slab", "key", "nbytes")

    def __init__(self, entry: Entry[StoreKey], slab: Slab) -> None:
        self.key = entry.key
        self.nbytes = entry.nbytes
        """Of the payload."""
        self._slab = slab
        self._entry: Entry[StoreKey] | None = entry
        """None once unpinned. Guarded by the tier's lock."""

    def is_of_same_block(self, other: "Pin") -> bool:
        """Not only of the same key: a block that was discarded may have been stored again. Both are held."""
        return self._entry is other._entry

    @property
    def slab(self) -> int:
        """Number of the slab that it is in, which cannot be dropped meanwhile."""
        return self._slab.number

    @property
    def slab_bytes(self) -> int:
        """Memory of that slab."""
        return self._slab.nbytes


class SharedSlab(NamedTuple):
    """A slab that another process may map."""

    descriptor: int
    writable: bool
    slot_bytes: int
    num_slots: int


class HeldPlaces:
    """Where blocks lie that another process is reading, until `HostTier.release_places`."""

    __slots__ = ("_held", "places", "statuses")

    def __init__(self, held: list[tuple[Lane, Entry[StoreKey]]], statuses: bytes, places: bytes) -> None:
        self._held = held
        """Empty once released. Guarded by the tier's lock."""
        self.statuses = statuses
        """HIT or MISS per key, in order."""
        self.places = places
        """A `kvtier.wire.shared_memory.PLACE` per hit."""

    @property
    def num_held(self) -> int:
        """Blocks that are held, hits all of them."""
        return len(self.places) // PLACE.size
