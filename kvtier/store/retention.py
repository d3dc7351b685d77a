"""Blocks that tenants want kept in memory for a time, and the thread that lets go of them."""

import heapq
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import InvariantError
from kvtier.identity.keys import StoreKey, TenantId, tenant_of
from kvtier.protocol.retention import PinStatus
from kvtier.store.metrics import StoreMetrics
from kvtier.system.ticking_thread import TickingThread
from kvtier.tiers.host.pins import SlabPin
from kvtier.tiers.host.tier import HostTier

_log = logging.getLogger(__name__)
_TICK_S = 0.25
"""Seconds between two looks for pins whose time is over."""
_BATCH = 1024
"""Blocks pinned at once: others wait for the memory tier meanwhile."""
_SPARE_ENDS = 64
"""How many ends of pins that are over may be remembered, beside as many as there are pins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionLimits:
    """What tenants may keep in memory. The default is nothing."""

    max_s: float = 0.0
    """Longest time of a pin; a longer one is cut to it. 0: there are no pins."""
    most_bytes: int = 0
    """Memory of all slabs with pins in them. 0: there are no pins."""
    most_blocks: int = 1 << 17
    """Pins in all. Bounds what they take themselves, half a KiB each."""
    several_tenants: bool = True
    """Whether there are several tenants: then none of them may have more than half of the bytes, or of the blocks."""


@dataclass(slots=True)
class _Kept:
    """One pin. Guarded by the pins' lock."""

    pin: SlabPin
    until_s: float


@dataclass(slots=True)
class _Held:
    """What pins hold, of one tenant or of all. Guarded by the pins' lock, but for reading."""

    num_blocks: int = 0
    payload_bytes: int = 0
    slab_bytes: int = 0
    """Memory of the slabs in which blocks are pinned, which cannot be given to others."""

    def add(self, pin: SlabPin, slab_bytes: int, sign: int) -> None:
        self.num_blocks += sign
        self.payload_bytes += sign * pin.nbytes
        self.slab_bytes += sign * slab_bytes


