"""The slots of a host tier: which block is in which, and how a block gets one, keeps it, and loses it."""

import logging
import math
import threading
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import Counter

from kvtier.clock import Clock
from kvtier.errors import InvalidInputError, InvariantError
from kvtier.events import EventKind
from kvtier.identity.keys import TENANT_ID_BYTES, StoreKey, TenantId
from kvtier.memory.pages import round_up
from kvtier.memory.slab_layout import SharedSlab
from kvtier.tiers.base import Status, Usage, WriteStatus
from kvtier.tiers.common.event_queue import EventQueue
from kvtier.tiers.host.slab import OWN_PROCESS, SLOT_ALIGN_BYTES, Slab, WriterSlots
from kvtier.tiers.host.slab_allocator import Growth, SlabMemory
from kvtier.tiers.host.slot_index import Entry

_log = logging.getLogger(__name__)


class WriteSlot:
    """Room for one block, until `HostTier.commit` or `HostTier.abort`; lookups answer PENDING meanwhile."""

    __slots__ = ("_entry", "_writer_slots", "key", "slab_bytes", "slot", "view")

    def __init__(self, key: StoreKey, view: memoryview, entry: Entry[StoreKey], writer_slots: WriterSlots) -> None:
        self.key = key
        self.view = view
        """Exactly the payload's length, writable, content undefined. Do not use it after commit or abort."""
        self.slot = entry.slot
        """Which slab, and which place in it: `kvtier.memory.slab_layout.SLAB_STRIDE`."""
        self.slab_bytes = writer_slots.size_class.slab_of(entry).nbytes
        """The size in bytes of the slot's slab, which cannot be dropped until commit or abort."""
        self._entry: Entry[StoreKey] | None = entry
        """None once committed or aborted. Guarded by the tier's lock."""
        self._writer_slots = writer_slots


