"""Saves of a mover: blocks on their way from the device to the arena, and on to the tiers below."""

import logging
import threading
from collections.abc import Iterable

from kvtier.device.kv import Fence
from kvtier.offload.messages import Copied, DiscardBatch, SaveBatch, Stored
from kvtier.offload.mover.answers import Answers
from kvtier.offload.mover.memory import BlockMemory
from kvtier.offload.mover.threads import Threads
from kvtier.offload.mover.tier_writer import TierWriter
from kvtier.system.tracing import tracing

_log = logging.getLogger(__name__)


class Saver:
    """Carries out save batches. Any thread; nothing blocks. `_lock` guards `_saving`, and is held for nothing else."""

    def __init__(self, memory: BlockMemory, writer: TierWriter, threads: Threads, answers: Answers) -> None:
        self._memory, self._writer, self._threads, self._answers = memory, writer, threads, answers
        self._lock = threading.Lock()
        self._saving: set[int] = set()
        """Batches that may still read the device, by id."""

    @property
    def is_at_device(self) -> bool:
        """Whether a copy from the device is under way or waits for its turn."""
        with self._lock:
            return bool(self._saving)

    def copying(self, batch_ids: Iterable[int]) -> set[int]:
        """Returns those of the batches that may still read the device."""
        with self._lock:
            return self._saving.intersection(batch_ids)

    def start(self, batch: SaveBatch, after: Fence | None) -> None:
        """Queues a save. `Copied` is posted when its device slots have been read, `Stored` when it is over."""
        with self._lock:
            self._saving.add(batch.batch_id)
        self._threads.copies.submit(self._save, batch, after)

    def discard(self, batch: DiscardBatch) -> None:
        """Queues a discard behind the copies: what is being copied at this moment is written first, then forgotten."""
        self._threads.copies.submit(self._writer.discard, batch)

    def _save(self, batch: SaveBatch, after: Fence | None) -> None:
        ok, memory = b"\1" * len(batch.keys), self._memory
        try:
            num_bytes = len(batch.keys) * memory.block_bytes
            with tracing.within(batch.trace), tracing.span("copy to host", blocks=len(batch.keys), bytes=num_bytes):
                memory.device.gather(batch.device_slots, memory.arena, batch.arena_slots, after=after)
        except Exception:
            _log.exception("copying %d blocks from the device failed", len(batch.keys))
            ok = bytes(len(batch.keys))
        with self._lock:
            self._saving.discard(batch.batch_id)
        self._answers.post(Copied(batch.batch_id, ok))
        if not batch.tiers or not any(ok):
            self._answers.post(Stored(batch.batch_id))
            return
        self._writer.write(batch, batch.tiers)
