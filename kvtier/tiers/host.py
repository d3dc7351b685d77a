"""The host tier: blocks in this process's memory."""

import logging
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence

from kvtier.clock import MONOTONIC, Clock
from kvtier.codec import checksum as checksum_of
from kvtier.errors import InvalidInputError, InvariantError
from kvtier.events import EventKind, EventSink, ignore_event
from kvtier.keys import TENANT_ID_BYTES, StoreKey, TenantId
from kvtier.metrics import Metrics
from kvtier.tiers import memfd
from kvtier.tiers.base import ReadableBuffer, Status, Usage, WriteStatus, require_pairs
from kvtier.tiers.gate import CallGate
from kvtier.tiers.holds import HeldPlaces, Lease, Pin, SharedSlab, WriteSlot
from kvtier.tiers.memory import PAGE_BYTES, copy_bytes, round_up
from kvtier.tiers.outbox import Outbox
from kvtier.tiers.slab import OWN_PROCESS, SLOT_ALIGN_BYTES, Lane, Slab
from kvtier.tiers.slab_memory import Growth, SlabMemory
from kvtier.tiers.slot_index import Entry
from kvtier.wire.shared_memory import PLACE

_log = logging.getLogger(__name__)


class HostTier:
    """Blocks in slabs of memory, each slab of one tenant, one slot size and one writer.

    Slabs are made on demand until `capacity_bytes`. Then a block takes the place of the least recently
    used one of its own size class; a class that holds less than others gets a slab of the largest one,
    whose blocks are evicted, until shares are even (`kvtier.tiers.slab_memory`). A slab that somebody reads
    from or writes to stays, and so does one with pins. The memory of all slabs together never exceeds the
    capacity. A payload larger than `slab_bytes` gets a slab of its own; one larger than the capacity is FULL.

    With `shared`, slabs lie in memory that other processes may map: they read what `acquire_places` holds for
    them, and write to slots that were prepared for them as `writer`.

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
        shared: bool = False,
        min_residency_s: float = 0.0,
        on_event: EventSink = ignore_event,
        metrics: Metrics | None = None,
        clock: Clock = MONOTONIC,
    ) -> None:
        """
        :param capacity_bytes: memory for payloads, rounded down to whole pages.
        :param slab_bytes: memory taken at a time; smaller wastes fewer bytes on small tenants, larger
            takes less bookkeeping. Limited to an eighth of the capacity.
        :param prefault: touch new memory before use. Off only where start-up counts more than speed.
        :param shared: in memory that other processes may map; Linux only.
        :param min_residency_s: a block is not evicted before: writers hear FULL instead, unless they have no memory
            at all yet; else whoever writes without a pause would keep all others out.
        :param on_event: called from the threads that use the tier; must not call `close`.
        :param metrics: counts evictions.
        """
        if capacity_bytes < PAGE_BYTES or slab_bytes < 1:
            raise InvalidInputError(f"host tier of {capacity_bytes} bytes in slabs of {slab_bytes}: too small")
        self._name = name
        self._min_residency_s = min_residency_s
        self._clock = clock
        self._gate = CallGate(f"tier {name}")
        self._outbox = Outbox(name, on_event)
        self._num_evicted = (metrics or Metrics()).evicted_blocks.labels(name)
        self._lock = threading.Lock()
        self._grown = threading.Condition(self._lock)
        """Notified when a thread has finished making a slab."""
        self._memory = SlabMemory(capacity_bytes, slab_bytes, shared=shared, prefault=prefault)
        """Guarded by _lock, but for making slabs."""
        self._lane_of: dict[StoreKey, Lane] = {}
        """Where each visible key is. Guarded by _lock."""
        self._growing = False
        """A thread is making a slab outside the lock. Guarded by _lock."""

    @property
    def name(self) -> str:
        return self._name

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        """See `Tier.lookup`."""
        statuses = [Status.MISS] * len(keys)
        with self._gate, self._lock:
            lanes = map(self._lane_of.get, keys)
            for i, (key, lane) in enumerate(zip(keys, lanes, strict=True)):
                if lane is not None and (entry := lane.index.find(key)) is not None:
                    statuses[i] = Status.HIT if entry.ready else Status.PENDING
        return statuses

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
                dropped = self._memory.take_dropped()
            _give_back(dropped)
            self._outbox.flush()
            return len(found)

    def usage(self) -> Usage:
        """See `Tier.usage`: bytes are those of payloads that can be read."""
        with self._gate, self._lock:
            return self._sum(self._memory.lanes())

    def usage_of(self, tenant: TenantId) -> Usage:
        """One tenant's part of `usage`."""
        with self._gate, self._lock:
            return self._sum(self._memory.lanes(tenant))

    def check(self) -> None:
        """See `Tier.check`."""
        with self._gate, self._lock:
            self._memory.check(being_made=self._growing)
            if sum(len(lane.index) for lane in self._memory.lanes()) != len(self._lane_of):
                raise InvariantError(f"tier {self._name}: keys and lanes disagree")
            if any(lane.index.find(key) is None for key, lane in self._lane_of.items()):
                raise InvariantError(f"tier {self._name}: a key is not in its lane")

    def close(self) -> None:
        """See `Tier.close`. Memory under a lease or write slot lives until its view is gone."""
        if not self._gate.close():
            return
        with self._lock:
            self._memory.clear()
            self._lane_of.clear()
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
            full = [lane.index for lane in self._memory.full_lanes()]
            at_risk = [(index, math.ceil(index.num_slots * share) - index.num_free) for index in full]
            return [key for index, most in at_risk if most > 0 for key in index.coldest(most)]

    def release(self, leases: Iterable[Lease | None]) -> None:
        """Gives leases back. Ignores None and what was released before. Allowed after `close`."""
        self._release(leases)

    def prepare(self, key: StoreKey, nbytes: int, *, writer: int = OWN_PROCESS) -> WriteSlot | WriteStatus:
        """Room for a payload of `nbytes`, to be filled by the caller. May evict other blocks.

        Returns EXISTS or FULL as `write` does. The slot stays the caller's until `commit` or `abort`.

        :param writer: in whose slabs; see `retire_writer`.
        """
        with self._gate:
            outcome = self._prepare(key, nbytes, writer)
            self._outbox.flush()
            return outcome

    def commit(self, slot: WriteSlot, checksum: int) -> None:
        """Makes the block readable. `checksum` is kept for leases and not looked at.

        Raises `InvalidInputError` when the slot was committed or aborted before.
        """
        with self._gate:
            self._finish([slot], {slot: checksum})

    def commit_all(self, checksums: Mapping[WriteSlot, int]) -> None:
        """`commit` of a batch; its last block becomes the coldest of it, as tails should."""
        with self._gate:
            self._finish(list(checksums), checksums)

    def abort(self, slot: WriteSlot) -> None:
        """Gives the slot back unwritten; does nothing after commit, abort or `close`."""
        with self._lock:
            self._abort(slot)

    def acquire_places(self, keys: Sequence[StoreKey], payload_bytes: Sequence[int]) -> HeldPlaces:
        """Holds committed blocks in place for another process that maps the slabs; counts as a use.

        A block of another length than asked for is a MISS. Ends with `release_places`, from any thread.
        """
        with self._gate:
            return self._acquire_places(keys, payload_bytes)

    def release_places(self, places: HeldPlaces) -> None:
        """Gives back all that is held. Idempotent; allowed after `close`."""
        with self._lock:
            held, places._held = places._held, []
            for lane, entry in held:
                lane.index.unpin(entry)

    def pin(self, keys: Sequence[StoreKey]) -> list[Pin | None]:
        """Keeps committed blocks in memory, however long; None where `read` would miss. Counts as a use.

        Every pin ends by `unpin`. A block that is discarded meanwhile misses at once; its memory comes back then.
        """
        pins: list[Pin | None] = []
        with self._gate, self._lock:
            for key in reversed(keys):
                lane = self._lane_of.get(key)
                entry = lane.index.pin(key) if lane is not None else None
                if lane is None or entry is None:
                    pins.append(None)
                    continue
                slab = lane.size_class.slab_of(entry)
                slab.num_pins += 1
                lane.size_class.note_use(lane, entry)
                pins.append(Pin(entry, slab))
        pins.reverse()
        return pins

    def unpin(self, pins: Iterable[Pin]) -> None:
        """Ends pins. Ignores what was unpinned before. Allowed after `close`."""
        with self._lock:
            for pin in pins:
                entry, pin._entry = pin._entry, None
                if entry is None:
                    continue
                lane = pin._slab.lane
                pin._slab.num_pins -= 1
                lane.index.unpin(entry)
                if lane.retired:
                    self._memory.note_freed(lane, entry.slot)
            dropped = self._memory.take_dropped()
        _give_back(dropped)

    def are_findable(self, pins: Sequence[Pin]) -> list[bool]:
        """Whether each pinned block is what lookups of its key find: not once it was discarded."""
        with self._gate, self._lock:
            return [p._entry is not None and p._slab.lane.index.find(p.key) is p._entry for p in pins]

    def retire_writer(self, writer: int) -> None:
        """Nobody will write to this writer's slabs again: what is committed in them can be read until it is evicted.

        Commit or abort all its slots first. Allowed after `close`.
        """
        with self._lock:
            self._memory.retire(writer)
            dropped = self._memory.take_dropped()
        _give_back(dropped)

    def open_slab(self, tenant: TenantId, number: int, writer: int) -> SharedSlab | None:
        """A descriptor of one of the tenant's slabs, to be passed to `writer`: writable if the slab is its own.

        None when there is no such slab, or no longer. The caller closes the descriptor. `OSError`: none to be had.
        """
        with self._gate, self._lock:
            slab = self._memory.find(tenant, number)
            if slab is None or slab.descriptor is None:
                return None
            own = slab.lane.writer == writer and not slab.lane.retired
            descriptor = os.dup(slab.descriptor) if own else memfd.reopen_read_only(slab.descriptor)
            return SharedSlab(descriptor, own, slab.lane.slot_bytes, slab.num_slots)

    def _sum(self, lanes: Iterable[Lane]) -> Usage:
        indexes = [lane.index for lane in lanes]
        capacity_bytes = self._memory.capacity_bytes
        return Usage(sum(i.num_ready for i in indexes), sum(i.ready_bytes for i in indexes), capacity_bytes)

    def _acquire(self, keys: Sequence[StoreKey], *, touch: bool = True) -> list[Lease | None]:
        leases: list[Lease | None] = []
        with self._lock:
            for key in reversed(keys):
                lane = self._lane_of.get(key)
                entry = lane.index.pin(key) if lane is not None else None
                if lane is None or entry is None:
                    leases.append(None)
                    continue
                if touch:
                    lane.size_class.note_use(lane, entry)
                leases.append(Lease(lane.size_class.view(entry, entry.nbytes).toreadonly(), entry, lane))
        leases.reverse()
        return leases

    def _acquire_places(self, keys: Sequence[StoreKey], payload_bytes: Sequence[int]) -> HeldPlaces:
        held: list[tuple[Lane, Entry[StoreKey]]] = []
        places: list[bytes] = []
        statuses = bytearray(len(keys))
        with self._lock:
            for i in range(len(keys) - 1, -1, -1):
                lane = self._lane_of.get(keys[i])
                entry = lane.index.find(keys[i]) if lane is not None else None
                if lane is None or entry is None or not entry.ready or entry.nbytes != payload_bytes[i]:
                    continue
                lane.index.pin(keys[i])
                held.append((lane, entry))
                lane.size_class.note_use(lane, entry)
                places.append(PLACE.pack(entry.slot, entry.generation, entry.checksum))
                statuses[i] = Status.HIT
        places.reverse()
        return HeldPlaces(held, bytes(statuses), b"".join(places))

    def _release(self, leases: Iterable[Lease | None]) -> None:
        with self._lock:
            for lease in leases:
                if lease is not None and lease._entry is not None:
                    lease._lane.index.unpin(lease._entry)
                    lease._entry = None

    def _prepare(self, key: StoreKey, nbytes: int, writer: int = OWN_PROCESS) -> WriteSlot | WriteStatus:
        """Finds a slot, if need be by making a slab outside the lock; one thread makes slabs at a time."""
        tenant = TenantId(key[:TENANT_ID_BYTES])
        slot_bytes = max(SLOT_ALIGN_BYTES, round_up(nbytes, SLOT_ALIGN_BYTES))
        if not self._memory.may_hold(slot_bytes):
            return WriteStatus.FULL
        while True:
            with self._lock:
                if (there := self._lane_of.get(key)) is not None:
                    return _status_beside(there, key, writer)
                lane = self._memory.lane(tenant, slot_bytes, writer)
                if lane.index.num_free:
                    return self._take_slot(lane, key, nbytes)
                if self._growing:
                    self._grown.wait()
                    continue
                growth, evicted = self._memory.grow(lane, young_s=self._young_s())
                self._note_evicted(evicted)
                if growth is None:
                    return self._take_slot(lane, key, nbytes)
                self._growing = True
                dropped = self._memory.take_dropped()
            if not self._grow(growth, dropped):
                return WriteStatus.FULL

    def _take_slot(self, lane: Lane, key: StoreKey, nbytes: int) -> WriteSlot | WriteStatus:
        """A free slot of the lane, or that of its coldest block. Locked."""
        outcome = lane.index.prepare(key, young_s=self._young_s())
        if isinstance(outcome, WriteStatus):
            return outcome
        if outcome.evicted is not None:
            self._note_evicted([outcome.evicted])
        self._lane_of[key] = lane
        lane.size_class.renew(outcome.entry)
        return WriteSlot(key, lane.size_class.view(outcome.entry, nbytes), outcome.entry, lane)

    def _note_evicted(self, keys: Sequence[StoreKey]) -> None:
        """Their slots belong to others already. Locked."""
        for key in keys:
            del self._lane_of[key]
        self._num_evicted.inc(len(keys))
        self._outbox.post(EventKind.REMOVED, keys)

    def _young_s(self) -> float:
        """Blocks committed after this time stay."""
        return self._clock() - self._min_residency_s if self._min_residency_s else math.inf

    def _grow(self, growth: Growth, dropped: Sequence[Slab]) -> bool:
        """Makes the slab that `_prepare` has accounted for; False when there is no memory. Unlocked."""
        slab = None
        try:
            _give_back(dropped)
            slab = self._memory.make(growth)
        except (OSError, MemoryError):
            _log.exception("tier %s: no memory for a slab; lower its capacity", self._name)
        finally:
            with self._lock:
                self._growing = False
                self._grown.notify_all()
                if slab is None:
                    self._memory.cancel(growth)
                else:
                    self._memory.add(slab)
        return slab is not None

    def _finish(self, slots: Sequence[WriteSlot], checksums: Mapping[WriteSlot, int]) -> None:
        """Commits the slots that have a checksum, last to first, and aborts the others."""
        stored: list[StoreKey] = []
        now_s = self._clock()
        with self._lock:
            for slot in reversed(slots):
                if slot not in checksums:
                    self._abort(slot)
                    continue
                entry, slot._entry = slot._entry, None
                if entry is None:
                    raise InvalidInputError("write slot was committed or aborted before")
                lane = slot._lane
                if lane.index.commit(entry, nbytes=len(slot.view), checksum=checksums[slot], now_s=now_s):
                    lane.size_class.note_use(lane, entry)  # of its slab, too: else others', read once, would outlive it
                    stored.append(slot.key)
            stored.reverse()
            self._outbox.post(EventKind.STORED, stored)
        self._outbox.flush()

    def _abort(self, slot: WriteSlot) -> None:
        entry, slot._entry = slot._entry, None
        if entry is not None:
            if slot._lane.index.find(slot.key) is entry:
                self._lane_of.pop(slot.key, None)
            slot._lane.index.abort(entry)

    def _forget(self, key: StoreKey) -> bool:
        """Drops a key from its lane; True when it was readable. Locked."""
        lane = self._lane_of.pop(key, None)
        if lane is None:
            return False
        entry = lane.index.find(key)
        found = lane.index.discard(key) and entry is not None and entry.ready
        if lane.retired and entry is not None:
            self._memory.note_freed(lane, entry.slot)
        return found


def _copy_out(lease: Lease | None, into: memoryview) -> Status:
    if lease is None or len(lease.view) != len(into):
        return Status.MISS
    copy_bytes(into, lease.view)
    return Status.HIT


def _status_beside(lane: Lane, key: StoreKey, writer: int) -> WriteStatus:
    """What `writer` hears who would write a block that is there, or is being written."""
    entry = lane.index.find(key)
    if entry is not None and not entry.ready and lane.writer not in (OWN_PROCESS, writer):
        return WriteStatus.THROTTLED  # another client may have been stopped: nobody knows when it will be there
    return WriteStatus.EXISTS


def _give_back(slabs: Iterable[Slab]) -> None:
    """Without the lock: it takes a while."""
    for slab in slabs:
        try:
            slab.give_back()
        except OSError:
            _log.exception("memory of a slab cannot be given back before its last map is gone")
