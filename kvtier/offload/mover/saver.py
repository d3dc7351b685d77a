"""Saves of a mover: blocks on their way from the device to the arena, and on to the tiers below."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtier.device.kv import Fence
from kvtier.offload.messages import Copied, DiscardBatch, SaveBatch, Stored
from kvtier.offload.mover.answers import Answers
from kvtier.offload.mover.memory import BlockMemory
from kvtier.offload.mover.threads import Threads
from kvtier.offload.mover.tier_writer import TierWriter
from kvtier.system.tracing import tracing

_log = logging.getLogger(__name__)


class Saver:
    """Carries out save batches. Any thread; nothing blocks.

    Several copies are under way at a time. What they bring goes to the tiers in the order of the batches all the same:
    a discard forgets what was saved before it, and nothing else.

    `_lock` guards `_saving` and `_handing_on`. It is held while something is queued for the tiers.
    """

    def __init__(self, memory: BlockMemory, writer: TierWriter, threads: Threads, answers: Answers) -> None:
        self._memory, self._writer, self._threads, self._answers = memory, writer, threads, answers
        self._lock = threading.Lock()
        self._saving: set[int] = set()
        """Batches that may still read the device, by id."""
        self._handing_on: deque[_Turn] = deque()
        """What the tiers will be asked for, in order."""

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
        turn = _Turn()
        with self._lock:
            self._saving.add(batch.batch_id)
            self._handing_on.append(turn)
        self._threads.saves.submit(self._save, batch, after, turn)

    def discard(self, batch: DiscardBatch) -> None:
        """Queues a discard behind the saves: what is being copied at this moment is written first, then forgotten."""
        turn = _Turn()
        with self._lock:
            self._handing_on.append(turn)
        self._hand_on(turn, lambda: self._writer.discard(batch))

    def _save(self, batch: SaveBatch, after: Fence | None, turn: "_Turn") -> None:
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
        if batch.tiers and any(ok):
            self._hand_on(turn, lambda: self._writer.write(batch, batch.tiers))
        else:
            self._hand_on(turn, lambda: self._answers.post(Stored(batch.batch_id)))

    def _hand_on(self, turn: "_Turn", ask: Callable[[], None]) -> None:
        """Asks the tiers when it is this one's turn, and for what has waited for it."""
        with self._lock:
            turn.ask = ask
            while self._handing_on and (ready := self._handing_on[0].ask) is not None:
                self._handing_on.popleft()
                ready()


@dataclass(slots=True, eq=False)
class _Turn:
    """The place of a save or a discard in the order in which tiers are asked."""

    ask: Callable[[], None] | None = None
    """Queues what the tiers are asked for. None: the blocks are not there yet. Guarded by Saver._lock."""
