"""The host tier: blocks in this process's memory."""

import logging
import math
import threading
from collections.abc import Iterable, Sequence

from kvtier.codec import checksum as checksum_of
from kvtier.errors import InvalidInputError, InvariantError
from kvtier.events import EventKind, EventSink, ignore_event
from kvtier.keys import TENANT_ID_BYTES, StoreKey, TenantId
from kvtier.tiers.base import ReadableBuffer, Status, Usage, WriteStatus, require_pairs
from kvtier.tiers.gate import CallGate
from kvtier.tiers.memory import PAGE_BYTES, copy_bytes, round_up
from kvtier.tiers.outbox import Outbox
from kvtier.tiers.slab import SLOT_ALIGN_BYTES, SizeClass
from kvtier.tiers.slot_index import Entry

_log = logging.getLogger(__name__)

_SLABS_AT_LEAST = 8
"""A slab is at most this fraction of the capacity, so that several tenants and sizes fit beside each other."""


class Lease:
    """A committed block that stays in place until `HostTier.release`."""

    __slots__ = ("_entry", "_size_class", "checksum", "view")

    def __init__(self, view: memoryview, entry: Entry[StoreKey], size_class: SizeClass) -> None:
        self.view = view
        """The payload, read-only. Do not use it after release: the slot may hold another block."""
        self.checksum = entry.checksum
        """What was given to commit: by convention the stored form's (`kvtier.codec.checksum`)."""
        self._entry: Entry[StoreKey] | None = entry
        """None once released. Guarded by the tier's lock."""
        self._size_class = size_class


class WriteSlot:
    """Room for one block, until `HostTier.commit` or `HostTier.abort`; lookups answer PENDING meanwhile."""

    __slots__ = ("_entry", "_size_class", "key", "view")

    def __init__(self, key: StoreKey, view: memoryview, entry: Entry[StoreKey], size_class: SizeClass) -> None:
        self.key = key
        self.view = view
        """Exactly the payload's length, writable, content undefined. Do not use it after commit or abort."""
        self._entry: Entry[StoreKey] | None = entry
        """None once committed or aborted. Guarded by the tier's lock."""
        self._size_class = size_class


