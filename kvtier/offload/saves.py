"""Blocks on their way from the device to the arenas, and from there to the tiers that get them at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.errors import InvariantError
from kvtier.identity.keys import BlockKey
from kvtier.offload.index import BlockIndex
from kvtier.offload.jobs import Block, DirectorySettings, JobResult, chunks, columns
from kvtier.offload.message_queue import MessageQueue
from kvtier.offload.messages import HOST, Copied, SaveBatch
from kvtier.offload.metrics import HierarchyMetrics
from kvtier.offload.pending_writes import PendingWrites
from kvtier.system.tracing import tracing
from kvtier.tiers.host.entries import Entry


@dataclass(slots=True)
class _Job:
    """A save. Over when `open` is empty: its device slots are read no longer. Its batches may go on to tiers below."""

    job_id: int
    blocks: list[Block]
    found: frozenset[int]
    """Indexes of blocks that the arenas had, or were being given, before."""
    ok: set[int] = field(default_factory=set)
    """Indexes of blocks that the job has brought to the arenas."""
    open: set[int] = field(default_factory=set)
    """Batches that may still read the job's device slots."""


@dataclass(slots=True)
class _Batch:
    """What the movers were given. Over when `on_arena` is empty."""

    batch_id: int
    job: _Job
    indexes: list[int]
    entries: list[Entry[BlockKey]]
    """Index entries of the blocks: being written, and pinned as soon as the copies are there."""
    ok: list[bool]
    on_device: set[int]
    """Ranks that may still read the device slots."""
    on_arena: set[int]
    """Ranks that may still read or write the arena slots."""
    forget: bool = False
    """The arenas were reset meanwhile: what it brings is not kept."""


class Saves:
    """Gives the movers what is to be copied from the device, as far as there is room. Scheduler thread only."""

    def __init__(
        self,
        index: BlockIndex,
        owed: PendingWrites,
        settings: DirectorySettings,
        *,
        movers: MessageQueue,
        metrics: HierarchyMetrics,
        on_end: Callable[[JobResult], None],
    ) -> None:
        """:param on_end: told of every job that is over."""
        self._index, self._owed, self._settings = index, owed, settings
        self._movers, self._metrics, self._on_end = movers, metrics, on_end
        self.batches: dict[int, _Batch] = {}
        """The batches under way, by id. Changed here alone."""
        self.num_blocks = 0
        """Arena slots that batches hold."""

    def start(self, blocks: Sequence[Block], room: int) -> int | None:
        """Copies at most `room` blocks; None when none was to be copied. See `Directory.start_save`."""
        entries: dict[int, Entry[BlockKey]] = {}
        found: set[int] = set()
        for index, (key, _) in enumerate(blocks):
            if self._index.slots.find(key) is not None:
                found.add(index)
                continue
            entry = self._index.prepare(key) if len(entries) < room else None
            if entry is None:
                self._metrics.saves_dropped.inc()
                continue
            entries[index] = entry
        self.num_blocks += len(entries)
        job = _Job(self._movers.new_id(), list(blocks), frozenset(found))
        for indexes in chunks(list(entries), self._settings.batch_of(HOST)):
            self._send(job, indexes, [entries[index] for index in indexes])
        return job.job_id if entries else None

    def copied(self, rank: int, message: Copied) -> None:
        """Notes that a rank has read the batch's device slots. The last one makes its blocks readable in the arenas."""
        batch = self.batches[message.batch_id]
        batch.ok = [before and bool(now) for before, now in zip(batch.ok, message.ok, strict=True)]
        batch.on_device.discard(rank)
        job = batch.job
        if batch.on_device or batch.batch_id not in job.open:
            return
        job.open.remove(batch.batch_id)
        entered: list[BlockKey] = []
        for index, entry, good in zip(batch.indexes, batch.entries, batch.ok, strict=True):
            if good:
                job.ok.add(index)
                # The block can be read from now on, and is pinned, because tiers below are written from its slot.
                self._index.commit(entry)
                self._index.slots.pin(entry.key)
                if batch.forget:
                    self._index.slots.discard(entry.key)
                else:
                    entered.append(entry.key)
        self._owed.entered(entered, source="")
        if not job.open:
            self._end(job)

    def stored(self, rank: int, batch_id: int) -> None:
        """Notes that the tiers have what a rank had to write. The last one ends the batch."""
        batch = self.batches[batch_id]
        batch.on_arena.discard(rank)
        if batch.on_arena:
            return
        del self.batches[batch_id]
        for entry, good in zip(batch.entries, batch.ok, strict=True):
            if good:
                self._index.slots.unpin(entry)
            else:
                self._index.slots.abort(entry)
        self.num_blocks -= len(batch.entries)

    def forget(self) -> set[BlockKey]:
        """Keeps nothing of what is under way; returns it."""
        for batch in self.batches.values():
            batch.forget = True
        return {entry.key for batch in self.batches.values() for entry in batch.entries}

    def copying(self) -> list[BlockKey]:
        """Returns the blocks that are still copied from the device, but for those that nothing will be kept of."""
        batches = [batch for batch in self.batches.values() if batch.on_device and not batch.forget]
        return [entry.key for batch in batches for entry in batch.entries]

    def check(self) -> None:
        """Verifies the bookkeeping; raises `InvariantError`."""
        saving = sum(len(batch.entries) for batch in self.batches.values())
        if saving != self.num_blocks:
            raise InvariantError(f"{saving} slots are being saved, counted {self.num_blocks}")

    def _send(self, job: _Job, indexes: list[int], entries: list[Entry[BlockKey]]) -> None:
        ranks = self._movers.ranks
        batch = _Batch(self._movers.new_id(), job, indexes, entries, [True] * len(indexes), set(ranks), set(ranks))
        self.batches[batch.batch_id] = batch
        job.open.add(batch.batch_id)
        blocks = [job.blocks[index] for index in indexes]
        self._movers.send(SaveBatch(batch.batch_id, self._owed.at_once, *columns(blocks, entries), tracing.context()))

    def _end(self, job: _Job) -> None:
        self._index.touch([key for key, _ in job.blocks])
        failed = frozenset(range(len(job.blocks))) - job.ok - job.found
        self._on_end(JobResult(job.job_id, "save", failed, ("",) * len(job.blocks), job.found))