class Retention:
    """Which blocks stay in memory, and until when: at most one pin per block, whichever client of its tenant asked.

    A pin ends by its time, by `unpin`, with its block's discard, and with the process. Bounds are on the number of
    blocks and on the memory of whole slabs, since a slab with a single pin can be dropped for nobody. Where there are
    several tenants, each may have half of that at most: one alone cannot keep all others from pinning, and nothing is
    set aside for tenants that pin nothing.

    Any thread. The memory tier is called without the lock.
    """

    def __init__(
        self, memory: HostTier, limits: RetentionLimits, metrics: StoreMetrics, *, clock: Clock = MONOTONIC
    ) -> None:
        """`start` starts the thread. Memory stays the caller's, and is closed before this."""
        self._memory = memory
        self._limits = limits
        self.several_tenants = limits.several_tenants
        """What `RetentionLimits.several_tenants` says. May be changed at any time, by one thread."""
        self._num_asked = {status: metrics.pins.labels(status.name.lower()) for status in PinStatus}
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[StoreKey, _Kept] = {}
        """Guarded by _lock."""
        self._ends: list[tuple[float, StoreKey]] = []
        """A heap with an entry for every pin, at its end or before it, and some of pins that are over. Guarded by
        _lock."""
        self._num_in_slab: Counter[int] = Counter()
        """The number of pins in each slab, by the slab's number; no number is 0. Guarded by _lock."""
        self._all = _Held()
        self._of_tenant: defaultdict[TenantId, _Held] = defaultdict(_Held)
        """What pins hold of each tenant; tenants without pins are not in it. Guarded by _lock."""
        self._thread = TickingThread("kvtier-pins", _TICK_S, self._look)
        metrics.pinned_blocks.set_function(lambda: self._all.num_blocks)
        metrics.pinned_bytes.set_function(lambda: self._all.payload_bytes)
        metrics.pinned_slab_bytes.set_function(lambda: self._all.slab_bytes)

    def start(self) -> None:
        """Starts the thread, if there can be pins. Once."""
        if self.max_s:
            self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether pins end in time."""
        return not self.max_s or self._thread.alive

    @property
    def max_s(self) -> float:
        """The longest time of a pin; 0: there are none."""
        return self._limits.max_s if self._limits.most_bytes else 0.0

    def pin(self, tenant: TenantId, keys: Sequence[StoreKey], ttl_s: float) -> list[PinStatus]:
        """Pins blocks of the tenant, which uses them; a status per key. The first ones get what room there is."""
        self.end_due()
        until_s = self._clock() + min(ttl_s, self.max_s)
        statuses: list[PinStatus] = []
        for start in range(0, len(keys), _BATCH):
            statuses += self._pin(tenant, keys[start : start + _BATCH], until_s)
        for status, count in Counter(statuses).items():
            self._num_asked[status].inc(count)
        return statuses

    def unpin(self, keys: Iterable[StoreKey]) -> int:
        """Ends the pins of these blocks; returns how many there were."""
        with self._lock:
            over = [self._end(kept) for key in keys if (kept := self._kept.get(key)) is not None]
        self._memory.unpin(over)
        return len(over)

    def forget(self, keys: Sequence[StoreKey]) -> set[StoreKey]:
        """Ends the pins of those of these blocks that were discarded; returns their keys."""
        if not any(key in self._kept for key in keys):
            return set()  # as with almost every block that is evicted; not worth a lock that is held for long
        with self._lock:
            suspects = [kept for key in keys if (kept := self._kept.get(key)) is not None]
        findable = self._memory.are_findable([kept.pin for kept in suspects])
        gone = [kept for kept, is_findable in zip(suspects, findable, strict=True) if not is_findable]
        with self._lock:
            over = [self._end(kept) for kept in gone if self._kept.get(kept.pin.key) is kept]
        self._memory.unpin(over)
        return {pin.key for pin in over}

    def end_due(self) -> int:
        """Ends the pins whose time is over; returns how many."""
        now_s = self._clock()
        over: list[SlabPin] = []
        with self._lock:
            while self._ends and self._ends[0][0] <= now_s:
                _, key = heapq.heappop(self._ends)
                kept = self._kept.get(key)
                if kept is not None and kept.until_s <= now_s:
                    over.append(self._end(kept))
                elif kept is not None:  # pinned again meanwhile
                    heapq.heappush(self._ends, (kept.until_s, key))
        self._memory.unpin(over)
        return len(over)

    def check(self) -> None:
        """Raises `InvariantError` when what pins hold is miscounted. O(pins)."""
        with self._lock:
            of_all = _Held()
            of_tenant: defaultdict[TenantId, _Held] = defaultdict(_Held)
            slabs = {kept.pin.slab: kept.pin.slab_bytes for kept in self._kept.values()}
            counted: Counter[int] = Counter()
            for key, kept in self._kept.items():
                slab = kept.pin.slab
                for held in (of_all, of_tenant[tenant_of(key)]):
                    held.add(kept.pin, 0 if counted[slab] else slabs[slab], 1)
                counted[slab] += 1
            if (of_all, of_tenant, counted) != (self._all, self._of_tenant, self._num_in_slab):
                raise InvariantError("pins: what they hold is miscounted")
            if not self._kept.keys() <= {key for _, key in self._ends}:
                raise InvariantError("pins: one would never end")

    def close(self) -> None:
        """Ends the thread and all pins. Idempotent."""
        self._thread.stop()
        with self._lock:
            keys = list(self._kept)
        self.unpin(keys)

    def _pin(self, tenant: TenantId, keys: Sequence[StoreKey], until_s: float) -> list[PinStatus]:
        pins = self._memory.pin(keys)
        statuses: list[PinStatus] = []
        over: list[SlabPin] = []
        with self._lock:
            for pin in pins:
                statuses.append(PinStatus.MISS if pin is None else self._keep(tenant, pin, until_s, over))
        self._memory.unpin(over)
        # For blocks that were discarded before they were in `_kept`, `forget` came too early.
        gone = self.forget([key for key, status in zip(keys, statuses, strict=True) if status is PinStatus.PINNED])
        return [PinStatus.MISS if key in gone else status for key, status in zip(keys, statuses, strict=True)]

    def _keep(self, tenant: TenantId, pin: SlabPin, until_s: float, over: list[SlabPin]) -> PinStatus:
        """Takes over a pin, or puts it to those that are `over`. Under the lock."""
        kept = self._kept.get(pin.key)
        if kept is not None and kept.pin.is_of_same_block(pin):
            kept.until_s = max(kept.until_s, until_s)
            over.append(pin)
            return PinStatus.PINNED
        if kept is not None:  # of a block that was discarded and stored again
            over.append(self._end(kept))
        if not self._has_room(tenant, pin):
            over.append(pin)
            return PinStatus.FULL
        self._count(tenant, pin, 1)
        self._kept[pin.key] = _Kept(pin, until_s)
        heapq.heappush(self._ends, (until_s, pin.key))
        self._thread.wake()
        return PinStatus.PINNED

    def _has_room(self, tenant: TenantId, pin: SlabPin) -> bool:
        """Whether the tenant may have this pin beside what it has. Caller holds the lock."""
        if not self.max_s:
            return False
        slab_bytes = 0 if pin.slab in self._num_in_slab else pin.slab_bytes
        own = self._of_tenant.get(tenant, _Held())
        for held, parts in ((self._all, 1), (own, 2 if self.several_tenants else 1)):
            if held.num_blocks >= self._limits.most_blocks // parts:
                return False
            if slab_bytes and held.slab_bytes + slab_bytes > self._limits.most_bytes // parts:
                return False
        return True

    def _end(self, kept: _Kept) -> SlabPin:
        """Forgets a pin; the caller unpins it without the lock. Under the lock."""
        del self._kept[kept.pin.key]
        self._count(tenant_of(kept.pin.key), kept.pin, -1)
        if len(self._ends) > 2 * len(self._kept) + _SPARE_ENDS:
            self._ends = [(other.until_s, key) for key, other in self._kept.items()]
            heapq.heapify(self._ends)
        return kept.pin

    def _count(self, tenant: TenantId, pin: SlabPin, sign: int) -> None:
        """Counts a pin of the tenant that comes or goes. Caller holds the lock."""
        before = self._num_in_slab[pin.slab]
        self._num_in_slab[pin.slab] += sign
        is_first_or_last = not before or not self._num_in_slab[pin.slab]
        for held in (self._all, self._of_tenant[tenant]):
            held.add(pin, pin.slab_bytes if is_first_or_last else 0, sign)
        if not self._num_in_slab[pin.slab]:
            del self._num_in_slab[pin.slab]
        if not self._of_tenant[tenant].num_blocks:
            del self._of_tenant[tenant]

    def _look(self) -> bool:
        """Ends what is due, on the thread for it. Returns whether there are more pins."""
        if num_ended := self.end_due():
            _log.debug("%d pins are over", num_ended)
        return bool(self._kept)
