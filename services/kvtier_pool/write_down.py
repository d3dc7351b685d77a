"""Blocks on their way from memory to one tier below, in the background, as its write policy says."""

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier.keys import StoreKey
from kvtier.tiers.base import Status, Tier, WriteStatus
from kvtier.tiers.host import HostTier, Lease
from kvtier.tiers.write_policy import UseCounts, WritePolicy
from kvtier_pool.metrics import PoolMetrics

_log = logging.getLogger(__name__)
_BATCH_BLOCKS = 16
_RETRY_S = 5.0
"""Between tries to give a tier that took nothing what was put off."""
_TAKEN = (WriteStatus.STORED, WriteStatus.EXISTS)
_RESULTS = {
    WriteStatus.STORED: "stored",
    WriteStatus.EXISTS: "exists",
    WriteStatus.FULL: "full",
    WriteStatus.THROTTLED: "failed",
    WriteStatus.FAILED: "failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteDownSettings:
    """How blocks get to one tier below memory."""

    policy: WritePolicy = WritePolicy.WRITE_THROUGH
    selective_uses: int = 2
    """The use at which `write_through_selective` writes a block. Writing it to the pool is the first."""
    max_counted_uses: int = 1 << 18
    """Blocks whose uses are remembered, about 200 bytes each."""
    queue_bytes: int
    """Payload bytes pinned at most, queued and being written. Too small: bursts are kept in memory only. Too
    large: writers hear FULL while the tier catches up."""
    write_back_share: float = 1 / 16
    """The coldest part of memory that `write_back` keeps written. Small forgets blocks in bursts."""
    num_threads: int = 2


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What a tier got at the end, and what it did not."""

    tier: str
    num_written: int
    """Waited when the drain began, there now."""
    num_abandoned: int
    """Waited, and there was no time left; those being written at this moment may still get there."""
    num_memory_only: int
    """In memory alone, because the tier refused them or the queue was full when they came."""


class WriteDown:
    """The blocks that memory has and the tier below gets, and the threads that write them.

    What is queued is pinned: it cannot be evicted, so it is readable until the tier has it. A block that
    finds the queue full, or that the tier does not take, stays in memory only; it is tried again while the
    writers are idle, when the tier has taken others, every few seconds, and at the end. One that memory
    gives up before the tier has it is counted as `evicted_unwritten`: nobody waits. Any thread may call
    anything.
    """

    def __init__(self, memory: HostTier, tier: Tier, metrics: PoolMetrics, settings: WriteDownSettings) -> None:
        """`start` starts the writers. Memory and tier stay the caller's."""
        self._memory = memory
        self._tier = tier
        self._metrics = metrics
        self._settings = settings
        self._selective = settings.policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        self._write_back = settings.policy is WritePolicy.WRITE_BACK
        self._changed = threading.Condition()
        self._uses: UseCounts[StoreKey] = UseCounts(settings.selective_uses, settings.max_counted_uses)
        """Guarded by _changed."""
        self._queued: dict[StoreKey, Lease] = {}
        """Oldest first. Guarded by _changed."""
        self._owed: dict[StoreKey, None] = {}
        """With `write_back`: in memory, and not below yet. Oldest first. Guarded by _changed."""
        self._writing: dict[StoreKey, Lease | None] = {}
        """With a writer; None until it has its lease. Guarded by _changed."""
        self._later: dict[StoreKey, None] = {}
        """In memory only: dropped or refused, and worth another try. Oldest first. Guarded by _changed."""
        self._left_out: set[StoreKey] = set()
        """In memory only, for good: it came during the drain. Guarded by _changed."""
        self._works = True
        """The tier took some of what it was last given. Guarded by _changed."""
        self._refused: Counter[StoreKey] = Counter()
        """Being discarded. Guarded by _changed."""
        self._pinned_bytes = 0
        """Payload bytes of _queued and _writing. Guarded by _changed."""
        self._num_written = 0
        """Guarded by _changed."""
        self._num_before_drain = 0
        """Guarded by _changed."""
        self._entered = False
        """Memory has got a block since a writer last looked at the cold end. Guarded by _changed."""
        self._closing = False
        """Guarded by _changed."""
        self._threads = [
            threading.Thread(target=self._run, name=f"kvtier-write-{tier.name}-{i}", daemon=True)
            for i in range(settings.num_threads)
        ]

    def start(self) -> None:
        """Starts the writers. Once."""
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """All writers run."""
        return all(thread.is_alive() for thread in self._threads)

    def entered(self, key: StoreKey) -> None:
        """Memory has this block from now on, and did not get it from this tier. A use. Never waits."""
        if self._selective:
            with self._changed:
                self._uses.note(key)
                enough = self._uses.is_enough(key)
            if enough:
                self._queue(key)
        elif self._write_back:
            with self._changed:
                if key not in self._refused and self._memory.lookup([key]) != [Status.MISS]:
                    self._note_owed(key)
        else:
            self._queue(key)

    def admitted(self) -> None:
        """Memory got a block that this tier has: others may be nearer to their eviction now. Never waits."""
        if self._write_back:
            with self._changed:
                self._entered = True
                self._changed.notify()

    def used(self, keys: Iterable[StoreKey]) -> None:
        """These blocks were read from memory. Never waits."""
        if self._selective:
            with self._changed:
                enough = [key for key in keys if self._uses.note(key)]
            for key in enough:
                self._queue(key)

    @contextmanager
    def without(self, keys: Iterable[StoreKey]) -> Iterator[None]:
        """Inside, none of these blocks is on its way. Waits for those being written at this moment."""
        wanted = set(keys)
        with self._changed:
            self._refused.update(wanted)
            leases = [self._queued.pop(key) for key in wanted & self._queued.keys()]
            self._add_pinned(-sum(len(lease.view) for lease in leases))
            self._forget(wanted)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not wanted & self._writing.keys())
            self._forget(wanted)
        self._memory.release(leases)
        self._count("cancelled", len(leases))
        try:
            yield
        finally:
            with self._changed:
                self._refused -= Counter(wanted)

    def note_removed(self, keys: Sequence[StoreKey]) -> None:
        """Memory gave up these blocks: counts those that the tier should have had.

        Told late, it may have some of them again by now: those are not lost.
        """
        with self._changed:
            tracked = [k for k in keys if k in self._later or k in self._left_out or k in self._owed]
            there = self._memory.lookup(tracked)
            lost = [key for key, status in zip(tracked, there, strict=True) if status is Status.MISS]
            self._forget(lost)
        self._metrics.evicted_unwritten.labels(self._tier.name).inc(len(lost))

    def begin_drain(self) -> None:
        """Starts to write all that is owed, and once more what was put off. What enters memory now is not queued."""
        with self._changed:
            if not self._closing:
                self._works = self._closing = True
                self._num_before_drain = self._num_written
                self._changed.notify_all()

    def drain(self, deadline_s: float) -> DrainReport:
        """Waits up to `deadline_s` seconds for the tier to get what it is owed, then abandons the rest."""
        self.begin_drain()
        with self._changed:
            self._changed.wait_for(lambda: not (self._writing or self._more_to_write()), timeout=deadline_s)
            leases = list(self._queued.values())
            given_up = len(self._queued) + len(self._owed)
            num_abandoned = given_up + len(self._writing)
            self._queued.clear()
            self._owed.clear()
            self._add_pinned(-sum(len(lease.view) for lease in leases))
            self._changed.notify_all()
            num_written = self._num_written - self._num_before_drain
            num_memory_only = len(self._later) + len(self._left_out)
            report = DrainReport(self._tier.name, num_written, num_abandoned, num_memory_only)
            self._left_out.update(self._later)
            self._later.clear()
        self._memory.release(leases)
        self._count("abandoned", given_up)
        return report

    def close(self) -> None:
        """Abandons what is owed and waits for the writes under way. Idempotent."""
        self.drain(0.0)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _queue(self, key: StoreKey) -> None:
        (lease,) = self._memory.acquire([key])
        if lease is None:
            self._metrics.evicted_unwritten.labels(self._tier.name).inc()
            return
        nbytes = len(lease.view)
        with self._changed:
            known = key in self._queued or key in self._writing or key in self._refused
            queued = not known and not self._closing and self._pinned_bytes + nbytes <= self._settings.queue_bytes
            if queued:
                self._queued[key] = lease
                self._add_pinned(nbytes)
                self._changed.notify()
            elif self._closing:
                self._left_out.add(key)
            elif not known:
                self._later[key] = None
        if not queued:
            self._memory.release([lease])
        elif self._memory.lookup([key]) == [Status.MISS]:
            # Discarded between the lease and the queue: the tier must not get it back.
            with self.without([key]):
                self._tier.discard([key])
        if not queued and not known:
            self._count("dropped")

    def _run(self) -> None:
        while batch := self._take():
            try:
                # Asked first, so that what the tier has already is not sent again.
                leases = {key: lease for key, lease in batch.items() if lease is not None}
                there = self._tier.lookup(list(leases))
                absent = [key for key, status in zip(leases, there, strict=True) if status is Status.MISS]
                statuses = dict.fromkeys(leases, WriteStatus.EXISTS)
                if absent:
                    written = self._tier.write([(key, leases[key].view) for key in absent])
                    statuses.update(zip(absent, written, strict=True))
            except Exception:
                # The tier promises not to raise; if it does, blocks must not stay pinned for ever.
                _log.exception("writing %d blocks to %s failed", len(batch), self._tier.name)
                statuses = dict.fromkeys(batch, WriteStatus.FAILED)
            self._finish(batch, statuses)

    def _more_to_write(self) -> bool:
        """Under _changed."""
        return bool(self._queued or (self._owed and self._closing) or self._is_time_for_later())

    def _is_time_for_later(self) -> bool:
        """Under _changed. Only when nothing else is pinned: what found the queue full must not lengthen it."""
        return bool(self._later and self._works and not self._writing)

    def _take(self) -> dict[StoreKey, Lease | None]:
        """The next few blocks to write; empty when closing and nothing is left."""
        while True:
            with self._changed:
                ready = self._changed.wait_for(
                    lambda: self._entered or self._closing or self._more_to_write(), timeout=_RETRY_S
                )
                self._works = self._works or not ready
                self._entered = False
                if self._queued:
                    first = list(itertools.islice(self._queued, _BATCH_BLOCKS))
                    batch: dict[StoreKey, Lease | None] = {key: self._queued.pop(key) for key in first}
                    self._writing.update(batch)
                    return batch
                if self._closing and not self._more_to_write():
                    return {}
                look_for_cold = bool(self._owed) and not self._closing
            cold = self._memory.near_eviction(self._settings.write_back_share) if look_for_cold else []
            if batch := self._take_unqueued(cold):
                return batch

    def _take_unqueued(self, cold: Sequence[StoreKey]) -> dict[StoreKey, Lease | None]:
        """What `write_back` owes and memory is about to evict, or all of it when closing; else what was put off."""
        with self._changed:
            owed = self._owed if self._closing else (key for key in cold if key in self._owed)
            due = list(itertools.islice((key for key in owed if key not in self._writing), _BATCH_BLOCKS))
            if not due and self._is_time_for_later():
                due = list(itertools.islice(self._later, _BATCH_BLOCKS))
            for key in due:
                self._owed.pop(key, None)
                self._later.pop(key, None)
            self._writing.update(dict.fromkeys(due))
            # There may be more of it, for this thread or another one.
            self._entered = self._entered or len(due) == _BATCH_BLOCKS
        leases = self._memory.acquire(due, touch=False)
        batch = dict(zip(due, leases, strict=True))
        with self._changed:
            self._writing.update(batch)
            self._add_pinned(sum(len(lease.view) for lease in leases if lease is not None))
            self._changed.notify()
        return batch

    def _finish(self, batch: dict[StoreKey, Lease | None], statuses: dict[StoreKey, WriteStatus]) -> None:
        with self._changed:
            if statuses:
                self._works = any(status in _TAKEN for status in statuses.values())
            for key, lease in batch.items():
                del self._writing[key]
                if lease is None:
                    self._metrics.evicted_unwritten.labels(self._tier.name).inc()
                    continue
                self._add_pinned(-len(lease.view))
                if statuses[key] in _TAKEN:
                    self._num_written += 1
                else:
                    self._later[key] = None
            self._changed.notify_all()
        self._memory.release(batch.values())
        for key, lease in batch.items():
            if lease is not None:
                self._count(_RESULTS[statuses[key]])

    def _note_owed(self, key: StoreKey) -> None:
        """Under _changed."""
        if self._closing:
            self._left_out.add(key)
            return
        self._owed[key] = None
        self._entered = True
        self._changed.notify()

    def _forget(self, keys: Iterable[StoreKey]) -> None:
        """Under _changed."""
        for key in keys:
            self._owed.pop(key, None)
            self._later.pop(key, None)
            self._left_out.discard(key)

    def _add_pinned(self, nbytes: int) -> None:
        self._pinned_bytes += nbytes
        self._metrics.write_down_queue_bytes.labels(self._tier.name).set(self._pinned_bytes)

    def _count(self, result: str, amount: int = 1) -> None:
        self._metrics.written_down_blocks.labels(self._tier.name, result).inc(amount)
