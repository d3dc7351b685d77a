"""Blocks on their way to the device: each from the nearest tier that has it, by way of the arenas."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.clock import Clock
from kvtier.errors import InvariantError
from kvtier.identity.keys import BlockKey
from kvtier.offload.host_policy import HostPolicy
from kvtier.offload.index import BlockIndex
from kvtier.offload.jobs import Block, DirectorySettings, JobResult, chunks, columns
from kvtier.offload.message_queue import MessageQueue
from kvtier.offload.messages import HOST, CancelBatch, LoadBatch, Loaded, LoadWay
from kvtier.offload.metrics import HierarchyMetrics
from kvtier.offload.pending_writes import NO_TIER, PendingWrites
from kvtier.offload.planner import MISSING, PENDING, BlockStatus
from kvtier.offload.previous import PreviousNames
from kvtier.offload.speeds import Speeds
from kvtier.system.logs import current_request_id
from kvtier.system.tracing import tracing
from kvtier.tiers.host.entries import Entry

_MANY_LOANS = 16
"""A load that needs more loans gets larger ones, up to twice as large: a few loans keep the bus busy, and each takes
a millisecond of the interpreter."""


@dataclass(slots=True)
class _Job:
    """A load. Over when nothing is queued and nothing open: its device slots are the caller's again."""

    job_id: int
    blocks: list[Block]
    deadline: float
    queued: list[int]
    """Indexes of blocks that the movers were not given yet, in the order in which they will be."""
    tiers: list[str]
    """The tier that each block came from; empty as long as it has not."""
    open: set[int] = field(default_factory=set)
    """Batches that may still write to the job's device slots."""
    ok: set[int] = field(default_factory=set)
    not_leased: set[int] = field(default_factory=set)
    """Blocks that the shared tier did not lend: they come by way of the arenas."""
    names: dict[int, BlockKey] = field(default_factory=dict)
    """The keys by which their tiers are asked for blocks that were found under a previous secret, by index."""
    is_cancelled: bool = False
    trace: str = field(default_factory=tracing.context)
    """The context that it was started in."""
    request_id: str = field(default_factory=current_request_id)
    """The request that it was started for, if that is known."""


@dataclass(slots=True)
class _Batch:
    """What the movers were given. Over when `on_arena` is empty."""

    batch_id: int
    job: _Job
    indexes: list[int]
    source: str
    """The tier to read."""
    entries: list[Entry[BlockKey]]
    """Index entries of the blocks: pinned if the source is `HOST`, else being written. None for a direct load."""
    way: LoadWay
    """A job whose blocks are loaded by layer may be over before the copies are."""
    ok: list[bool]
    on_device: set[int]
    """Ranks that may still write to the device slots."""
    on_arena: set[int]
    """Ranks that may still read or write the arena slots."""
    seconds: float = 0.0
    """The seconds that the slowest rank has taken."""
    cancelled: bool = False
    """A rank gave up on the device copy."""
    forget: bool = False
    """The arenas were reset meanwhile: what it brings is not kept."""


