"""Blocks of a host tier held where they are: leases for who reads them here, places for who maps the memory, pins."""

from collections.abc import Iterable, Sequence

from kvtier.identity.keys import StoreKey
from kvtier.protocol.shared_memory import PLACE
from kvtier.tiers.base import Status
from kvtier.tiers.host.entries import Entry
from kvtier.tiers.host.slab import Slab
from kvtier.tiers.host.slab_changes import give_back
from kvtier.tiers.host.slots import HostSlots


class ReadPin:
    """A committed block that stays in place until `HostTier.release`."""

    __slots__ = ("_entry", "checksum", "view")

    def __init__(self, view: memoryview, entry: Entry[StoreKey]) -> None:
        self.view = view
        """The payload, read-only. Do not use it after release: the slot may hold another block."""
        self.checksum = entry.checksum
        """What was given to commit: the writer's (`kvtier.codec.checksums`)."""
        self._entry: Entry[StoreKey] | None = entry
        """None once released. Guarded by the tier's lock."""


class SlabPin:
    """A committed block that stays in memory until `HostTier.unpin`, for as long as the caller likes."""

    __slots__ = ("_entry", "_slab", "key", "nbytes")

    def __init__(self, entry: Entry[StoreKey], slab: Slab) -> None:
        self.key = entry.key
        self.nbytes = entry.nbytes
        """Length of the payload, in bytes."""
        self._slab = slab
        self._entry: Entry[StoreKey] | None = entry
        """None once unpinned. Guarded by the tier's lock."""

    def is_of_same_block(self, other: "SlabPin") -> bool:
        """Whether both hold one block, and not only blocks of one key: one that was discarded may have been stored
        again."""
        return self._entry is other._entry

    @property
    def slab(self) -> int:
        """Number of the slab that it is in, which cannot be dropped meanwhile."""
        return self._slab.number

    @property
    def slab_bytes(self) -> int:
        """Memory of that slab."""
        return self._slab.nbytes


class PinnedSlots:
    """The places of blocks that another process is reading, until `HostTier.release_places`."""

    __slots__ = ("_held", "places", "statuses")

    def __init__(self, held: list[Entry[StoreKey]], statuses: bytes, places: bytes) -> None:
        self._held = held
        """Empty once released. Guarded by the tier's lock."""
        self.statuses = statuses
        """HIT or MISS per key, in order."""
        self.places = places
        """A `kvtier.protocol.shared_memory.PLACE` per hit."""

    @property
    def num_held(self) -> int:
        """Blocks that are held, hits all of them."""
        return len(self.places) // PLACE.size


class Pins:
    """Takes holds and ends them. Any thread."""

    def __init__(self, slots: HostSlots) -> None:
        self._slots = slots

    def acquire(self, keys: Sequence[StoreKey], *, touch: bool = True) -> list[ReadPin | None]:
        """Holds committed blocks in place, to be read without a copy; None where a read would miss. A use if
        `touch`."""
        leases: list[ReadPin | None] = []
        slots = self._slots
        with slots.lock:
            for i in range(len(keys) - 1, -1, -1):
                entry = slots.hold(keys, i, touch)
                leases.append(ReadPin(slots.memory.view(entry).toreadonly(), entry) if entry is not None else None)
        leases.reverse()
        return leases

    def release(self, leases: Iterable[ReadPin | None]) -> None:
        """Gives leases back. Ignores None and what was released before."""
        with self._slots.lock:
            for lease in leases:
                if lease is not None and lease._entry is not None:
                    lease._entry.owner.unpin(lease._entry)
                    lease._entry = None
            dropped = self._slots.memory.take_dropped()
        give_back(dropped)

    def acquire_places(self, keys: Sequence[StoreKey], payload_bytes: Sequence[int]) -> PinnedSlots:
        """Holds committed blocks for a process that maps the slabs; other lengths are a MISS. Counts as a use."""
        every: list[Entry[StoreKey]] = []
        places: list[bytes] = []
        statuses = bytearray(len(keys))
        hold, pack, hit = self._slots.hold, PLACE.pack, int(Status.HIT)
        with self._slots.lock:
            for i in range(len(keys) - 1, -1, -1):
                entry = hold(keys, i, True, payload_bytes[i])
                if entry is not None:
                    every.append(entry)
                    places.append(pack(entry.slot, entry.generation, entry.checksum))
                    statuses[i] = hit
        places.reverse()
        return PinnedSlots(every, bytes(statuses), b"".join(places))

    def release_places(self, places: PinnedSlots) -> None:
        """Gives back all blocks that are held. Idempotent."""
        with self._slots.lock:
            held, places._held = places._held, []
            for entry in held:
                entry.owner.unpin(entry)
            dropped = self._slots.memory.take_dropped()
        give_back(dropped)

    def pin(self, keys: Sequence[StoreKey]) -> list[SlabPin | None]:
        """Keeps committed blocks in memory until `unpin`; None where a read would miss. Counts as a use."""
        pins: list[SlabPin | None] = []
        with self._slots.lock:
            for i in range(len(keys) - 1, -1, -1):
                entry = self._slots.hold(keys, i)
                if entry is None:
                    pins.append(None)
                    continue
                slab = self._slots.memory.slab_of(entry)
                slab.num_pins += 1
                pins.append(SlabPin(entry, slab))
        pins.reverse()
        return pins

    def unpin(self, pins: Iterable[SlabPin]) -> None:
        """Ends pins. Ignores what was unpinned before."""
        with self._slots.lock:
            for pin in pins:
                entry, pin._entry = pin._entry, None
                if entry is not None:
                    pin._slab.num_pins -= 1
                    entry.owner.unpin(entry)
            dropped = self._slots.memory.take_dropped()
        give_back(dropped)

    def are_findable(self, pins: Sequence[SlabPin]) -> list[bool]:
        """Whether each pinned block is what lookups of its key find: not once it was discarded."""
        with self._slots.lock:
            blocks = self._slots.memory.blocks
            return [p._entry is not None and blocks.get(p.key) is p._entry for p in pins]
