"""Writes of a mover: blocks of the arena on their way to the tiers below, and discards in these."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.codec.checksums import checksum
from kvtier.offload.messages import DiscardBatch, Discarded, SaveBatch, StoreBatch, Stored
from kvtier.offload.mover.answers import Answers
from kvtier.offload.mover.memory import BlockMemory
from kvtier.offload.mover.threads import Threads
from kvtier.offload.mover.tiers import MoverTiers
from kvtier.system.tracing import NO_CONTEXT, tracing
from kvtier.tiers.base import Item, WriteStatus

_THERE = (WriteStatus.STORED, WriteStatus.EXISTS)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Write:
    """Blocks in the arena on their way to tiers. `waiting` and `refused` are guarded by TierWriter._lock."""

    batch_id: int
    keys: list[bytes]
    items: list[Item[memoryview]]
    waiting: set[str]
    """The tiers that have not answered yet."""
    trace: str
    refused: dict[str, list[bytes]] = field(default_factory=dict)


class TierWriter:
    """Carries out store batches, the second half of saves, and discards. Any thread; nothing blocks.

    All of it goes by way of the thread for checksums, then of the tier's writer: a tier does it in order.

    `_lock` guards what writers of several tiers change in a `_Write`, and is held for nothing else.
    """

    def __init__(self, memory: BlockMemory, tiers: MoverTiers, threads: Threads, answers: Answers) -> None:
        self._memory, self._tiers, self._threads, self._answers = memory, tiers, threads, answers
        self._lock = threading.Lock()

    def write(self, batch: SaveBatch | StoreBatch, tiers: Sequence[str]) -> None:
        """Queues the batch's arena slots for these tiers. `Stored` is posted when all have answered."""
        self._threads.sums.submit(self._hand_down, batch, tiers)

    def discard(self, batch: DiscardBatch) -> None:
        """Queues a discard behind all writes to its tier. `Discarded` is posted when it is over."""
        self._threads.sums.submit(lambda: self._threads.writers[batch.tier].submit(self._forget, batch))

    def _hand_down(self, batch: SaveBatch | StoreBatch, tiers: Sequence[str]) -> None:
        """Sums the batch's blocks, and queues their arena slots for these tiers."""
        try:
            blocks = zip(self._memory.store_keys(batch.keys), map(self._memory.view, batch.arena_slots), strict=True)
            items = [(key, view, checksum(key, view)) for key, view in blocks]
        except Exception:  # the directory must hear of the end, or the slots are never given to others
            _log.exception("summing %d blocks failed", len(batch.keys))
            self._answers.post(Stored(batch.batch_id, dict.fromkeys(tiers, batch.keys)))
            return
        trace = batch.trace if isinstance(batch, SaveBatch) else NO_CONTEXT
        write = _Write(batch.batch_id, batch.keys, items, waiting=set(tiers), trace=trace)
        for name in tiers:
            self._threads.writers[name].submit(self._write, name, write)

    def _write(self, name: str, write: _Write) -> None:
        mine = [i for i, (key, _, _) in enumerate(write.items) if self._tiers.writes(name, key)]
        refused = mine
        try:
            with tracing.within(write.trace):
                statuses = self._tiers.by_name[name].write([write.items[i] for i in mine]) if mine else []
            refused = [i for i, status in zip(mine, statuses, strict=True) if status not in _THERE]
        except Exception:
            _log.exception("writing %d blocks to %s failed", len(write.items), name, extra={"tier": name})
        with self._lock:
            if refused:
                write.refused[name] = [write.keys[i] for i in refused]
            write.waiting.discard(name)
            over = not write.waiting
        if over:
            self._answers.post(Stored(write.batch_id, write.refused))

    def _forget(self, batch: DiscardBatch) -> None:
        try:
            self._tiers.by_name[batch.tier].discard(self._memory.store_keys(batch.keys))
        except Exception:
            _log.exception("discarding %d blocks in %s failed", len(batch.keys), batch.tier, extra={"tier": batch.tier})
        self._answers.post(Discarded(batch.batch_id))