class Loads:
    """Gives the movers what jobs want, as arena slots become free for it. Scheduler thread only."""

    def __init__(  # noqa: PLR0913 - the parts that it is put together from
        self,
        index: BlockIndex,
        owed: PendingWrites,
        settings: DirectorySettings,
        *,
        previous: PreviousNames,
        shared_tier: str,
        movers: MessageQueue,
        policy: HostPolicy,
        metrics: HierarchyMetrics,
        clock: Clock,
        on_end: Callable[[JobResult], None],
    ) -> None:
        """
        :param previous: what lookups have found under previous secrets. It forgets what loads have tried.
        :param shared_tier: where blocks are read from that neither the arenas nor local tiers have; empty: nowhere.
        :param policy: told what was used.
        :param on_end: told of every job that is over.
        """
        self._index, self._owed, self._settings, self._previous = index, owed, settings, previous
        self._shared_tier, self._movers, self._policy = shared_tier, movers, policy
        self._metrics, self._clock, self._on_end = metrics, clock, on_end
        self.speeds = Speeds(clock)
        self._jobs: dict[int, _Job] = {}
        """The loads under way, by id."""
        self.batches: dict[int, _Batch] = {}
        """The batches under way, by id. Changed here alone."""

    def start(self, blocks: Sequence[Block], *, by_layer: bool = False) -> int:
        """Does the work of `Directory.start_load`."""
        deadline = self._clock() + self._settings.load_deadline_s
        # Blocks in the arena come first: they are pinned before another block of this very job takes their slot.
        queued = sorted(range(len(blocks)), key=lambda index: not self._index.has(HOST, blocks[index][0]))
        job = _Job(self._movers.new_id(), list(blocks), deadline, queued, [""] * len(blocks))
        self._jobs[job.job_id] = job
        if by_layer and blocks and all(self._index.has(HOST, key) for key, _ in blocks):
            self._issue_by_layer(job)
        else:
            self._issue(job)
        return job.job_id

    def cancel(self, job_id: int) -> None:
        """Does the work of `Directory.cancel`. It ignores jobs that are over, and jobs that are no loads."""
        job = self._jobs.get(job_id)
        if job is None:
            return
        job.is_cancelled = True
        job.queued.clear()
        job.deadline = float("inf")
        for batch_id in job.open:
            self._movers.send(CancelBatch(batch_id))
        self._end_if_over(job)

    def advance(self) -> None:
        """Gives waiting jobs what has become free, and ends late ones."""
        now = self._clock()
        for job in list(self._jobs.values()):
            if now > job.deadline:
                self._metrics.deadlines_missed.labels("load").inc()
                self.cancel(job.job_id)
            elif job.queued:
                self._issue(job)

    def cancelled(self, rank: int, batch_id: int) -> None:
        """Notes that a rank keeps off the batch's device slots, but not off its arena slots."""
        batch = self.batches[batch_id]
        batch.cancelled = True
        self._leave_device(batch, rank)

    def queued(self, rank: int, batch_id: int) -> None:
        """Notes that a rank has queued all copies of a load by layer, which leaves its device slots to the engine."""
        self._leave_device(self.batches[batch_id], rank)

    def loaded(self, rank: int, message: Loaded) -> None:
        """Notes that a rank is done with the batch."""
        batch = self.batches[message.batch_id]
        batch.ok = [before and bool(now) for before, now in zip(batch.ok, message.ok, strict=True)]
        batch.seconds = max(batch.seconds, message.seconds)
        self._leave_arena(batch, rank)  # first, since a job ends with a use of what is in host memory by then
        self._leave_device(batch, rank)

    def forget(self) -> set[BlockKey]:
        """Keeps nothing of what is under way in the arenas; returns it."""
        for batch in self.batches.values():
            batch.forget = True
        return {entry.key for batch in self.batches.values() for entry in batch.entries}

    def _issue(self, job: _Job) -> None:
        """Gives the movers as many of the job's blocks as have a slot. The rest waits for the next `advance`.

        Blocks behind the first one without a slot are not looked at: a long job would else cost every step its length.
        """
        by_source: dict[str, dict[int, Entry[BlockKey]]] = {}
        waiting: list[int] = []
        leased: list[int] = []
        queued = iter(job.queued)
        for index in queued:
            key = job.blocks[index][0]
            where = self._index.locate(key)
            if where is MISSING:
                where = self._locate_previous(job, index)
            source = where.tier or self._shared_tier
            if where is PENDING:
                waiting.append(index)  # another job is bringing it: then it comes from the arena
            elif source == self._shared_tier and self._may_be_lent(job, index):
                leased.append(index)
            elif source:
                entry = self._index.slots.pin(key) if source == HOST else self._index.prepare(key)
                if entry is None:
                    waiting.append(index)
                    break
                by_source.setdefault(source, {})[index] = entry
        job.queued = [*waiting, *queued]
        most = self._settings.loan_blocks
        for indexes in chunks(leased, min(2 * most, max(most, len(leased) // _MANY_LOANS))):
            self._send(job, indexes, self._shared_tier, [], way="direct")
        for source, entries in by_source.items():
            for indexes in chunks(list(entries), self._settings.batch_of(source)):
                self._send(job, indexes, source, [entries[index] for index in indexes])
        self._end_if_over(job)

    def _locate_previous(self, job: _Job, index: int) -> BlockStatus:
        """Returns which tier has a block that none is known to have under its own key; the job remembers its name."""
        job.names.pop(index, None)
        name = self._previous.of(job.blocks[index][0])
        if name is None:
            return MISSING
        job.names[index] = name
        return self._index.locate_below(name)

    def _may_be_lent(self, job: _Job, index: int) -> bool:
        """Whether the shared tier is asked to lend the block. A block with a previous key there goes by way of the
        arena, from which tiers get it under its own key."""
        return self._settings.borrows and index not in job.not_leased and index not in job.names

    def _issue_by_layer(self, job: _Job) -> None:
        """Gives the movers the whole job in one message: the first layer of all blocks is copied first.

        All blocks are in the arenas. More than one message would bring the first layer of the last one at the end.
        """
        entries = [entry for key, _ in job.blocks if (entry := self._index.slots.pin(key)) is not None]
        if len(entries) != len(job.blocks):
            raise InvariantError("a block that host memory has cannot be pinned there")
        job.queued.clear()
        self._send(job, list(range(len(entries))), HOST, entries, way="by_layer")

    def _send(
        self, job: _Job, indexes: list[int], source: str, entries: list[Entry[BlockKey]], *, way: LoadWay = "arena"
    ) -> None:
        ok, ranks = [True] * len(indexes), self._movers.ranks
        batch = _Batch(self._movers.new_id(), job, indexes, source, entries, way, ok, set(ranks), set(ranks))
        self.speeds.fetch_begins(source, len(indexes))
        self.batches[batch.batch_id] = batch
        job.open.add(batch.batch_id)
        blocks = [(job.names.get(index, job.blocks[index][0]), job.blocks[index][1]) for index in indexes]
        self._movers.send(LoadBatch(batch.batch_id, source, *columns(blocks, entries), way, job.trace, job.request_id))

    def _leave_device(self, batch: _Batch, rank: int) -> None:
        """A rank keeps off the batch's device slots from now on; the last one ends the batch for its job."""
        batch.on_device.discard(rank)
        job = batch.job
        if batch.on_device or batch.batch_id not in job.open:
            return
        job.open.remove(batch.batch_id)
        # A job that ends when its copies are queued says nothing about how long they take.
        num_there = 0 if batch.cancelled or batch.way == "by_layer" else sum(batch.ok)
        self.speeds.fetch_ends(batch.source, len(batch.indexes), num_there=num_there, seconds=batch.seconds)
        for index, good in zip(batch.indexes, batch.ok, strict=True):
            if good and not batch.cancelled:
                job.ok.add(index)
                job.tiers[index] = batch.source
            elif batch.way == "direct" and not job.is_cancelled:
                job.not_leased.add(index)
                job.queued.append(index)
        self._end_if_over(job)

    def _leave_arena(self, batch: _Batch, rank: int) -> None:
        """A rank keeps off the batch's arena slots from now on; the last one ends the batch."""
        batch.on_arena.discard(rank)
        if batch.on_arena:
            return
        del self.batches[batch.batch_id]
        if batch.way == "direct":  # it had no slots there
            return
        entered: list[BlockKey] = []
        renamed: list[BlockKey] = []
        for index, entry, good in zip(batch.indexes, batch.entries, batch.ok, strict=True):
            if batch.source == HOST:
                self._index.slots.unpin(entry)
            elif not good:
                self._index.slots.abort(entry)
            else:
                self._index.commit(entry)
                if batch.forget:
                    self._index.slots.discard(entry.key)
                else:
                    (renamed if index in batch.job.names else entered).append(entry.key)
        self._owed.entered(entered, batch.source)
        self._owed.entered(renamed, NO_TIER)
        self._metrics.previous_blocks.inc(len(renamed))

    def _end_if_over(self, job: _Job) -> None:
        if job.open or job.queued:
            return
        del self._jobs[job.job_id]
        self._previous.forget(job.blocks[index][0] for index in job.names)
        self._index.touch([key for key, _ in job.blocks])
        self._policy.note_uses(job.blocks[index][0] for index in job.ok)
        for tier, count in Counter(job.tiers).items():
            (self._metrics.loaded_blocks.labels(tier) if tier else self._metrics.failed_blocks).inc(count)
        failed = frozenset(range(len(job.blocks))) - job.ok
        if failed:
            self._metrics.degraded_fetches.inc()
        self._on_end(JobResult(job.job_id, "load", failed, tuple(job.tiers)))
