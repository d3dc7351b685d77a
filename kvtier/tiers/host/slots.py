"""The slots of a host tier: which block is in which, and how a block gets one, keeps it, and loses it."""

import collections
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import Counter

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import InvalidInputError
from kvtier.events import EventKind
from kvtier.identity.keys import TENANT_ID_BYTES, StoreKey, TenantId
from kvtier.memory.pages import round_up
from kvtier.memory.slab_layout import SharedSlab
from kvtier.policies.base import Use, use_in_batch
from kvtier.system.quiet_log import QuietLog
from kvtier.system.short_lock import ShortLock
from kvtier.tiers.base import Status, Usage, WriteStatus
from kvtier.tiers.common.event_queue import EventQueue
from kvtier.tiers.common.shares import Share
from kvtier.tiers.host.entries import Entry
from kvtier.tiers.host.lane import Lane
from kvtier.tiers.host.reclaim import Reclaim
from kvtier.tiers.host.relocation import Growth, Relocation
from kvtier.tiers.host.slab import OWN_PROCESS, SLOT_ALIGN_BYTES, Slab
from kvtier.tiers.host.slab_memory import SlabMemory
from kvtier.tiers.host.tenant_memory import TenantMemory

_MOST_MOVED_BYTES = 64 << 20
"""Copied at most before one block gets its slot, some 10 ms; then blocks are evicted until one fits."""
_SLAB_WAIT_S = 2.0
"""How long a writer waits for memory that another one of its tenant is getting: some ms where the system has it. Below
the time that a call of an engine may take."""
_SHRINK_S = 2.0
"""How long shares are being set at most, while tenants come down to their caps; the rest goes as they write."""
_SHRINK_AGAIN_S = 0.01
"""How long a tenant that is above its cap writes on before more of it goes: others want the lock, too."""
_PAUSE_S = 1e-3
"""Between two steps of that: whoever waits for the lock has looked again by then."""
_log = logging.getLogger(__name__)


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
    of `set_shares`."""

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
        self._name, self._events, self._num_evicted = name, events, num_evicted
        self._residency_s, self._clock = residency_s, clock
        self.lock = ShortLock()
        """Held while slots change hands, never while memory is copied, made or given back."""
        self.memory = memory
        """Guarded by lock, but for making slabs."""
        self._reclaim = Reclaim(memory)
        """Guarded by lock."""
        self._changed = threading.Condition(self.lock)  # type: ignore[arg-type]  # has all that it asks of a lock
        """Notified when a thread has finished making or emptying a slab."""
        self._evicted: collections.Counter[bytes] = collections.Counter()
        """Blocks that were evicted, by tenant. Guarded by lock."""
        self._warnings = QuietLog(_log, clock=clock)

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
        most_moved_bytes = _MOST_MOVED_BYTES
        wait_until_s = MONOTONIC() + _SLAB_WAIT_S
        shrinks = True
        while True:
            with self.lock:
                found = self._lane_for(key, slot_bytes, writer, wait_until_s)
                if isinstance(found, WriteStatus):
                    return found
                tenant, lane = found
                step = self._step(tenant, lane, most_moved_bytes, shrinks=shrinks)
                shrinks = False
                slot = None
                if step is True and lane.num_free:
                    slab, entry = self.memory.take(tenant, lane, key)
                    slot = WriteSlot(key, nbytes, entry, slab)
                elif not isinstance(step, bool):
                    tenant.changing = True
                dropped = self.memory.take_dropped()
            give_back(dropped)
            if slot is not None:
                return slot
            if isinstance(step, Relocation):
                most_moved_bytes -= step.nbytes
                self._relocate(step, tenant)
            elif not isinstance(step, bool):
                step = self._grow(step)
            elif step:  # the time for once is over: others get the lock before it is looked at again
                time.sleep(_PAUSE_S)
            if step is False:
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
            if not self._changed.wait(wait_until_s - MONOTONIC()):
                return WriteStatus.THROTTLED

    def _step(
        self, tenant: TenantMemory, lane: Lane, most_moved_bytes: int, *, shrinks: bool
    ) -> Growth | Relocation | bool:
        """The next thing to do for a slot in this lane. Locked. True: take one, or look again; False: none may be had.

        :param shrinks: a tenant that is above its cap gives up some of that first.
        """
        more: Relocation | bool = False
        if shrinks and tenant.is_above_cap and not tenant.changing and MONOTONIC() >= tenant.shrinks_from_s:
            more = self._shrink(tenant, most_moved_bytes)
            if isinstance(more, Relocation):
                return more
            tenant.shrinks_from_s = MONOTONIC() + _SHRINK_AGAIN_S
        if not tenant.may_grow(lane):
            self.memory.forget_if_empty(tenant, lane)
            return False
        if lane.num_free or more or tenant.lanes.get(lane.kind) is not lane:
            return True
        step = self._reclaim.make_room(
            tenant, lane, young_s=self._young_s(tenant.tenant), most_moved_bytes=most_moved_bytes
        )
        self._note_evicted()
        return step

    def _shrink(self, tenant: TenantMemory, most_moved_bytes: int) -> Relocation | bool:
        """`Reclaim.shrink`. Locked."""
        step = self._reclaim.shrink(tenant, self._young_s(tenant.tenant), most_moved_bytes)
        self._note_evicted()
        return step

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
        until_s = MONOTONIC() + _SHRINK_S
        with self.lock:
            self.memory.set_shares(shares)
            above = [tenant for tenant in self.memory.tenants() if tenant.is_above_cap]
        for tenant in above:
            while MONOTONIC() < until_s and self._shrink_once(tenant):
                time.sleep(_PAUSE_S)

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

    def num_evicted_of(self, tenant: TenantId | None) -> int:
        """Blocks of the tenant that were evicted since the start; None: of all tenants."""
        with self.lock:
            return self._evicted.total() if tenant is None else self._evicted[tenant]

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

    def _note_evicted(self) -> None:
        """Tells of evicted blocks, whose slots may belong to others already. Caller holds the lock."""
        if keys := self._reclaim.take_evicted():
            self._num_evicted.inc(len(keys))
            self._evicted.update(key[:TENANT_ID_BYTES] for key in keys)
            self._events.post(EventKind.REMOVED, keys)

    def _shrink_once(self, tenant: TenantMemory) -> bool:
        """One step of what brings the tenant down to its cap; whether there is another one. Unlocked."""
        with self.lock:
            if not self._changed.wait_for(lambda: not tenant.changing, _SLAB_WAIT_S):
                return False
            step = self._shrink(tenant, _MOST_MOVED_BYTES)
            tenant.changing = isinstance(step, Relocation)
            dropped = self.memory.take_dropped()
        give_back(dropped)
        if isinstance(step, Relocation):
            self._relocate(step, tenant)
        self._events.flush()
        return step is not False

    def _young_s(self, tenant: TenantId) -> float:
        """Blocks committed after this time stay, whatever the tenant wants to write."""
        residency_s = self._residency_s(tenant)
        return self._clock() - residency_s if residency_s else math.inf

    def _grow(self, growth: Growth) -> bool:
        """Makes the slab that is charged; False when there is no memory. Unlocked."""
        slab = None
        try:
            slab = self._make(growth)
        finally:
            with self.lock:
                self._settle(growth, slab, growth.tenant)
        return slab is not None

    def _relocate(self, relocation: Relocation, tenant: TenantMemory) -> None:
        """Empties a slab, which may be another one's, so that `tenant` has room. Unlocked."""
        made = None
        copied = False
        try:
            if relocation.growth is None or (made := self._make(relocation.growth)) is not None:
                relocation.copy(made)
                copied = True
        finally:
            with self.lock:
                self._settle(relocation.growth, made, tenant)
                self.memory.finish(relocation, copied=copied)
                dropped = self.memory.take_dropped()
            give_back(dropped)

    def _make(self, growth: Growth) -> Slab | None:
        try:
            return self.memory.make(growth)
        except (OSError, MemoryError) as error:
            self._warnings.warning(
                f"tier {self._name}: no memory for a slab; lower its capacity, or allow more descriptors: {error}"
            )
            return None

    def _settle(self, growth: Growth | None, made: Slab | None, tenant: TenantMemory) -> None:
        """The thread that changed slabs for this tenant is done with them. Locked."""
        tenant.changing = False
        self._changed.notify_all()
        if made is not None:
            self.memory.add(made)
        elif growth is not None:
            self.memory.cancel(growth)

    def _abort(self, slot: WriteSlot) -> None:
        entry, slot._entry = slot._entry, None
        if entry is not None:
            entry.owner.abort(entry)

    def _status_beside(self, entry: Entry[StoreKey], writer: int) -> WriteStatus:
        """What `writer` hears who would write a block that is there, or is being written. Locked."""
        if not entry.ready and self.memory.slab_of(entry).kind.writer not in (OWN_PROCESS, writer):
            return WriteStatus.THROTTLED  # another client may have been stopped: nobody knows when it will be there
        return WriteStatus.EXISTS


def give_back(slabs: Iterable[Slab]) -> None:
    """Gives the memory of slabs back to the system. Hold no lock: it takes a while."""
    for slab in slabs:
        try:
            slab.give_back()
        except OSError:
            _log.exception("memory of a slab cannot be given back before its last map is gone")
