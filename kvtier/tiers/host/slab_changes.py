"""Memory that tenants get and give up: blocks are evicted under the tier's lock, slabs made and emptied outside it."""

import collections
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable

from prometheus_client import Counter

from kvtier.clock import MONOTONIC, Clock
from kvtier.events import EventKind
from kvtier.identity.keys import TENANT_ID_BYTES, TenantId
from kvtier.system.quiet_log import QuietLog
from kvtier.system.short_lock import ShortLock
from kvtier.tiers.common.event_queue import EventQueue
from kvtier.tiers.host.lane import Lane
from kvtier.tiers.host.reclaim import Reclaim
from kvtier.tiers.host.relocation import Growth, Relocation
from kvtier.tiers.host.slab import Slab
from kvtier.tiers.host.slab_memory import SlabMemory
from kvtier.tiers.host.tenant_memory import TenantMemory

MOST_MOVED_BYTES = 64 << 20
"""Copied at most before one block gets its slot, some 10 ms; then blocks are evicted until one fits."""
_COME_DOWN_S = 2.0
"""How long tenants come down to their caps at most when shares are set; the rest goes as they write."""
_SHRINK_AGAIN_S = 0.01
"""How long a tenant that is above its cap writes on before more of it goes: others want the lock, too."""
_PAUSE_S = 1e-3
"""The pause between two steps of one thread: whoever waits for the lock has it in between."""
_log = logging.getLogger(__name__)


class SlabChanges:
    """What is done step by step for a slot that is not there, and for a cap that was lowered. Any thread.

    A step is found with the lock and carried out without it. Of each tenant one thread changes slabs at a time. Events
    are posted here; the tier flushes them, but for those of `come_down`.
    """

    def __init__(  # noqa: PLR0913 - what may be set, by keyword
        self,
        name: str,
        lock: ShortLock,
        memory: SlabMemory,
        events: EventQueue,
        *,
        residency_s: Callable[[TenantId], float],
        num_evicted: Counter,
        clock: Clock,
    ) -> None:
        """
        :param name: of the tier, for messages.
        :param lock: of the tier, which guards `memory` but for making slabs.
        :param residency_s: how many seconds a block stays at least, whatever this tenant wants to write. Called with
            the lock.
        """
        self._name, self._events, self._num_evicted = name, events, num_evicted
        self._residency_s, self._clock = residency_s, clock
        self._lock, self._memory = lock, memory
        self._reclaim = Reclaim(memory)
        """Guarded by _lock."""
        self._changed = threading.Condition(lock)  # type: ignore[arg-type]  # has all that it asks of a lock
        """Notified when a thread has finished making or emptying a slab."""
        self._evicted: collections.Counter[bytes] = collections.Counter()
        """Blocks that were evicted, by tenant. Guarded by _lock."""
        self._warnings = QuietLog(_log, clock=clock)

    def wait(self, until_s: float) -> bool:
        """Waits, with the lock, until some thread has changed slabs; False: none has by that time (monotonic)."""
        return self._changed.wait(until_s - MONOTONIC())

    def next_step(
        self, tenant: TenantMemory, lane: Lane, most_moved_bytes: int, *, shrinks: bool
    ) -> Growth | Relocation | bool:
        """Finds what is to be done for a slot in this lane, for `carry_out`. Caller holds the lock, and no other thread
        changes the tenant's slabs unless the lane has a free slot.

        True: take a slot if there is one, or else look again. False: none may be had.

        :param shrinks: a tenant that is above its cap gives up some of that first.
        """
        shrunk: Growth | Relocation | bool = False
        if shrinks and tenant.is_above_cap and not tenant.changing and MONOTONIC() >= tenant.shrinks_from_s:
            shrunk = self._shrink(tenant, most_moved_bytes)
            tenant.shrinks_from_s = MONOTONIC() + _SHRINK_AGAIN_S
            if isinstance(shrunk, Relocation):
                return shrunk
        if not tenant.may_grow(lane):
            self._memory.forget_if_empty(tenant, lane)
            return False
        if lane.num_free or shrunk or tenant.lanes.get(lane.kind) is not lane:
            return True
        young_s = self._young_s(tenant.tenant)
        step = self._reclaim.make_room(tenant, lane, young_s=young_s, most_moved_bytes=most_moved_bytes)
        return self._begun(tenant, step)

    def carry_out(self, step: Growth | Relocation | bool, tenant: TenantMemory) -> bool:
        """Does what `next_step` has found, without the lock. False: no slot may be had."""
        if isinstance(step, Relocation):
            self._relocate(step, tenant)
        elif isinstance(step, Growth):
            return self._grow(step)
        elif step:  # the time for one step is over
            time.sleep(_PAUSE_S)
        return step is not False

    def come_down(self) -> None:
        """Has tenants that are above their caps give up what may go, for `_COME_DOWN_S` at most."""
        until_s = MONOTONIC() + _COME_DOWN_S
        with self._lock:
            above = [tenant for tenant in self._memory.tenants() if tenant.is_above_cap]
        for tenant in above:
            while MONOTONIC() < until_s and self._shrink_once(tenant, until_s):
                time.sleep(_PAUSE_S)

    def num_evicted_of(self, tenant: TenantId | None) -> int:
        """Blocks of the tenant that were evicted since the start; None: of all tenants."""
        with self._lock:
            return self._evicted.total() if tenant is None else self._evicted[tenant]

    def _shrink_once(self, tenant: TenantMemory, until_s: float) -> bool:
        """One step of what brings the tenant down to its cap; whether there is another one."""
        with self._lock:
            while tenant.changing:
                if not self.wait(until_s):
                    return False
            step = self._shrink(tenant, MOST_MOVED_BYTES)
            dropped = self._memory.take_dropped()
        give_back(dropped)
        if isinstance(step, Relocation):
            self._relocate(step, tenant)
        self._events.flush()
        return step is not False

    def _shrink(self, tenant: TenantMemory, most_moved_bytes: int) -> Growth | Relocation | bool:
        """`Reclaim.shrink`. Caller holds the lock."""
        return self._begun(tenant, self._reclaim.shrink(tenant, self._young_s(tenant.tenant), most_moved_bytes))

    def _begun(self, tenant: TenantMemory, step: Growth | Relocation | bool) -> Growth | Relocation | bool:
        """Tells of the blocks that were evicted for a step, whose slots may belong to others already, and keeps other
        threads from the tenant's slabs if they are to change. Caller holds the lock."""
        if keys := self._reclaim.take_evicted():
            self._num_evicted.inc(len(keys))
            self._evicted.update(key[:TENANT_ID_BYTES] for key in keys)
            self._events.post(EventKind.REMOVED, keys)
        if not isinstance(step, bool):
            tenant.changing = True
        return step

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
            with self._lock:
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
            with self._lock:
                self._settle(relocation.growth, made, tenant)
                self._memory.finish(relocation, copied=copied)
                dropped = self._memory.take_dropped()
            give_back(dropped)

    def _make(self, growth: Growth) -> Slab | None:
        try:
            return self._memory.make(growth)
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
            self._memory.add(made)
        elif growth is not None:
            self._memory.cancel(growth)


def give_back(slabs: Iterable[Slab]) -> None:
    """Gives the memory of slabs back to the system. Hold no lock: it takes a while."""
    for slab in slabs:
        try:
            slab.give_back()
        except OSError:
            _log.exception("memory of a slab cannot be given back before its last map is gone")