class HostSlots:
    """Keys, slots and memory, behind one lock. Any thread. Events are posted here; the tier flushes them."""

    def __init__(
        self,
        name: str,
        memory: SlabMemory,
        events: EventQueue,
        *,
        min_residency_s: float,
        num_evicted: Counter,
        clock: Clock,
    ) -> None:
        """
        :param name: of the tier, for messages.
        :param min_residency_s: see `HostTier`.
        """
        self._name, self._events, self._num_evicted = name, events, num_evicted
        self._min_residency_s, self._clock = min_residency_s, clock
        self.lock = threading.Lock()
        """Held while slots change hands, never while memory is copied, made or given back."""
        self.memory = memory
        """Guarded by lock, but for making slabs."""
        self._grown = threading.Condition(self.lock)
        """Notified when a thread has finished making a slab."""
        self._growing = False
        """A thread is making a slab outside the lock. Guarded by lock."""
        self._lane_of: dict[StoreKey, WriterSlots] = {}
        """Where each visible key is. Guarded by lock."""

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        miss, hit, pending = Status.MISS, Status.HIT, Status.PENDING
        with self.lock:
            entries = self._find_all(keys)
            return [miss if entry is None else hit if entry.ready else pending for entry in entries]

    def hold(
        self, key: StoreKey, *, touch: bool = True, nbytes: int | None = None
    ) -> tuple[WriterSlots, Entry[StoreKey]] | None:
        """Pins a committed block where it is until `WriterSlots.index.unpin`; None where there is none. Hold the lock.

        :param touch: counts as a use.
        :param nbytes: length that its payload must have.
        """
        writer_slots = self._lane_of.get(key)
        entry = writer_slots.index.pin(key) if writer_slots is not None else None
        if writer_slots is None or entry is None:
            return None
        if nbytes is not None and entry.nbytes != nbytes:
            writer_slots.index.unpin(entry)
            return None
        if touch:
            writer_slots.size_class.note_use(writer_slots, entry)
        return writer_slots, entry

    def prepare(self, key: StoreKey, nbytes: int, writer: int = OWN_PROCESS) -> WriteSlot | WriteStatus:
        """Finds a slot, if need be by making a slab outside the lock; one thread makes slabs at a time."""
        tenant = TenantId(key[:TENANT_ID_BYTES])
        slot_bytes = max(SLOT_ALIGN_BYTES, round_up(nbytes, SLOT_ALIGN_BYTES))
        if not self.memory.may_hold(slot_bytes):
            return WriteStatus.FULL
        while True:
            with self.lock:
                if (there := self._lane_of.get(key)) is not None:
                    return _status_beside(there, key, writer)
                writer_slots = self.memory.writer_slots(tenant, slot_bytes, writer)
                if writer_slots.index.num_free:
                    return self._take_slot(writer_slots, key, nbytes)
                if self._growing:
                    self._grown.wait()
                    continue
                growth, evicted = self.memory.grow(writer_slots, young_s=self._young_s())
                self._note_evicted(evicted)
                if growth is None:
                    return self._take_slot(writer_slots, key, nbytes)
                self._growing = True
                dropped = self.memory.take_dropped()
            if not self._grow(growth, dropped):
                return WriteStatus.FULL

    def finish(self, slots: Sequence[WriteSlot], checksums: Mapping[WriteSlot, int]) -> None:
        """Commits the slots that have a checksum, last to first, and aborts the others."""
        stored: list[StoreKey] = []
        now_s = self._clock()
        with self.lock:
            for slot in reversed(slots):
                if slot not in checksums:
                    self._abort(slot)
                    continue
                entry, slot._entry = slot._entry, None
                if entry is None:
                    raise InvalidInputError("write slot was committed or aborted before")
                writer_slots = slot._writer_slots
                if writer_slots.index.commit(entry, nbytes=len(slot.view), checksum=checksums[slot], now_s=now_s):
                    writer_slots.size_class.note_use(
                        writer_slots, entry
                    )  # of its slab, too: else others', read once, would outlive it
                    stored.append(slot.key)
            stored.reverse()
            self._events.post(EventKind.STORED, stored)

    def abort(self, slot: WriteSlot) -> None:
        """Gives the slot back unwritten; does nothing when it was committed or aborted before."""
        with self.lock:
            self._abort(slot)

    def discard(self, keys: Sequence[StoreKey]) -> int:
        """Forgets these keys; returns how many of them could be read until now."""
        with self.lock:
            found = [key for key in keys if self._forget(key)]
            self._events.post(EventKind.REMOVED, found)
            dropped = self.memory.take_dropped()
        give_back(dropped)
        return len(found)

    def retire_writer(self, writer: int) -> None:
        """Nobody will write to this writer's slabs again; blocks in them can be read until they are evicted."""
        with self.lock:
            self.memory.retire(writer)
            dropped = self.memory.take_dropped()
        give_back(dropped)

    def open_slab(self, tenant: TenantId, number: int, writer: int) -> SharedSlab | None:
        """A descriptor of one of the tenant's slabs, to be passed to `writer`; None: no such slab. `OSError`."""
        with self.lock:
            slab = self.memory.find(tenant, number)
            return slab.share(writer) if slab is not None else None

    def near_eviction(self, share: float) -> list[StoreKey]:
        """The blocks that are evicted next: of each lane that cannot grow, the coldest `share` of its slots."""
        with self.lock:
            full = [writer_slots.index for writer_slots in self.memory.full_lanes()]
            at_risk = [(index, math.ceil(index.num_slots * share) - index.num_free) for index in full]
            return [key for index, most in at_risk if most > 0 for key in index.coldest(most)]

    def usage(self, tenant: TenantId | None = None) -> Usage:
        """Number and payload bytes of the blocks that can be read, of all tenants or of one; the tier's capacity."""
        with self.lock:
            indexes = [writer_slots.index for writer_slots in self.memory.writers(tenant)]
            capacity_bytes = self.memory.capacity_bytes
            return Usage(sum(i.num_ready for i in indexes), sum(i.ready_bytes for i in indexes), capacity_bytes)

    def clear(self) -> None:
        """Forgets everything; memory that is held lives until its view is gone."""
        with self.lock:
            self.memory.clear()
            self._lane_of.clear()
            self._events.post(EventKind.CLEARED)

    def check(self) -> None:
        """Raises `InvariantError`."""
        with self.lock:
            self.memory.check(being_made=self._growing)
            if sum(len(writer_slots.index) for writer_slots in self.memory.writers()) != len(self._lane_of):
                raise InvariantError(f"tier {self._name}: keys and lanes disagree")
            if any(writer_slots.index.find(key) is None for key, writer_slots in self._lane_of.items()):
                raise InvariantError(f"tier {self._name}: a key is not in its lane")

    def _find_all(self, keys: Sequence[StoreKey]) -> list[Entry[StoreKey] | None]:
        """What is visible of these. Most batches are of one tenant, size and writer: one lane. Locked."""
        writers = list(map(self._lane_of.get, keys))
        distinct = set(filter(None, writers))
        if len(distinct) == 1:
            (writer_slots,) = distinct
            return writer_slots.index.find_all(keys)
        return [
            writer_slots.index.find(key) if writer_slots is not None else None
            for key, writer_slots in zip(keys, writers, strict=True)
        ]

    def _take_slot(self, writer_slots: WriterSlots, key: StoreKey, nbytes: int) -> WriteSlot | WriteStatus:
        """A free slot of the lane, or that of its coldest block. Locked."""
        outcome = writer_slots.index.prepare(key, young_s=self._young_s())
        if isinstance(outcome, WriteStatus):
            return outcome
        if outcome.evicted is not None:
            self._note_evicted([outcome.evicted])
        self._lane_of[key] = writer_slots
        writer_slots.size_class.renew(outcome.entry)
        return WriteSlot(key, writer_slots.size_class.view(outcome.entry, nbytes), outcome.entry, writer_slots)

    def _note_evicted(self, keys: Sequence[StoreKey]) -> None:
        """Forgets evicted keys, whose slots belong to others already. Caller holds the lock."""
        for key in keys:
            del self._lane_of[key]
        self._num_evicted.inc(len(keys))
        self._events.post(EventKind.REMOVED, keys)

    def _young_s(self) -> float:
        """Blocks committed after this time stay."""
        return self._clock() - self._min_residency_s if self._min_residency_s else math.inf

    def _grow(self, growth: Growth, dropped: Sequence[Slab]) -> bool:
        """Makes the slab that `prepare` has accounted for; False when there is no memory. Unlocked."""
        slab = None
        try:
            give_back(dropped)
            slab = self.memory.make(growth)
        except (OSError, MemoryError):
            _log.exception("tier %s: no memory for a slab; lower its capacity", self._name)
        finally:
            with self.lock:
                self._growing = False
                self._grown.notify_all()
                if slab is None:
                    self.memory.cancel(growth)
                else:
                    self.memory.add(slab)
        return slab is not None

    def _abort(self, slot: WriteSlot) -> None:
        entry, slot._entry = slot._entry, None
        if entry is not None:
            if slot._writer_slots.index.find(slot.key) is entry:
                self._lane_of.pop(slot.key, None)
            slot._writer_slots.index.abort(entry)

    def _forget(self, key: StoreKey) -> bool:
        """Drops a key from its lane; True when it was readable. Locked."""
        writer_slots = self._lane_of.pop(key, None)
        if writer_slots is None:
            return False
        entry = writer_slots.index.find(key)
        found = writer_slots.index.discard(key) and entry is not None and entry.ready
        if writer_slots.retired and entry is not None:
            self.memory.note_freed(writer_slots, entry.slot)
        return found


def give_back(slabs: Iterable[Slab]) -> None:
    """Gives the memory of slabs back to the system. Hold no lock: it takes a while."""
    for slab in slabs:
        try:
            slab.give_back()
        except OSError:
            _log.exception("memory of a slab cannot be given back before its last map is gone")


def _status_beside(writer_slots: WriterSlots, key: StoreKey, writer: int) -> WriteStatus:
    """What `writer` hears who would write a block that is there, or is being written."""
    entry = writer_slots.index.find(key)
    if entry is not None and not entry.ready and writer_slots.writer not in (OWN_PROCESS, writer):
        return WriteStatus.THROTTLED  # another client may have been stopped: nobody knows when it will be there
    return WriteStatus.EXISTS
