"""The mover as engines see it: messages of the directory in, answers out."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvtier.device.kv import DeviceKV, Fence
from kvtier.device.layered_loads import CopiesByLayer
from kvtier.errors import ClosedError, InvalidInputError
from kvtier.identity.keys import NamespaceId
from kvtier.memory.arena import Arena
from kvtier.offload.messages import (
    CancelBatch,
    DiscardBatch,
    LoadBatch,
    SaveBatch,
    StoreBatch,
    ToDirectory,
    ToMover,
)
from kvtier.offload.mover.answers import Answers
from kvtier.offload.mover.fetcher import Fetcher
from kvtier.offload.mover.memory import BlockMemory
from kvtier.offload.mover.saver import Saver
from kvtier.offload.mover.threads import Threads
from kvtier.offload.mover.tier_writer import TierWriter
from kvtier.offload.mover.tiers import MoverTiers


class Mover:
    """Carries out batches. `fence` and `submit` are for the engine's thread, the rest for any; none but `wait` and
    `close` blocks.

    The caller owns device, arena and tiers, and closes them after the mover.

    `_lock` guards `_closed`. It is held while a message is queued, so that nothing is queued once `close` has begun.
    """

    def __init__(
        self,
        *,
        namespace: NamespaceId,
        device: DeviceKV,
        arena: Arena,
        tiers: MoverTiers,
        num_load_threads: int = 2,
        layered: CopiesByLayer | None = None,
    ) -> None:
        """Raises `InvalidInputError` if the arena's slots are too small for blocks of the device.

        :param num_load_threads: batches under way at a time, each with arena slots of its own: 2 are a double
            buffer, one read from its tier while the other is copied to the device; more help tiers with latency.
        :param layered: copies of `device` by layer; needed for loads by layer only.
        """
        self._memory, self._tiers = BlockMemory(namespace, device, arena), tiers
        self._threads = Threads(tiers.by_name, num_load_threads=num_load_threads)
        self._answers = Answers(tiers.inventory, tiers.forget_untold)
        self._fetcher = Fetcher(self._memory, tiers, self._threads, self._answers, layered=layered)
        self._writer = TierWriter(self._memory, tiers, self._threads, self._answers)
        self._saver = Saver(self._memory, self._writer, self._threads, self._answers)
        self._lock = threading.Lock()
        self._closed = False

    def fence(self) -> Fence | None:
        """Marks what the calling thread has queued on the device until now. None: the device has no queue."""
        return self._memory.device.fence()

    def submit(self, messages: Sequence[ToMover], *, loads_after: Fence | None = None) -> None:
        """Starts messages of the directory, in order. It is called when all is queued that writes the blocks to save.

        Raises `ClosedError` after `close`.

        :param loads_after: what last used the device slots to load to is before it. None: it has been queued until now.
        """
        until_now = self.fence() if any(isinstance(m, LoadBatch | SaveBatch) for m in messages) else None
        for message in messages:
            with self._lock:
                if self._closed:
                    raise ClosedError("the mover is closed")
                self._start(message, saves_after=until_now, loads_after=loads_after or until_now)

    def copying(self, batch_ids: Iterable[int]) -> set[int]:
        """The save batches among these that may still read the device. One that `Copied` tells of does not."""
        return self._saver.copying(batch_ids)

    def cancel_loads(self) -> None:
        """Cancels all loads but those that `is_at_device` counts: they write to the device no more. Waits for no tier.

        The directory hears of each as if it had cancelled it: what their tiers still bring is kept in the arena.
        """
        self._fetcher.cancel_all()

    @property
    def is_at_device(self) -> bool:
        """Whether a copy from or to the device is under way, or a save that was submitted waits for its turn."""
        return self._saver.is_at_device or self._fetcher.is_at_device

    def poll(self) -> list[ToDirectory]:
        """Messages for the directory since the last poll."""
        return self._answers.poll()

    def wait(self, timeout_s: float) -> None:
        """Blocks until `poll` has an answer to a batch, or until `nudge`, at most `timeout_s`."""
        self._answers.wait(timeout_s)

    def nudge(self) -> None:
        """Ends the present `wait`, or else the next one."""
        self._answers.nudge()

    def close(self) -> None:
        """Finishes what was submitted, then stops the threads. Idempotent."""
        with self._lock:
            self._closed = True
        self._answers.close()
        self._threads.close()

    def _start(self, message: ToMover, *, saves_after: Fence | None, loads_after: Fence | None) -> None:
        """Hands a message to who carries it out. Caller holds _lock."""
        match message:
            case LoadBatch():
                self._fetcher.start(message, loads_after)
            case SaveBatch():
                self._saver.start(message, saves_after)
            case StoreBatch():
                self._writer.write(message, [message.tier])
            case DiscardBatch():
                unheard = self._answers.unheard(message.tier)
                self._saver.discard(replace(message, keys=[*message.keys, *unheard]))
            case CancelBatch():
                self._fetcher.cancel(message.batch_id)
            case _:
                raise InvalidInputError(f"{type(message).__name__} is not for a mover")
