"""The slots of a host tier: which block is in which, and how a block gets one, keeps it, and loses it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import Counter

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import InvalidInputError
from kvtier.events import EventKind
from kvtier.identity.keys import TENANT_ID_BYTES, StoreKey, TenantId
from kvtier.memory.pages import round_up
from kvtier.memory.slab_layout import SharedSlab
from kvtier.policies.base import Use, use_in_batch
from kvtier.system.short_lock import ShortLock
from kvtier.tiers.base import Status, Usage, WriteStatus
from kvtier.tiers.common.event_queue import EventQueue
from kvtier.tiers.common.shares import Share
from kvtier.tiers.host.entries import Entry
from kvtier.tiers.host.lane import Lane
from kvtier.tiers.host.relocation import Relocation
from kvtier.tiers.host.slab import OWN_PROCESS, SLOT_ALIGN_BYTES, Slab
from kvtier.tiers.host.slab_changes import MOST_MOVED_BYTES, SlabChanges, give_back
from kvtier.tiers.host.slab_memory import SlabMemory
from kvtier.tiers.host.tenant_memory import TenantMemory

_SLAB_WAIT_S = 2.0
"""How long a writer waits for memory that another one of its tenant is getting: some ms where the system has it. Below
the time that a call of an engine may take."""


class WriteSlot:
    """Room for one block, until `HostTier.commit` or `HostTier.abort`; lookups answer PENDING meanwhile."""

    __slots__ = ("_entry", "_slab", "key", "slot", "view")

    def __init__(self, key: StoreKey, nbytes: int, entry: Entry[StoreKey], slab: Slab) -> None:
        self.key = key
        self.slot = entry.slot
        """Which slab, and which place in it: `kvtier.memory.slab_layout.SLAB_STRIDE`."""
        self.view = slab.view(entry.slot - slab.slot_id(0), nbytes)
        """Exactly the payload's length, writable, content undefined. Do not use it after commit or abort."""
        self._entry: Entry[StoreKey] | None = entry
        """None once committed or aborted. Guarded by the tier's lock."""
        self._slab = slab

    @property
    def slab_bytes(self) -> int:
        """The size in bytes of the slot's slab, which cannot be dropped until commit or abort."""
        return self._slab.nbytes


