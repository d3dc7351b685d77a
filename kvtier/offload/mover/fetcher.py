"""Loads of a mover: blocks of tiers and of the arena on their way to the device."""

import contextlib
import enum
import logging
import threading
from collections.abc import Sequence

from kvtier.clock import MONOTONIC
from kvtier.codec.checksums import prefix
from kvtier.device.kv import Blocks, Fence
from kvtier.device.layered_loads import CopiesByLayer
from kvtier.errors import InvalidInputError
from kvtier.identity.keys import StoreKey
from kvtier.offload.messages import HOST, Cancelled, LoadBatch, Loaded, Queued
from kvtier.offload.mover.answers import Answers
from kvtier.offload.mover.copy_queue import CopyQueue
from kvtier.offload.mover.lending import Loan
from kvtier.offload.mover.memory import BlockMemory
from kvtier.offload.mover.threads import Threads
from kvtier.offload.mover.tiers import MoverTiers
from kvtier.system.logs import within_request
from kvtier.system.tracing import tracing
from kvtier.tiers.base import Status

_log = logging.getLogger(__name__)


class _State(enum.Enum):
    RUNNING = enum.auto()
    COPYING = enum.auto()
    """The device slots are being written: too late to cancel."""
    CANCELLED = enum.auto()


class Fetcher:
    """Carries out load batches. Any thread; nothing blocks.

    `_lock` guards `_running` and `_loaded_s`. It is held while `Cancelled` is posted, so that it comes before `Loaded`.
    """

    def __init__(
        self,
        memory: BlockMemory,
        tiers: MoverTiers,
        threads: Threads,
        answers: Answers,
        *,
        layered: CopiesByLayer | None,
    ) -> None:
        self._memory, self._tiers, self._threads, self._answers = memory, tiers, threads, answers
        self._layered = layered
        self._copies = CopyQueue(threads.host_loads, self._copy)
        self._lock = threading.Lock()
        self._running: dict[int, _State] = {}
        """The states of batches under way, by id."""
        self._loaded_s: dict[str, float] = {}
        """The time when the last batch of each tier was there, by tier."""

    @property
    def is_at_device(self) -> bool:
        """Whether a copy to the device is under way."""
        with self._lock:
            return _State.COPYING in self._running.values()

    def start(self, batch: LoadBatch, after: Fence | None) -> None:
        """Queues a load. `Loaded` is posted in any case when it is over."""
        with self._lock:
            self._running[batch.batch_id] = _State.RUNNING
        if batch.source != HOST:
            self._threads.loads.submit(self._load, batch, after)
        elif batch.way == "arena":
            self._copies.submit(batch, len(batch.keys) * self._memory.block_bytes, after)
        else:
            self._threads.host_loads.submit(self._load, batch, after)

    def cancel(self, batch_id: int) -> None:
        """Keeps a load off the device and posts `Cancelled`. A load that is over or copying answers by itself."""
        with self._lock:
            self._cancel(batch_id)

    def cancel_all(self) -> None:
        """Cancels all loads that do not copy yet."""
        with self._lock:
            for batch_id in self._running:
                self._cancel(batch_id)

    def _cancel(self, batch_id: int) -> None:
        """Caller holds _lock."""
        if self._running.get(batch_id) is _State.RUNNING:
            self._running[batch_id] = _State.CANCELLED
            self._answers.post(Cancelled(batch_id))

    def _load(self, batch: LoadBatch, after: Fence | None) -> None:
        begun_s, waited_s, ok = MONOTONIC(), 0.0, bytes(len(batch.keys))
        with tracing.within(batch.trace), within_request(batch.request_id):
            try:
                ok, waited_s = self._bring(batch, after)
            except Exception:
                self._log_failure(batch)
        self._loaded([batch], ok, begun_s, waited_s)

    def _log_failure(self, batch: LoadBatch) -> None:
        """Logs the exception that is being handled, as the batch's. Whatever it is, the engine hears and computes."""
        with tracing.within(batch.trace), within_request(batch.request_id):
            _log.exception(
                "loading %d blocks from %s failed", len(batch.keys), batch.source, extra={"tier": batch.source}
            )

    def _copy(self, batches: Sequence[LoadBatch], after: Fence | None) -> None:
        """Copies batches that are in the arena."""
        begun_s, waited_s, is_ok, memory = MONOTONIC(), 0.0, True, self._memory
        copied = [batch for batch in batches if self._begin_copy(batch)]
        slots = [slot for batch in copied for slot in batch.arena_slots]
        device_slots = [slot for batch in copied for slot in batch.device_slots]
        try:
            with contextlib.ExitStack() as spans:
                for batch in copied:
                    spans.enter_context(tracing.within(batch.trace))
                    spans.enter_context(within_request(batch.request_id))
                    spans.enter_context(self._copy_span(len(batch.keys)))
                if copied:
                    waited_s = memory.device.scatter(memory.arena, slots, device_slots, after=after)
        except Exception:
            for batch in batches:
                self._log_failure(batch)
            is_ok = False
        num_blocks = sum(len(batch.keys) for batch in batches)
        self._loaded(batches, bytes([is_ok]) * num_blocks, begun_s, waited_s)

    def _loaded(self, batches: Sequence[LoadBatch], ok: bytes, begun_s: float, waited_s: float) -> None:
        """Tells the directory that loads of one tier are over. Each has its blocks' share of the time.

        :param ok: a byte for each block of all batches, in order.
        """
        source = batches[0].source
        with self._lock:
            for batch in batches:
                del self._running[batch.batch_id]
            # Batches of one tier that run side by side share what it can do: no time counts twice. What the engine's
            # own work took does not count at all: it says nothing of the tier.
            now, before_s = MONOTONIC(), self._loaded_s.get(source, 0.0)
            seconds, self._loaded_s[source] = max(0.0, now - max(begun_s + waited_s, before_s)), now
        start = 0
        for batch in batches:
            of_batch = ok[start : start + len(batch.keys)]
            self._answers.post(Loaded(batch.batch_id, of_batch, seconds * len(of_batch) / max(1, len(ok))))
            start += len(of_batch)

    def _bring(self, batch: LoadBatch, after: Fence | None) -> tuple[bytes, float]:
        """Returns which blocks are on the device, and the seconds that the copy waited for the engine."""
        if batch.way == "by_layer":
            return self._bring_by_layer(batch, after), 0.0
        if batch.way == "direct":
            return self._bring_directly(batch, after)
        if batch.way == "arena":
            return self._bring_through_arena(batch, after)
        raise InvalidInputError(f"a mover loads no blocks in the way {batch.way!r}")

    def _bring_by_layer(self, batch: LoadBatch, after: Fence | None) -> bytes:
        """Copies blocks of the arena, layer after layer. The directory hears of it when all copies are queued."""
        if self._layered is None:
            raise InvalidInputError("this mover's device does not copy by layer")
        if self._begin_copy(batch):
            self._layered.scatter(
                Blocks(self._memory.arena, batch.arena_slots, batch.device_slots),
                after=after,
                on_queued=lambda: self._answers.post(Queued(batch.batch_id)),
            )
        return b"\1" * len(batch.keys)

    def _bring_through_arena(self, batch: LoadBatch, after: Fence | None) -> tuple[bytes, float]:
        """Reads blocks of a tier into the arena, and copies what is there then."""
        ok, waited_s = self._read(batch), 0.0
        if self._begin_copy(batch):
            present = [i for i, good in enumerate(ok) if good]
            slots, device_slots = [batch.arena_slots[i] for i in present], [batch.device_slots[i] for i in present]
            with self._copy_span(len(slots)):
                waited_s = self._memory.device.scatter(self._memory.arena, slots, device_slots, after=after)
        return ok, waited_s

    def _bring_directly(self, batch: LoadBatch, after: Fence | None) -> tuple[bytes, float]:
        """Copies blocks from where they lie in the memory of their tier. What changed meanwhile is no block."""
        keys, waited_s, loan = self._memory.store_keys(batch.keys), 0.0, None
        wrong: list[int] = []
        lender = self._tiers.lenders.get(batch.source)
        if lender is not None and not self._is_cancelled(batch):
            with tracing.span(f"borrow {batch.source}", tier=batch.source, blocks=len(keys)):
                loan = lender.start_read(keys, self._memory.block_bytes)
        if lender is None or loan is None:
            return bytes(len(keys)), waited_s
        try:
            if loan.blocks and self._begin_copy(batch):
                sources = [
                    Blocks(lent.memory, lent.slots, [batch.device_slots[i] for i in lent.indexes])
                    for lent in loan.blocks
                ]
                num_blocks = sum(len(lent.slots) for lent in loan.blocks)
                with self._copy_span(num_blocks):
                    waited_s = self._memory.device.scatter_all(sources, after=after)
                wrong = self._wrong_blocks(batch, keys, loan)
        finally:
            whole = lender.end_read(loan, wrong)
        return bytes(whole), waited_s

    def _wrong_blocks(self, batch: LoadBatch, keys: Sequence[StoreKey], loan: Loan) -> list[int]:
        """Indexes of blocks that the tier has not looked at, and that have not arrived as their writer summed them.

        They are read by way of the arena then: if it is the tier's memory that is wrong, that drops them.
        """
        indexes = [index for lent in loan.blocks if lent.checksums for index in lent.indexes]
        if not indexes:
            return []
        checksums = [checksum for lent in loan.blocks for checksum in lent.checksums]
        slots = [batch.device_slots[index] for index in indexes]
        prefixes = [prefix(keys[index], self._memory.block_bytes) for index in indexes]
        places = self._memory.device.wrong_blocks(slots, prefixes, checksums)
        if places:
            _log.warning(
                "of %d blocks that %s lent, %d have arrived with other bytes than their writer's",
                len(indexes), batch.source, len(places), extra={"tier": batch.source},
            )  # fmt: skip
        return [indexes[place] for place in places]

    def _read(self, batch: LoadBatch) -> bytes:
        """Fills the batch's arena slots from its tier, and returns which of them hold their blocks."""
        if self._is_cancelled(batch):
            return bytes(len(batch.keys))
        tier, views = self._tiers.by_name[batch.source], [self._memory.view(slot) for slot in batch.arena_slots]
        statuses = tier.read(self._memory.store_keys(batch.keys), views)
        return bytes(status is Status.HIT for _, status in zip(batch.keys, statuses, strict=True))

    def _copy_span(self, num_blocks: int) -> contextlib.AbstractContextManager[object]:
        """Returns the span of a copy of so many blocks."""
        return tracing.span("copy to device", blocks=num_blocks, bytes=num_blocks * self._memory.block_bytes)

    def _is_cancelled(self, batch: LoadBatch) -> bool:
        with self._lock:
            return self._running[batch.batch_id] is _State.CANCELLED

    def _begin_copy(self, batch: LoadBatch) -> bool:
        """Whether the device slots may be written."""
        with self._lock:
            if self._running[batch.batch_id] is _State.CANCELLED:
                return False
            self._running[batch.batch_id] = _State.COPYING
            return True