class HostTier:
    """Blocks in slabs of anonymous memory, each slab of one tenant and one slot size.

    Slabs are made on demand until `capacity_bytes`. Then a block takes the place of the least recently
    used one of its own size class; a class that holds less than others gets a slab of the largest one,
    whose blocks are evicted, until shares are even. A slab that somebody reads from or writes to stays.
    The memory of all slabs together never exceeds the capacity. A payload larger than `slab_bytes` gets
    a slab of its own; one larger than the capacity is FULL.

    Any thread. Copies run outside the lock, the slot pinned, and release the GIL. About 3 us per block
    besides the copy, but a new slab takes 0.1 to 0.4 ms per MiB to prefault.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        slab_bytes: int = 64 * 2**20,
        name: str = "host",
        prefault: bool = True,
        on_event: EventSink = ignore_event,
    ) -> None:
        """
        :param capacity_bytes: memory for payloads, rounded down to whole pages.
        :param slab_bytes: memory taken at a time; smaller wastes fewer bytes on small tenants, larger
            takes less bookkeeping. Limited to an eighth of the capacity.
        :param prefault: touch new memory before use. Off only where start-up counts more than speed.
        :param on_event: called from the threads that use the tier; must not call `close`.
        """
        if capacity_bytes < PAGE_BYTES or slab_bytes < 1:
            raise InvalidInputError(f"host tier of {capacity_bytes} bytes in slabs of {slab_bytes}: too small")
        self._name = name
        self._capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        self._slab_bytes = min(slab_bytes, self._capacity_bytes // _SLABS_AT_LEAST)
        self._prefault = prefault
        self._gate = CallGate(f"tier {name}")
        self._outbox = Outbox(name, on_event)
        self._lock = threading.Lock()
        self._grown = threading.Condition(self._lock)
        """Notified when a thread has finished making a slab."""
        self._classes: dict[tuple[TenantId, int], SizeClass] = {}
        """By tenant and slot size. Guarded by _lock."""
        self._class_of: dict[StoreKey, SizeClass] = {}
        """Where each visible key is. Guarded by _lock."""
        self._slabs_total_bytes = 0
        """Memory of all slabs, those being made included. Guarded by _lock."""
        self._growing = False
        """A thread is making a slab outside the lock. Guarded by _lock."""
        self._uses = 0
        """Clock of the slabs' recency. Guarded by _lock."""

    @property
    def name(self) -> str:
        return self._name

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        """See `Tier.lookup`."""
        with self._gate, self._lock:
            return [self._status(key) for key in keys]

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[Status]:
        """See `Tier.read`. The batch's last block becomes the coldest of it, as tails should."""
        require_pairs(keys, into)
        with self._gate:
            leases = self._acquire(keys)
            try:
                return [_copy_out(lease, buffer) for lease, buffer in zip(leases, into, strict=True)]
            finally:
                self._release(leases)

    def write(self, items: Sequence[tuple[StoreKey, ReadableBuffer]]) -> list[WriteStatus]:
        """See `Tier.write`. The batch's last block becomes the coldest of it, as tails should."""
        with self._gate:
            slots: list[WriteSlot | WriteStatus] = []
            checksums: dict[WriteSlot, int] = {}
            try:
                for key, payload in items:
                    slots.append(self._prepare(key, len(payload)))
                for slot, (key, payload) in zip(slots, items, strict=True):
                    if isinstance(slot, WriteSlot):
                        copy_bytes(slot.view, payload)
                        checksums[slot] = checksum_of(key, payload)
            finally:  # after an error, what was copied in full is kept and the rest given back
                self._finish([s for s in slots if isinstance(s, WriteSlot)], checksums)
            return [WriteStatus.STORED if isinstance(slot, WriteSlot) else slot for slot in slots]

    def discard(self, keys: Sequence[StoreKey]) -> int:
        """See `Tier.discard`. A key being written is forgotten when its writer commits."""
        with self._gate:
            with self._lock:
                found = [key for key in keys if self._forget(key)]
                self._outbox.post(EventKind.REMOVED, found)
            self._outbox.flush()
            return len(found)

    def usage(self) -> Usage:
        """See `Tier.usage`: bytes are those of payloads that can be read."""
        with self._gate, self._lock:
            return self._sum(self._classes.values())

    def usage_of(self, tenant: TenantId) -> Usage:
        """One tenant's part of `usage`."""
        with self._gate, self._lock:
            return self._sum(c for c in self._classes.values() if c.tenant == tenant)

    def check(self) -> None:
        """See `Tier.check`."""
        with self._gate, self._lock:
            for size_class in self._classes.values():
                size_class.check()
            if sum(len(c.index) for c in self._classes.values()) != len(self._class_of):
                raise InvariantError(f"tier {self._name}: keys and size classes disagree")
            if any(c.index.find(key) is None for key, c in self._class_of.items()):
                raise InvariantError(f"tier {self._name}: a key is not in its size class")
            made_bytes = sum(c.nbytes for c in self._classes.values())
            if self._slabs_total_bytes > self._capacity_bytes:
                raise InvariantError(f"tier {self._name}: slabs of {self._slabs_total_bytes} bytes exceed the capacity")
            if not self._growing and made_bytes != self._slabs_total_bytes:
                raise InvariantError(f"tier {self._name}: slab memory is miscounted")

    def close(self) -> None:
        """See `Tier.close`. Memory under a lease or write slot lives until its view is gone."""
        if not self._gate.close():
            return
        with self._lock:
            self._classes.clear()
            self._class_of.clear()
            self._slabs_total_bytes = 0
            self._outbox.post(EventKind.CLEARED)
        self._outbox.flush()

    def acquire(self, keys: Sequence[StoreKey], *, touch: bool = True) -> list[Lease | None]:
        """Holds committed blocks in place for reading without a copy; None where `read` would miss.

        Counts as a use unless `touch` is off. Every lease goes back by `release`; until then its slot serves no
        other block.
        """
        with self._gate:
            return self._acquire(keys, touch=touch)

    def near_eviction(self, share: float) -> list[StoreKey]:
        """The blocks that are evicted next: of each size class that cannot grow, the coldest `share` of its slots.

        :param share: from 0 to 1; slots that are free already count as part of it. O(blocks returned).
        """
        with self._gate, self._lock:
            room_bytes = self._capacity_bytes - self._slabs_total_bytes
            full = [c.index for c in self._classes.values() if c.slab_bytes(1) > room_bytes]
            at_risk = [(index, math.ceil(index.num_slots * share) - index.num_free) for index in full]
            return [key for index, most in at_risk if most > 0 for key in index.coldest(most)]

    def release(self, leases: Iterable[Lease | None]) -> None:
        """Gives leases back. Ignores None and what was released before. Allowed after `close`."""
        self._release(leases)

    def prepare(self, key: StoreKey, nbytes: int) -> WriteSlot | WriteStatus:
        """Room for a payload of `nbytes`, to be filled by the caller. May evict other blocks.

        Returns EXISTS or FULL as `write` does. The slot stays the caller's until `commit` or `abort`.
        """
        with self._gate:
            outcome = self._prepare(key, nbytes)
            self._outbox.flush()
            return outcome

    def commit(self, slot: WriteSlot, checksum: int) -> None:
        """Makes the block readable. `checksum` is kept for leases and not looked at.

        Raises `InvalidInputError` when the slot was committed or aborted before.
        """
        with self._gate:
            self._finish([slot], {slot: checksum})

    def abort(self, slot: WriteSlot) -> None:
        """Gives the slot back unwritten; does nothing after commit, abort or `close`."""
        with self._lock:
            self._abort(slot)

    def _sum(self, classes: Iterable[SizeClass]) -> Usage:
        indexes = [size_class.index for size_class in classes]
        return Usage(sum(i.num_ready for i in indexes), sum(i.ready_bytes for i in indexes), self._capacity_bytes)

    def _status(self, key: StoreKey) -> Status:
        size_class = self._class_of.get(key)
        entry = size_class.index.find(key) if size_class is not None else None
        if entry is None:
            return Status.MISS
        return Status.HIT if entry.ready else Status.PENDING

    def _acquire(self, keys: Sequence[StoreKey], *, touch: bool = True) -> list[Lease | None]:
        leases: list[Lease | None] = []
        with self._lock:
            for key in reversed(keys):
                size_class = self._class_of.get(key)
                entry = size_class.index.pin(key) if size_class is not None else None
                if size_class is None or entry is None:
                    leases.append(None)
                    continue
                if touch:
                    self._uses += 1
                    size_class.note_use(entry, self._uses)
                leases.append(Lease(size_class.view(entry, entry.nbytes).toreadonly(), entry, size_class))
        leases.reverse()
        return leases

    def _release(self, leases: Iterable[Lease | None]) -> None:
        with self._lock:
            for lease in leases:
                if lease is not None and lease._entry is not None:
                    lease._size_class.index.unpin(lease._entry)
                    lease._entry = None

    def _prepare(self, key: StoreKey, nbytes: int) -> WriteSlot | WriteStatus:
        """Finds a slot, if need be by making a slab outside the lock; one thread makes slabs at a time."""
        tenant = TenantId(key[:TENANT_ID_BYTES])
        slot_bytes = max(SLOT_ALIGN_BYTES, round_up(nbytes, SLOT_ALIGN_BYTES))
        if slot_bytes > self._capacity_bytes:
            return WriteStatus.FULL
        while True:
            with self._lock:
                if key in self._class_of:
                    return WriteStatus.EXISTS
                size_class = self._classes.get((tenant, slot_bytes)) or SizeClass(tenant, slot_bytes)
                if size_class.index.num_free:
                    return self._take_slot(size_class, key, nbytes)
                if self._growing:
                    self._grown.wait()
                    continue
                num_slots = self._make_room(size_class)
                if not num_slots:
                    return self._take_slot(size_class, key, nbytes)
                self._classes[tenant, slot_bytes] = size_class
                self._slabs_total_bytes += size_class.slab_bytes(num_slots)
                self._growing = True
            if not self._grow(size_class, num_slots):
                return WriteStatus.FULL

    def _take_slot(self, size_class: SizeClass, key: StoreKey, nbytes: int) -> WriteSlot | WriteStatus:
        """A free slot of the class, or that of its coldest block. Locked."""
        outcome = size_class.index.prepare(key)
        if isinstance(outcome, WriteStatus):
            return outcome
        if outcome.evicted is not None:
            del self._class_of[outcome.evicted]
            self._outbox.post(EventKind.REMOVED, [outcome.evicted])
        self._class_of[key] = size_class
        return WriteSlot(key, size_class.view(outcome.entry, nbytes), outcome.entry, size_class)

    def _make_room(self, size_class: SizeClass) -> int:
        """How many slots a new slab of this class may have, after dropping slabs of larger classes. Locked."""
        wanted = max(1, size_class.slots_within(self._slab_bytes))
        wanted_bytes = size_class.slab_bytes(wanted)
        while True:
            room_bytes = self._capacity_bytes - self._slabs_total_bytes
            if room_bytes >= size_class.slab_bytes(1):
                return min(wanted, size_class.slots_within(room_bytes))
            largest = max(self._classes.values(), key=lambda c: c.nbytes)
            uneven = largest.nbytes - wanted_bytes >= size_class.nbytes + wanted_bytes
            if largest is size_class or not (uneven or size_class.nbytes == 0):
                return 0
            dropped = largest.drop_coldest()
            if dropped is None:
                return 0
            nbytes, evicted = dropped
            self._slabs_total_bytes -= nbytes
            if not largest.nbytes:
                del self._classes[largest.tenant, largest.slot_bytes]
            for key in evicted:
                del self._class_of[key]
            self._outbox.post(EventKind.REMOVED, evicted)

    def _grow(self, size_class: SizeClass, num_slots: int) -> bool:
        """Makes the slab that `_prepare` has accounted for; False when there is no memory. Unlocked."""
        slab = None
        try:
            slab = size_class.map_slab(num_slots, prefault=self._prefault)
        except (OSError, MemoryError):
            _log.exception("tier %s: no memory for a slab; lower its capacity", self._name)
        finally:
            with self._lock:
                self._growing = False
                self._grown.notify_all()
                if slab is None:
                    self._slabs_total_bytes -= size_class.slab_bytes(num_slots)
                else:
                    size_class.add(slab)
        return slab is not None

    def _finish(self, slots: Sequence[WriteSlot], checksums: dict[WriteSlot, int]) -> None:
        """Commits the slots that have a checksum, last to first, and aborts the others."""
        stored: list[StoreKey] = []
        with self._lock:
            for slot in reversed(slots):
                if slot not in checksums:
                    self._abort(slot)
                    continue
                entry, slot._entry = slot._entry, None
                if entry is None:
                    raise InvalidInputError("write slot was committed or aborted before")
                index = slot._size_class.index
                if index.commit(entry, nbytes=len(slot.view), checksum=checksums[slot]):
                    stored.append(slot.key)
            stored.reverse()
            self._outbox.post(EventKind.STORED, stored)
        self._outbox.flush()

    def _abort(self, slot: WriteSlot) -> None:
        entry, slot._entry = slot._entry, None
        if entry is not None:
            if slot._size_class.index.find(slot.key) is entry:
                self._class_of.pop(slot.key, None)
            slot._size_class.index.abort(entry)

    def _forget(self, key: StoreKey) -> bool:
        """Drops a key from its class; True when it was readable. Locked."""
        size_class = self._class_of.pop(key, None)
        if size_class is None:
            return False
        entry = size_class.index.find(key)
        return size_class.index.discard(key) and entry is not None and entry.ready


def _copy_out(lease: Lease | None, into: memoryview) -> Status:
    if lease is None or len(lease.view) != len(into):
        return Status.MISS
    copy_bytes(into, lease.view)
    return Status.HIT