class HostSlots:
    """Keys, slots and memory, behind one lock. Any thread. Events are posted here; the tier flushes them, but for those
    of `set_shares`. How a block gets memory is `SlabChanges`' part."""

    def __init__(
        self,
        name: str,
        memory: SlabMemory,
        events: EventQueue,
        *,
        residency_s: Callable[[TenantId], float],
        num_evicted: Counter,
        clock: Clock,
    ) -> None:
        """
        :param name: of the tier, for messages.
        :param residency_s: how many seconds a block stays at least, whatever this tenant wants to write. Called with
            the lock.
        """
        self._events, self._clock = events, clock
        self.lock = ShortLock()
        """Held while slots change hands, never while memory is copied, made or given back."""
        self.memory = memory
        """Guarded by lock, but for making slabs."""
        self.changes = SlabChanges(
            name, self.lock, memory, events, residency_s=residency_s, num_evicted=num_evicted, clock=clock
        )

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        miss, hit, pending = Status.MISS, Status.HIT, Status.PENDING
        with self.lock:
            entries = list(map(self.memory.blocks.get, keys))
            return [miss if entry is None else hit if entry.ready else pending for entry in entries]

    def hold(
        self, keys: Sequence[StoreKey], i: int, touch: bool = True, nbytes: int | None = None
    ) -> Entry[StoreKey] | None:
        """Pins block `i` of a batch where it is until it is unpinned; None where there is none. Hold the lock.

        :param touch: counts as a use.
        :param nbytes: length that its payload must have.
        """
        entry = self.memory.blocks.get(keys[i])
        if entry is None or not entry.ready or (nbytes is not None and entry.nbytes != nbytes):
            return None
        entry.pins += 1
        if touch:
            entry.owner.note_use(entry, use_in_batch(keys, i, entry.nbytes))
        return entry

    def prepare(self, key: StoreKey, nbytes: int, writer: int = OWN_PROCESS) -> WriteSlot | WriteStatus:
        """Finds a slot, if need be by making or emptying slabs outside the lock; for a tenant one thread does so at a
        time. THROTTLED where others wait for that thread longer than `_SLAB_WAIT_S`: the system is short of memory."""
        slot_bytes = max(SLOT_ALIGN_BYTES, round_up(nbytes, SLOT_ALIGN_BYTES))
        if not self.memory.sizes.may_hold(slot_bytes):
            return WriteStatus.FULL
        most_moved_bytes = MOST_MOVED_BYTES
        wait_until_s = MONOTONIC() + _SLAB_WAIT_S
        shrinks = True
        while True:
            with self.lock:
                found = self._lane_for(key, slot_bytes, writer, wait_until_s)
                if isinstance(found, WriteStatus):
                    return found
                tenant, lane = found
                step = self.changes.next_step(tenant, lane, most_moved_bytes, shrinks=shrinks)
                shrinks = False
                slot = None
                if step is True and lane.num_free:
                    slab, entry = self.memory.take(tenant, lane, key)
                    slot = WriteSlot(key, nbytes, entry, slab)
                dropped = self.memory.take_dropped()
            give_back(dropped)
            if slot is not None:
                return slot
            if isinstance(step, Relocation):
                most_moved_bytes -= step.nbytes
            if not self.changes.carry_out(step, tenant):
                return WriteStatus.FULL

    def _lane_for(
        self, key: StoreKey, slot_bytes: int, writer: int, wait_until_s: float
    ) -> tuple[TenantMemory, Lane] | WriteStatus:
        """The place in which a thread may look for a slot or get memory. Locked; waits while another thread gets it."""
        tenant_id = TenantId(key[:TENANT_ID_BYTES])
        while True:
            if (there := self.memory.blocks.get(key)) is not None:
                return self._status_beside(there, writer)
            tenant = self.memory.tenant(tenant_id)
            lane = tenant.lane(slot_bytes, writer)
            if lane.num_free or not tenant.changing:
                return tenant, lane
            if not self.changes.wait(wait_until_s):
                return WriteStatus.THROTTLED

    def finish(self, slots: Sequence[WriteSlot], checksums: Mapping[WriteSlot, int]) -> None:
        """Commits the slots that have a checksum, last to first, and aborts the others.

        `InvalidInputError`, after that: some were committed or aborted before.
        """
        stored: list[StoreKey] = []
        num_ended = 0
        now_s = self._clock()
        with self.lock:
            for i in range(len(slots) - 1, -1, -1):
                slot = slots[i]
                if slot not in checksums:
                    self._abort(slot)
                    continue
                entry, slot._entry = slot._entry, None
                if entry is None:
                    num_ended += 1
                    continue
                nbytes = len(slot.view)
                use = Use(slots[i - 1].key if i else None, i, len(slots), -1, 0, nbytes)
                if entry.owner.commit(entry, nbytes=nbytes, checksum=checksums[slot], now_s=now_s, use=use):
                    stored.append(slot.key)
            stored.reverse()
            self._events.post(EventKind.STORED, stored)
            dropped = self.memory.take_dropped()
        give_back(dropped)
        if num_ended:
            raise InvalidInputError(f"{num_ended} of {len(slots)} write slots were committed or aborted before")

    def abort(self, slots: Iterable[WriteSlot]) -> None:
        """Gives slots back unwritten; ignores those that were committed or aborted before."""
        with self.lock:
            for slot in slots:
                self._abort(slot)
            dropped = self.memory.take_dropped()
        give_back(dropped)

    def abandon(self, slots: Iterable[WriteSlot]) -> None:
        """`abort` of slots that their writer may still write to: nobody else ever gets them or their slabs."""
        with self.lock:
            for slot in slots:
                if slot._entry is not None:
                    self.memory.retire(slot._slab, gone=False)
                    self._abort(slot)
            dropped = self.memory.take_dropped()
        give_back(dropped)

    def discard(self, keys: Sequence[StoreKey]) -> int:
        """Forgets these keys; returns how many of them could be read until now."""
        found: list[StoreKey] = []
        with self.lock:
            for key in keys:
                entry = self.memory.blocks.get(key)
                if entry is not None:
                    entry.owner.forget(entry)
                    if entry.ready:
                        found.append(key)
            self._events.post(EventKind.REMOVED, found)
            dropped = self.memory.take_dropped()
        give_back(dropped)
        return len(found)

    def retire_writer(self, writer: int) -> None:
        """Notes that this writer writes to its slabs no more. Blocks in them can be read until they are evicted."""
        with self.lock:
            self.memory.retire_writer(writer)
            dropped = self.memory.take_dropped()
        give_back(dropped)

    def set_shares(self, shares: Mapping[TenantId, Share]) -> None:
        """What tenants are owed of memory from now on. `InvalidInputError`: more is guaranteed than there is.

        Tenants that are above their caps then give up what may go, for some seconds at most.
        """
        with self.lock:
            self.memory.set_shares(shares)
        self.changes.come_down()

    def owed_bytes(self, tenant: TenantId) -> int:
        """Memory that the tenant can have, whatever those want who have memory now."""
        with self.lock:
            return self.memory.owed_bytes(tenant)

    def open_slab(self, tenant: TenantId, number: int, writer: int) -> SharedSlab | None:
        """A descriptor of one of the tenant's slabs, to be passed to `writer`; None: no such slab. `OSError`."""
        with self.lock:
            slab = self.memory.find(tenant, number)
            return slab.share(writer) if slab is not None else None

    def near_eviction(self, share: float) -> list[StoreKey]:
        """The blocks that are evicted next: of each tenant that cannot grow, the coldest `share` of its slots."""
        with self.lock:
            at_risk = [(t.entries, math.ceil(t.num_slots * share) - t.num_free) for t in self.memory.full_tenants()]
            return [key for entries, most in at_risk if most > 0 for key in entries.coldest(most)]

    def usage(self, tenant: TenantId | None = None) -> Usage:
        """Number and payload bytes of the blocks that can be read, of all tenants or of one; the tier's capacity."""
        with self.lock:
            every = [t.entries for t in self.memory.tenants(tenant)]
            capacity_bytes = self.memory.sizes.capacity_bytes
            return Usage(sum(e.num_ready for e in every), sum(e.ready_bytes for e in every), capacity_bytes)

    def taken_bytes(self) -> int:
        """What is taken of the capacity: slots with blocks, with what is kept of blocks and slabs. O(sizes in use)."""
        with self.lock:
            overhead_bytes = self.memory.sizes.block_overhead_bytes
            return sum(t.cost_bytes - t.idle_bytes - t.num_free * overhead_bytes for t in self.memory.tenants())

    def clear(self) -> None:
        """Forgets everything; memory that is held lives until its view is gone."""
        with self.lock:
            self.memory.clear()
            self._events.post(EventKind.CLEARED)

    def check(self) -> None:
        """Raises `InvariantError`."""
        with self.lock:
            self.memory.check()

    def _abort(self, slot: WriteSlot) -> None:
        entry, slot._entry = slot._entry, None
        if entry is not None:
            entry.owner.abort(entry)

    def _status_beside(self, entry: Entry[StoreKey], writer: int) -> WriteStatus:
        """What `writer` hears who would write a block that is there, or is being written. Locked."""
        if not entry.ready and self.memory.slab_of(entry).kind.writer not in (OWN_PROCESS, writer):
            return WriteStatus.THROTTLED  # another client may have been stopped: nobody knows when it will be there
        return WriteStatus.EXISTS
