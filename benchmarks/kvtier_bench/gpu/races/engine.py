"""A small engine whose device never idles: steps are queued ahead, and nobody waits for the device in between.

It obeys what an engine must: a block is handed out again when nobody else is at it. Everything else is up to the
fences of the copies.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvtier.device.kv import Fence
from kvtier.errors import KvtierError
from kvtier.offload import Mover
from kvtier.offload.messages import (
    HOST,
    CancelBatch,
    Cancelled,
    Copied,
    LoadBatch,
    Loaded,
    Queued,
    SaveBatch,
)
from kvtier_bench.gpu.races.chip import Chip
from kvtier_bench.gpu.races.faults import Fault
from kvtier_bench.gpu.races.work import Queues, Steps

_PATIENCE_S = 60.0
_KEPT_STARTS = 8
"""The starts of steps that are kept: more than there are steps in the queue."""


class Engine:
    """Queues steps and hands batches to the mover, as a connector does. One thread."""

    def __init__(self, chip: Chip, mover: Mover, fault: Fault) -> None:
        self._chip, self._mover, self._fault = chip, mover, fault
        self._steps = Steps(chip)
        self._starts: deque[Fence | None] = deque(maxlen=_KEPT_STARTS)
        """The fence at the start of each of the last steps."""
        self._batches: dict[int, SaveBatch | LoadBatch] = {}
        """Batches that may be at their device slots, by id."""
        self._arriving: set[int] = set()
        """Loads by layer whose copies are queued, and not known to be done, by id."""
        self._answers: dict[int, Loaded | Cancelled | Copied | Queued] = {}
        """The answer that frees a batch's device slots, by id."""
        self._last_batch = 0

    def step(
        self,
        *work: Queues,
        takes: Iterable[int] = (),
        first: Sequence[Queues] = (),
        tail: Sequence[Queues] = (),
        messages: Sequence[SaveBatch | LoadBatch] = (),
        after_processed: bool = False,
    ) -> None:
        """Queues a step, and hands over messages as soon as it is launched.

        :param takes: blocks that are handed out in this step.
        :param first: work on these blocks before anything is loaded to them, such as zeroing.
        :param tail: see `Steps.queue`.
        :param messages: saves of what is computed in this step or was before, loads of blocks that `work` leaves alone.
        :param after_processed: loads come after the start of the step that follows the last processed one, as in vLLM,
            which hands out blocks when the last step that used them has been processed.
        """
        if self._fault is not Fault.NO_FLUSH:
            self.flush(takes)
        loads_after = self._mover.fence()
        for queues in first:
            queues()
        if self._fault is Fault.EARLY_FENCE:
            self._submit(messages, loads_after)
            self._steps.queue(*work, tail=tail)
        else:
            self._starts.append(self._mover.fence())
            self._steps.queue(*work, tail=tail)
            self._submit(messages, self._starts[-self._steps.num_queued if after_processed else -1])
        self._steps.process()
        self.poll()

    def step_without_fence(self, *work: Queues) -> None:
        """Queues a step that takes no blocks and sends no messages, as our own engine does."""
        self._steps.queue(*work)
        self._steps.process()
        self.poll()

    def process_steps(self) -> None:
        """Waits for all steps that are queued."""
        self._steps.process(at_most_ahead=0)

    def flush(self, blocks: Iterable[int]) -> None:
        """Waits on the host until no save reads these blocks, as a worker does before a forward pass."""
        taken = frozenset(blocks)

        def is_read(batch: SaveBatch | LoadBatch) -> bool:
            return isinstance(batch, SaveBatch) and not taken.isdisjoint(batch.device_slots)

        self._until(lambda: not any(map(is_read, self._batches.values())))

    def save(self, device_slots: Sequence[int], arena_slots: Sequence[int]) -> SaveBatch:
        """A message that saves blocks, for the step that computes them or a later one."""
        keys = [key_of(slot) for slot in arena_slots]
        return SaveBatch(self._new_batch(), [], keys, list(arena_slots), list(device_slots))

    def load(self, arena_slots: Sequence[int], device_slots: Sequence[int], *, by_layer: bool = False) -> LoadBatch:
        """A message that loads blocks from host memory, for the step that takes them."""
        keys = [key_of(slot) for slot in arena_slots]
        return LoadBatch(
            self._new_batch(), HOST, keys, list(arena_slots), list(device_slots), "by_layer" if by_layer else "arena"
        )

    def borrow(self, source: str, keys: Sequence[bytes], device_slots: Sequence[int]) -> LoadBatch:
        """A message that loads blocks from memory that a tier lends, for the step that takes them."""
        return LoadBatch(self._new_batch(), source, list(keys), [], list(device_slots), "direct")

    def cancel(self, batch: LoadBatch) -> None:
        """Cancels a load at once, without a step."""
        self._mover.submit([CancelBatch(batch.batch_id)])

    def result(self, batch: SaveBatch | LoadBatch) -> bytes | None:
        """Waits for a batch's end, or until its layers are all queued. Gives 1 or 0 for each of its blocks, or None if
        it was cancelled."""
        self._until(lambda: batch.batch_id not in self._batches)
        answer = self._answers.pop(batch.batch_id)
        if isinstance(answer, Queued):
            return b"\1" * len(batch.keys)
        return None if isinstance(answer, Cancelled) else answer.ok

    def is_over(self, batch: SaveBatch | LoadBatch) -> bool:
        """Whether the mover keeps off the batch's blocks by now."""
        self.poll()
        return batch.batch_id not in self._batches

    def until_arrived(self) -> None:
        """Waits until all layers have come, and their arena slots are not read any more."""
        self._until(lambda: not self._arriving)

    def settle(self) -> None:
        """Waits until no batch and no step is under way."""
        self._until(lambda: not self._batches and not self._arriving)
        self.process_steps()

    def poll(self) -> None:
        """Takes in the mover's answers."""
        for message in self._mover.poll():
            if isinstance(message, Queued):
                self._arriving.add(message.batch_id)
            elif isinstance(message, Loaded):
                self._arriving.discard(message.batch_id)
            if isinstance(message, Loaded | Cancelled | Copied | Queued) and message.batch_id in self._batches:
                del self._batches[message.batch_id]
                self._answers[message.batch_id] = message

    def _until(self, is_so: Callable[[], bool]) -> None:
        deadline = self._chip.clock() + _PATIENCE_S
        self.poll()
        while not is_so():
            self._chip.pause()
            self.poll()
            if self._chip.clock() > deadline:
                raise KvtierError(f"after {_PATIENCE_S} s there is no answer to {len(self._batches)} batches")

    def _new_batch(self) -> int:
        self._last_batch += 1
        return self._last_batch

    def _submit(self, messages: Sequence[SaveBatch | LoadBatch], loads_after: Fence | None) -> None:
        if not messages:
            return
        for message in messages:
            self._batches[message.batch_id] = message
        self._mover.submit(messages, loads_after=loads_after)


def key_of(number: int) -> bytes:
    """The number as a block key, which has 16 bytes of tenant and 32 of hash."""
    return number.to_bytes(48, "big")
