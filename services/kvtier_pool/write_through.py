"""New blocks, from memory to disk, in the background."""

import itertools
import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier.keys import StoreKey
from kvtier.tiers.base import Tier, WriteStatus
from kvtier.tiers.host import HostTier, Lease
from kvtier_pool.metrics import PoolMetrics

_log = logging.getLogger(__name__)
_BATCH_BLOCKS = 16
_RESULTS = {
    WriteStatus.STORED: "stored",
    WriteStatus.EXISTS: "exists",
    WriteStatus.FULL: "full",
    WriteStatus.THROTTLED: "failed",
    WriteStatus.FAILED: "failed",
}


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What the disk got at the end, and what it did not."""

    num_written: int = 0
    """Queued when the drain began, on disk now."""
    num_abandoned: int = 0
    """Queued, and there was no time left."""
    num_memory_only: int = 0
    """In memory alone, because the disk refused them or the queue was full when they came."""


class WriteThrough:
    """A bounded queue of pinned blocks, and the threads that write them to disk.

    A queued block cannot be evicted, so it is readable until the disk has it. A block that finds the
    queue full, or that the disk refuses, lives in memory only; it is counted now, and counted again
    as `evicted_unwritten` when memory gives it up. Any thread may call anything.
    """

    def __init__(
        self, memory: HostTier, disk: Tier, metrics: PoolMetrics, *, queue_bytes: int, num_threads: int
    ) -> None:
        """
        :param queue_bytes: payload bytes pinned at most, queued and being written.
        :param num_threads: writers; `start` starts them.
        """
        self._memory = memory
        self._disk = disk
        self._metrics = metrics
        self._queue_bytes = queue_bytes
        self._changed = threading.Condition()
        self._queued: dict[StoreKey, Lease] = {}
        """Oldest first. Guarded by _changed."""
        self._writing: dict[StoreKey, Lease] = {}
        """With a writer. Guarded by _changed."""
        self._memory_only: set[StoreKey] = set()
        """In memory, not on disk and not on the way. Guarded by _changed."""
        self._pinned_bytes = 0
        """Payload bytes of _queued and _writing. Guarded by _changed."""
        self._num_written = 0
        """Guarded by _changed."""
        self._closing = False
        """Guarded by _changed."""
        self._threads = [
            threading.Thread(target=self._run, name=f"kvtier-write-through-{i}", daemon=True)
            for i in range(num_threads)
        ]

    def start(self) -> None:
        """Starts the writers. Once."""
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """All writers run."""
        return all(thread.is_alive() for thread in self._threads)

    def submit(self, key: StoreKey) -> None:
        """Queues a block that memory has. Never waits."""
        (lease,) = self._memory.acquire([key])
        if lease is None:
            self._metrics.evicted_unwritten.inc()
            return
        with self._changed:
            known = key in self._queued or key in self._writing
            queued = not known and not self._closing and self._pinned_bytes + len(lease.view) <= self._queue_bytes
            if queued:
                self._queued[key] = lease
                self._add_pinned(len(lease.view))
                self._changed.notify()
            elif not known:
                self._memory_only.add(key)
        if not queued:
            self._memory.release([lease])
        if not queued and not known:
            self._count("dropped")

    def cancel(self, keys: Iterable[StoreKey]) -> None:
        """Takes these blocks out of the queue. Those being written at this moment are waited for."""
        wanted = set(keys)
        with self._changed:
            leases = [self._queued.pop(key) for key in wanted & self._queued.keys()]
            self._add_pinned(-sum(len(lease.view) for lease in leases))
            self._memory_only -= wanted
            self._changed.notify_all()
            self._changed.wait_for(lambda: not wanted & self._writing.keys())
            self._memory_only -= wanted
        self._memory.release(leases)
        self._count("cancelled", len(leases))

    def note_removed(self, keys: Iterable[StoreKey]) -> None:
        """Memory gave up these blocks: counts those that nothing else had."""
        with self._changed:
            lost = self._memory_only.intersection(keys)
            self._memory_only -= lost
        self._metrics.evicted_unwritten.inc(len(lost))

    def drain(self, grace_s: float) -> DrainReport:
        """Waits up to `grace_s` seconds for the disk to get what is queued, then abandons the rest.

        Blocks submitted from now on are dropped.
        """
        with self._changed:
            self._closing = True
            written_before = self._num_written
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._queued and not self._writing, timeout=grace_s)
            abandoned = list(self._queued.values())
            self._queued.clear()
            self._add_pinned(-sum(len(lease.view) for lease in abandoned))
            self._changed.notify_all()
            report = DrainReport(
                num_written=self._num_written - written_before,
                num_abandoned=len(abandoned) + len(self._writing),
                num_memory_only=len(self._memory_only),
            )
        self._memory.release(abandoned)
        self._count("abandoned", report.num_abandoned)
        return report

    def close(self) -> None:
        """Abandons what is queued and waits for the writes under way. Idempotent."""
        self.drain(0.0)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self) -> None:
        while batch := self._take():
            try:
                statuses = self._disk.write([(key, lease.view) for key, lease in batch.items()])
            except Exception:
                # The tier promises not to raise; if it does, blocks must not stay pinned for ever.
                _log.exception("writing %d blocks through to disk failed", len(batch))
                statuses = [WriteStatus.FAILED] * len(batch)
            self._finish(batch, statuses)

    def _take(self) -> dict[StoreKey, Lease]:
        """The oldest few blocks; empty when closing and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued or self._closing)
            batch = {key: self._queued.pop(key) for key in list(itertools.islice(self._queued, _BATCH_BLOCKS))}
            self._writing.update(batch)
            return batch

    def _finish(self, batch: dict[StoreKey, Lease], statuses: Sequence[WriteStatus]) -> None:
        with self._changed:
            for key, status in zip(batch, statuses, strict=True):
                lease = self._writing.pop(key)
                self._add_pinned(-len(lease.view))
                if status in (WriteStatus.STORED, WriteStatus.EXISTS):
                    self._num_written += 1
                else:
                    self._memory_only.add(key)
            self._changed.notify_all()
        self._memory.release(list(batch.values()))
        for status in statuses:
            self._count(_RESULTS[status])

    def _add_pinned(self, nbytes: int) -> None:
        self._pinned_bytes += nbytes
        self._metrics.write_through_queue_bytes.set(self._pinned_bytes)

    def _count(self, result: str, amount: int = 1) -> None:
        self._metrics.write_through_blocks.labels(result).inc(amount)
