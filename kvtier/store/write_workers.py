"""The threads that write to one tier what waits for it."""

import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from functools import partial

from kvtier.identity.keys import StoreKey
from kvtier.memory.buffers import ReadableBuffer
from kvtier.store.metrics import StoreMetrics
from kvtier.store.tier_calls import TierCalls
from kvtier.store.write_queue import TAKEN, WriteQueue
from kvtier.tiers.base import Item, WriteStatus
from kvtier.tiers.common.lent_memory import LentMemory
from kvtier.tiers.host.pins import ReadPin
from kvtier.tiers.host.tier import HostTier

_log = logging.getLogger(__name__)
_BATCH_BLOCKS = 16
_NUM_THREADS = 2
"""Threads that write to each tier."""
_WRITE_BACK_SHARE = 1 / 16
"""The coldest part of memory that `write_back` keeps written. A smaller part has blocks forgotten in bursts."""
_RETRY_S = 5.0
"""Seconds between tries to give a tier that took nothing what was put off."""
_RESULTS = {
    WriteStatus.STORED: "stored",
    WriteStatus.EXISTS: "exists",
    WriteStatus.FULL: "full",
    WriteStatus.THROTTLED: "failed",
    WriteStatus.FAILED: "failed",
}
_Answers = Mapping[StoreKey, WriteStatus]
_Items = Sequence[Item[ReadableBuffer]]
WriteParts = Callable[[_Items], Generator[_Items, None, None]]
"""Gives the blocks of a batch in parts, each when it may be written; a part is done when the next one is asked for."""


def in_one_part(items: _Items) -> Generator[_Items, None, None]:
    """All blocks, at once."""
    yield items


class WriteWorkers:
    """Take blocks from a `WriteQueue`, a batch at a time, until it is closing and nothing is left."""

    def __init__(
        self,
        memory: HostTier,
        tier: TierCalls,
        metrics: StoreMetrics,
        waiting: WriteQueue,
        parts: WriteParts,
    ) -> None:
        """Owns nothing but the threads, which `start` starts."""
        self._memory = memory
        self._tier = tier
        self._metrics = metrics
        self._waiting = waiting
        self._parts = parts
        self._threads = [
            threading.Thread(target=self._run, name=f"kvtier-write-{tier.name}-{i}", daemon=True)
            for i in range(_NUM_THREADS)
        ]

    def start(self) -> None:
        """Starts the threads. Once."""
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether all threads run."""
        return all(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        """Waits for the threads to end; the queue is closing."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self) -> None:
        while batch := self._take():
            leases = {key: lease for key, lease in batch.items() if lease is not None}
            answers: _Answers
            lent = LentMemory()
            try:
                # With the checksums of their writers: what was changed since is a miss to its readers there.
                items = [(key, lease.view, lease.checksum) for key, lease in leases.items()]
                answers = dict(zip(leases, self._write(items, lent), strict=True)) if items else {}
            except Exception:
                # The tier promises not to raise; if it does, blocks must not stay pinned for ever.
                _log.exception(
                    "writing %d blocks to %s failed",
                    len(batch),
                    self._tier.name,
                    extra={"tier": self._tier.name},
                )
                answers = dict.fromkeys(leases, WriteStatus.FAILED)
            self._finish(batch, answers)
            # A tier that hangs may still read what it was given: its room is not used again before that is over.
            lent.when_done(partial(self._memory.release, list(batch.values())))

    def _write(self, items: _Items, lent: LentMemory) -> list[WriteStatus]:
        with closing(self._parts(items)) as parts:
            return [answer for part in parts for answer in self._tier.write(part, lent)]

    def _take(self) -> dict[StoreKey, ReadPin | None]:
        """The next few blocks to write; empty when closing and nothing is left."""
        waiting = self._waiting
        while True:
            with waiting.changed:
                ready = waiting.changed.wait_for(
                    lambda: waiting.entered or waiting.closing or waiting.more_to_write, timeout=_RETRY_S
                )
                if not ready:
                    waiting.expect_success()
                waiting.entered = False
                if not waiting.is_turn_of_put_off and (batch := waiting.take_queued(_BATCH_BLOCKS)):
                    return batch
                if waiting.closing and not waiting.more_to_write:
                    return {}
                look_for_cold = bool(waiting.num_owed) and not waiting.closing
            cold = self._memory.near_eviction(_WRITE_BACK_SHARE) if look_for_cold else []
            if batch := self._take_unpinned(cold):
                return batch

    def _take_unpinned(self, cold: Sequence[StoreKey]) -> dict[StoreKey, ReadPin | None]:
        """What was put off, if it has its turn; else what `write_back` owes and memory is about to evict, or all of it
        when closing; else what was put off."""
        waiting = self._waiting
        with waiting.changed:
            due: list[StoreKey] = []
            if not waiting.is_turn_of_put_off:
                due = waiting.take_owed(None if waiting.closing else cold, _BATCH_BLOCKS)
            if not due and waiting.is_time_for_put_off:
                due = waiting.take_put_off(_BATCH_BLOCKS)
            # A full batch may not be all there is, for this thread or another one.
            waiting.entered = waiting.entered or len(due) == _BATCH_BLOCKS
        batch = dict(zip(due, self._memory.acquire(due, touch=False), strict=True))
        with waiting.changed:
            waiting.pin(batch)
            waiting.changed.notify()
        return batch

    def _finish(self, batch: Mapping[StoreKey, ReadPin | None], answers: _Answers) -> None:
        """Notes the answers to a batch whose leases are not released yet.

        :param answers: for all of `batch` that memory still had.
        """
        waiting = self._waiting
        # Counts come before anybody hears that the batch is done, so that a thread that waited for a drain finds them.
        self._metrics.evicted_unwritten.labels(self._tier.name).inc(len(batch) - len(answers))
        for each in answers.values():
            self._metrics.written_down_blocks.labels(self._tier.name, _RESULTS[each]).inc()
        with waiting.changed:
            waiting.note_answers(answers)
            for key, lease in batch.items():
                waiting.finish(key, lease)
                if (answer := answers.get(key)) in TAKEN:
                    waiting.num_written += 1
                elif answer is not None:
                    waiting.put_off(key)
            waiting.changed.notify_all()
