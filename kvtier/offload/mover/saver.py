"""Saves of a mover: blocks on their way from the device to the arena, and on to the tiers below."""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvtier.device.kv import Fence
from kvtier.offload.messages import Copied, DiscardBatch, SaveBatch, Stored
from kvtier.offload.mover.answers import Answers
from kvtier.offload.mover.copy_queue import CopyQueue
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
        self._memory, self._writer, self._answers = memory, writer, answers
        self._copies = CopyQueue(threads.saves, self._copy)
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
        self._copies.submit((batch, turn), len(batch.keys) * self._memory.block_bytes, after)

    def discard(self, batch: DiscardBatch) -> None:
        """Queues a discard behind the saves: what is being copied at this moment is written first, then forgotten."""
        turn = _Turn()
        with self._lock:
            self._handing_on.append(turn)
        self._hand_on(turn, lambda: self._writer.discard(batch))

    def _copy(self, saves: "Sequence[tuple[SaveBatch, _Turn]]", after: Fence | None) -> None:
        memory = self._memory
        device_slots = [slot for batch, _ in saves for slot in batch.device_slots]
        arena_slots = [slot for batch, _ in saves for slot in batch.arena_slots]
        is_ok = True
        try:
            with contextlib.ExitStack() as spans:
                for batch, _ in saves:
                    num_blocks = len(batch.keys)
                    spans.enter_context(tracing.within(batch.trace))
                    spans.enter_context(
                        tracing.span("copy to host", blocks=num_blocks, bytes=num_blocks * memory.block_bytes)
                    )
                memory.device.gather(device_slots, memory.arena, arena_slots, after=after)
        except Exception:
            _log.exception("copying %d blocks from the device failed", len(device_slots))
            is_ok = False
        for batch, turn in saves:
            self._copied(batch, turn, is_ok=is_ok)

    def _copied(self, batch: SaveBatch, turn: "_Turn", *, is_ok: bool) -> None:
        """Tells the directory that the device slots are free again, and has the tiers asked."""
        with self._lock:
            self._saving.discard(batch.batch_id)
        self._answers.post(Copied(batch.batch_id, bytes([is_ok]) * len(batch.keys)))
        if batch.tiers and batch.keys and is_ok:
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
