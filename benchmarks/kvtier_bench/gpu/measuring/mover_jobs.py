"""Jobs for a mover, each of all blocks of a device, and what it answers."""

import itertools
import threading
from types import TracebackType

from kvtier.clock import MONOTONIC
from kvtier.device.kv import Fence
from kvtier.memory.arena import Arena
from kvtier.offload.messages import HOST, Copied, LoadBatch, Loaded, SaveBatch, ToMover
from kvtier.offload.mover import Mover
from kvtier_bench.gpu.measuring.comparing import WrongResultError

LOAD, SAVE = "load", "save"
_BATCH_BYTES = 128 << 20
"""The most bytes of a batch, as the directory has it."""
_KEY_BYTES = 48
_PATIENCE_S, _LOOK_S = 60.0, 0.2


class MoverJobs:
    """Hands jobs over as the directory does: batches of 128 MiB. For the engine's thread."""

    def __init__(self, mover: Mover, arena: Arena, device_slots: list[int]) -> None:
        """:param device_slots: of the block in each arena slot."""
        self.mover, self._arena, self._device_slots = mover, arena, device_slots
        self._batch_blocks = max(1, min(_BATCH_BYTES // arena.slot_bytes, arena.num_slots // 2))
        self._ids = itertools.count()
        self.batches_per_job = -(-arena.num_slots // self._batch_blocks)
        self.batch_bytes = self._batch_blocks * arena.slot_bytes

    def submit(self, kind: str, answers: "Answers", *, loads_after: Fence | None = None) -> float:
        """Submits a round and returns the time when it was handed over. `loads_after` is as `Mover.submit` has it."""
        messages: list[ToMover] = []
        for start in range(0, self._arena.num_slots, self._batch_blocks):
            slots = list(range(start, min(start + self._batch_blocks, self._arena.num_slots)))
            number, keys = next(self._ids), [slot.to_bytes(_KEY_BYTES, "little") for slot in slots]
            answers.expect(number)
            device_slots = self._device_slots[start : start + len(slots)]
            if kind == LOAD:
                messages.append(LoadBatch(number, HOST, keys, slots, device_slots))
            else:
                messages.append(SaveBatch(number, [], keys, slots, device_slots))
        now = MONOTONIC()
        self.mover.submit(messages, loads_after=loads_after)
        return now


class Answers:
    """Takes a mover's answers as they come, in a thread of its own. A context manager."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._ready = threading.Condition()
        self._open: set[int] = set()  # guarded by _ready
        self._ended_s: list[float] = []  # guarded by _ready
        self._failed = 0  # guarded by _ready
        self._over = False  # guarded by _ready
        self._thread = threading.Thread(target=self._take, name="kvtier-bench-answers")

    @property
    def num_open(self) -> int:
        """Batches without an answer."""
        with self._ready:
            return len(self._open)

    def expect(self, batch_id: int) -> None:
        """Expects an answer. It is called before the batch is submitted."""
        with self._ready:
            self._open.add(batch_id)

    def wait(self) -> float:
        """Returns the time when the last answer came.

        :raises WrongResultError: a batch failed, or there was no answer within a minute.
        """
        with self._ready:
            if not self._ready.wait_for(lambda: not self._open, _PATIENCE_S):
                raise WrongResultError(f"{len(self._open)} batches were not answered")
            if self._failed:
                raise WrongResultError(f"{self._failed} batches failed")
            return self._ended_s[-1]

    def batches_per_s(self) -> float:
        """The rate of batches from the first answer to the last."""
        with self._ready:
            return (len(self._ended_s) - 1) / max(self._ended_s[-1] - self._ended_s[0], 1e-9)

    def __enter__(self) -> "Answers":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._ready:
            self._over = True
        self._mover.nudge()
        self._thread.join()

    def _take(self) -> None:
        while True:
            self._mover.wait(_LOOK_S)
            answers, now = self._mover.poll(), MONOTONIC()
            with self._ready:
                for answer in answers:
                    if isinstance(answer, Loaded | Copied):
                        self._open.discard(answer.batch_id)
                        self._ended_s.append(now)
                        self._failed += not all(answer.ok)
                self._ready.notify_all()
                if self._over:
                    return
