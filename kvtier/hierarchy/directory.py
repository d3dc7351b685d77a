"""The directory: the half of the hierarchy that has the tokens. One per scheduler.

It knows what is in the arenas (one index for all ranks, since slot ids are the same in all of them),
mirrors what the movers report of their own tiers, and asks the shared tier in the background. It
decides; the movers carry out. Messages for them gather in `take_messages`, their answers come through
`deliver`. Nothing here blocks, and everything is for the scheduler thread alone.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import InvariantError
from kvtier.hierarchy.changes import ContentChanges
from kvtier.hierarchy.index import BlockIndex
from kvtier.hierarchy.jobs import Batch, Block, DirectorySettings, Discard, Job, JobResult, chunks
from kvtier.hierarchy.lookups import Lookups, SharedLookups
from kvtier.hierarchy.messages import (
    HOST,
    CancelBatch,
    Cancelled,
    Copied,
    DiscardBatch,
    Discarded,
    Inventory,
    LoadBatch,
    Loaded,
    SaveBatch,
    Stored,
    ToMover,
    decode,
    encode,
)
from kvtier.hierarchy.metrics import HierarchyMetrics
from kvtier.hierarchy.owed import OwedWrites
from kvtier.hierarchy.planner import PENDING, BlockStatus
from kvtier.hierarchy.speeds import Speeds
from kvtier.hierarchy.stores import Stores
from kvtier.keys import BlockKey, NamespaceId
from kvtier.tiers.base import Tier
from kvtier.tiers.slot_index import Entry
from kvtier.tiers.write_policy import UseCounts, WritePolicy

_log = logging.getLogger(__name__)


class Directory:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        namespaces: Sequence[NamespaceId],
        num_slots: int,
        local_tiers: Sequence[str],
        shared: Tier | None,
        metrics: HierarchyMetrics,
        settings: DirectorySettings | None = None,
        clock: Clock = MONOTONIC,
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        """
        :param namespaces: one per rank, in rank order; a block is a hit when all of them have it.
        :param num_slots: slots of each mover's arena.
        :param local_tiers: tiers below the arena that belong to each mover alone, in order of preference.
        :param shared: the tier that ranks and engines share; stays the caller's.
        :param on_answer: called from another thread when a lookup is worth polling.
        """
        self._settings = settings or DirectorySettings()
        self._metrics, self._clock = metrics, clock
        self.speeds = Speeds(clock)
        """What fetching takes; told by whoever computes what that takes."""
        self._ranks = frozenset(range(len(namespaces)))
        self._local_tiers = list(local_tiers)
        self._shared_tier = shared.name if shared is not None else ""
        self._index = BlockIndex(num_slots, len(namespaces), local_tiers, self._note_evicted)
        asking: SharedLookups | None = None
        if shared is not None:
            asking = SharedLookups(
                shared,
                namespaces,
                max_asking=self._settings.max_lookups,
                num_threads=self._settings.lookup_threads,
                on_answer=on_answer,
            )
        self._lookups = Lookups(self._index, asking, metrics, deadline_s=self._settings.lookup_deadline_s, clock=clock)
        self._uses: UseCounts[BlockKey] = UseCounts(self._settings.selective_uses, self._settings.max_counted_uses)
        below = [*local_tiers, *([shared.name] if shared is not None else [])]
        policies = self._settings.tier_policies
        self._owed = OwedWrites({tier: policies.get(tier, WritePolicy.WRITE_THROUGH) for tier in below}, self._uses)
        self._stores = Stores(
            self._index, self._owed, self._settings, ranks=self._ranks, send=self._send, new_id=self._new_id
        )
        self._max_saving = max(1, int(num_slots * self._settings.saving_fraction))
        self._num_saving = 0
        """Arena slots that saves hold; stores hold `_stores.num_blocks` besides."""
        self._last_id = 0
        self._jobs: dict[int, Job] = {}
        self._batches: dict[int, Batch] = {}
        self._discards: dict[int, Discard] = {}
        self._outbox: list[bytes] = []
        self._results: list[JobResult] = []

    # Lookups

    def start_lookup(self, keys: Sequence[BlockKey]) -> int:
        """Asks where these blocks are; returns the ticket for `poll_lookup`."""
        ticket = self._new_id()
        self._lookups.start(ticket, keys)
        return ticket

    def poll_lookup(self, ticket: int) -> list[BlockStatus] | None:
        """A status per key, in order, which ends the ticket; None while the shared tier is being asked."""
        return self._lookups.poll(ticket)

    def cancel_lookup(self, ticket: int) -> None:
        """Ends the ticket without an answer."""
        self._lookups.cancel(ticket)

    def holds(self, key: BlockKey) -> bool:
        """Whether the arenas hold this block or are just being given it."""
        return self._index.slots.find(key) is not None

    def has(self, tier: str, key: BlockKey) -> bool:
        """Whether all ranks can read this block in that tier: in the arenas, which are `HOST`, or in a local one."""
        return self._index.has(tier, key)

    def watch(self) -> ContentChanges:
        """From now on, notes what comes to these tiers and goes from them. What is there already is not noted."""
        if self._index.content_changes is None:
            self._index.content_changes = ContentChanges([HOST, *self._local_tiers])
        return self._index.content_changes

    def worth_saving(self, key: BlockKey) -> bool:
        """Whether a block that the device is about to lose should be copied before."""
        if self._settings.host_policy is WritePolicy.WRITE_THROUGH_SELECTIVE and not self._uses.is_enough(key):
            return False
        return not self.holds(key)

    @property
    def room_for_saves(self) -> int:
        """Blocks that can be saved now; more would be dropped. Grows when the tiers below have taken some."""
        return max(0, self._max_saving - self._num_saving - self._stores.num_blocks)

    # Jobs

    def save_full(self, blocks: Sequence[Block]) -> int | None:
        """Blocks became full on the device, which is a use of each. Starts a save of those that the policy wants now.

        As `start_save`, which the blocks' slots must obey if there is a job.
        """
        self._note_uses(key for key, _ in blocks)
        policy = self._settings.host_policy
        if policy is WritePolicy.WRITE_BACK:
            return None
        selective = policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        wanted = [block for block in blocks if self._uses.is_enough(block[0])] if selective else blocks
        return self.start_save(wanted) if wanted else None

    def note_hits(self, blocks: Sequence[Block]) -> int | None:
        """Blocks on the device were hit, which is a use of each. Starts a save of those that have become worth it."""
        enough = self._note_uses(key for key, _ in blocks)
        if self._settings.host_policy is not WritePolicy.WRITE_THROUGH_SELECTIVE:
            return None
        worth = [block for block in blocks if block[0] in enough]
        return self.start_save(worth) if worth else None

    def start_load(self, blocks: Sequence[Block]) -> int:
        """Brings blocks to device slots, which are the movers' until the job's result.

        Each block comes from the nearest tier that has it; one that is nowhere fails.
        """
        job = self._new_job("load", blocks)
        job.queued.extend(range(len(blocks)))
        self._issue_loads(job)
        self._finish_if_over(job)
        return job.job_id

    def start_save(self, blocks: Sequence[Block]) -> int | None:
        """Copies blocks from device slots to the arenas and from there to the tiers below, as their policies say.

        The slots must not change until the job's result. None when there is nothing to copy: all are
        there already, or the queue is full and they were dropped (`kvtier_saves_dropped_total`).
        """
        job = self._new_job("save", blocks)
        entries: dict[int, Entry[BlockKey]] = {}
        for index, (key, _) in enumerate(blocks):
            if self._index.slots.find(key) is not None:
                job.ok.add(index)
                continue
            entry = self._index.prepare(key) if self.room_for_saves > 0 else None
            if entry is None:
                self._metrics.saves_dropped.inc()
                continue
            self._num_saving += 1
            entries[index] = entry
        for indexes in chunks(list(entries), self._settings.batch_of(HOST)):
            batch = self._open_batch(job, indexes, "", [entries[i] for i in indexes])
            self._send(SaveBatch(batch.batch_id, self._owed.at_once, *batch.columns()))
        if not entries:
            del self._jobs[job.job_id]
            return None
        return job.job_id

    def cancel(self, job_id: int) -> None:
        """Asks for the end of a load; its result follows as soon as the movers keep off its slots.

        Saves end by themselves and are not cancelled.
        """
        job = self._jobs.get(job_id)
        if job is not None and job.kind == "load":
            job.queued.clear()
            job.deadline = float("inf")
            for batch_id in job.open:
                self._send(CancelBatch(batch_id))
            self._finish_if_over(job)

    def poll(self) -> list[JobResult]:
        """Jobs that ended since the last poll. Also gives waiting loads what has become free, and ends late ones."""
        now = self._clock()
        for job in [j for j in self._jobs.values() if j.kind == "load"]:
            if now > job.deadline:
                self._metrics.deadlines_missed.labels("load").inc()
                self.cancel(job.job_id)
            elif job.queued:
                self._issue_loads(job)
                self._finish_if_over(job)
        self._issue_stores()
        results, self._results = self._results, []
        return results

    def settle(self) -> bool:
        """Before a stop: starts writing down what is still owed. True as long as there is a point in waiting."""
        self._owed.settle_all()
        self._issue_stores()
        return self._stores.num_blocks > 0 or (self._num_saving > 0 and self._owed.due > 0)

    def give_up(self) -> None:
        """Counts what is owed as lost: `settle` had no more time."""
        for tier, num_blocks in self._owed.unpaid():
            self._metrics.evicted_unwritten.labels(tier).inc(num_blocks)
        self._owed.clear()

    def reset(self) -> None:
        """Forgets every block in the arenas and in the tiers that belong to the movers.

        They miss at once; the tiers are emptied in the background, and until then nothing is found in them.
        Blocks on the move are forgotten as soon as they have arrived. The shared tier keeps what it has.
        """
        moving = self._stores.moving()
        for batch in self._batches.values():
            batch.forget = True
            moving.update(entry.key for entry in batch.entries)
        self._index.note(HOST, self._index.slots.discard_ready())
        self._owed.clear()
        for tier in self._local_tiers:
            batch_id = self._new_id()
            self._discards[batch_id] = Discard(tier, set(self._ranks))
            self._index.begin_forgetting(tier)
            self._send(DiscardBatch(batch_id, tier, list(self._index.in_local_tier(tier) | moving)))

    # The movers

    @property
    def is_telling(self) -> bool:
        """Whether there is something for the movers, or a tier that is being emptied."""
        return bool(self._outbox or self._discards)

    def take_messages(self) -> list[bytes]:
        """What every mover has to be given, in order."""
        messages, self._outbox = self._outbox, []
        return messages

    def deliver(self, rank: int, messages: Iterable[bytes]) -> None:
        """Takes in the answers of one mover, in order."""
        for data in messages:
            message = decode(data)
            if isinstance(message, Inventory):
                self._index.apply(rank, message)
                continue
            if isinstance(message, Discarded):
                self._end_discard(message.batch_id, rank)
                continue
            if message.batch_id in self._stores:
                self._stores.end(message.batch_id, rank)
                continue
            batch = self._batches.get(message.batch_id)
            if batch is None:  # a bug in a mover must not end the engine
                _log.error("rank %d answers for batch %d, which nobody asked for", rank, message.batch_id)
                continue
            if isinstance(message, Cancelled):
                batch.cancelled = True
            elif not isinstance(message, Stored):
                batch.ok = [before and bool(now) for before, now in zip(batch.ok, message.ok, strict=True)]
            if isinstance(message, Loaded):
                batch.seconds = max(batch.seconds, message.seconds)
            if isinstance(message, (Loaded, Copied, Cancelled)):
                self._leave_device(batch, rank)
            if isinstance(message, (Loaded, Stored)):
                self._leave_arena(batch, rank)

    def check(self) -> None:
        """Verifies the bookkeeping; raises `InvariantError`."""
        self._index.slots.check()
        saving = sum(len(b.indexes) for b in self._batches.values() if b.job.kind == "save")
        if saving != self._num_saving:
            raise InvariantError(f"{saving} slots are being saved, counted {self._num_saving}")
        if not self._batches and self._index.slots.num_ready != len(self._index.slots):
            raise InvariantError("no batch is under way, but a slot is being written")

    def close(self) -> None:
        """Stops the lookup threads."""
        self._lookups.close()

    # Inside

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _new_job(self, kind: Literal["load", "save"], blocks: Sequence[Block]) -> Job:
        deadline = self._clock() + self._settings.load_deadline_s
        job = Job(self._new_id(), kind, list(blocks), deadline, deque(), [""] * len(blocks))
        self._jobs[job.job_id] = job
        return job

    def _send(self, message: ToMover) -> None:
        self._outbox.append(encode(message))

    def _note_uses(self, keys: Iterable[BlockKey]) -> set[BlockKey]:
        """Counts a use of each; returns those that had their n-th just now. Free where no policy looks at uses."""
        if not self._owed.by_uses and self._settings.host_policy is not WritePolicy.WRITE_THROUGH_SELECTIVE:
            return set()
        enough = {key for key in keys if self._uses.note(key)}
        for key in enough:
            if self.holds(key):
                self._owed.used_enough(key)
        return enough

    def _end_discard(self, batch_id: int, rank: int) -> None:
        discard = self._discards[batch_id]
        discard.open.discard(rank)
        if not discard.open:
            del self._discards[batch_id]
            self._index.end_forgetting(discard.tier)

    def _issue_stores(self) -> None:
        """Leaves half of what may be saving to copies from the device, which cannot wait for a slow tier."""
        self._stores.issue(min(self.room_for_saves, max(1, self._max_saving // 2) - self._stores.num_blocks))

    def _note_evicted(self, key: BlockKey) -> None:
        for tier in self._owed.evicted(key):
            self._metrics.evicted_unwritten.labels(tier).inc()

    def _issue_loads(self, job: Job) -> None:
        """Gives the movers as many of the job's blocks as have a slot. The rest waits for the next poll."""
        waiting: list[int] = []
        by_source: dict[str, dict[int, Entry[BlockKey]]] = {HOST: {}}
        elsewhere: list[tuple[int, str]] = []
        for index in job.queued:
            where = self._index.locate(job.blocks[index][0])
            if where is PENDING:
                waiting.append(index)  # another job is bringing it: then it comes from the arena
            elif where.tier == HOST:
                pinned = self._index.slots.pin(job.blocks[index][0])
                assert pinned is not None
                by_source[HOST][index] = pinned
            elif where.tier or self._shared_tier:
                elsewhere.append((index, where.tier or self._shared_tier))
        # Only now, so that none of these takes the slot of a block that this very job wants.
        for index, source in elsewhere:
            entry = self._index.prepare(job.blocks[index][0])
            if entry is None:
                waiting.append(index)
            else:
                by_source.setdefault(source, {})[index] = entry
        job.queued = deque(sorted(waiting))
        for source, entries in by_source.items():
            for indexes in chunks(list(entries), self._settings.batch_of(source)):
                batch = self._open_batch(job, indexes, source, [entries[i] for i in indexes])
                self._send(LoadBatch(batch.batch_id, source, *batch.columns()))

    def _open_batch(self, job: Job, indexes: list[int], source: str, entries: list[Entry[BlockKey]]) -> Batch:
        ok = [True] * len(indexes)
        batch = Batch(self._new_id(), job, indexes, source, entries, ok, set(self._ranks), set(self._ranks))
        if job.kind == "load":
            self.speeds.fetch_begins(source, len(indexes))
        self._batches[batch.batch_id] = batch
        job.open.add(batch.batch_id)
        return batch

    def _leave_device(self, batch: Batch, rank: int) -> None:
        """A rank keeps off the batch's device slots from now on; the last one ends the batch for its job."""
        batch.on_device.discard(rank)
        job = batch.job
        if batch.on_device or batch.batch_id not in job.open:
            return
        job.open.remove(batch.batch_id)
        if job.kind == "load":
            num_there = 0 if batch.cancelled else sum(batch.ok)
            self.speeds.fetch_ends(batch.source, len(batch.indexes), num_there=num_there, seconds=batch.seconds)
        for index, entry, good in zip(batch.indexes, batch.entries, batch.ok, strict=True):
            if good and not batch.cancelled:
                job.ok.add(index)
                job.tiers[index] = batch.source
            if good and job.kind == "save":
                # Readable from now on; pinned, because the tiers below are written from this slot.
                self._index.slots.commit(entry, nbytes=0)
                self._index.slots.pin(entry.key)
                self._keep(entry, batch)
        self._finish_if_over(job)

    def _leave_arena(self, batch: Batch, rank: int) -> None:
        """A rank keeps off the batch's arena slots from now on; the last one ends the batch."""
        batch.on_arena.discard(rank)
        if batch.on_arena:
            return
        del self._batches[batch.batch_id]
        pinned = batch.job.kind == "save" or batch.source == HOST
        for entry, good in zip(batch.entries, batch.ok, strict=True):
            if pinned and (good or batch.source == HOST):
                self._index.slots.unpin(entry)
            elif good:
                self._index.slots.commit(entry, nbytes=0)
                self._keep(entry, batch)
            else:
                self._index.slots.abort(entry)
        if batch.job.kind == "save":
            self._num_saving -= len(batch.indexes)

    def _keep(self, entry: Entry[BlockKey], batch: Batch) -> None:
        """A block that has just become readable in the arenas."""
        self._index.note(HOST, [entry.key])
        if batch.forget:
            self._index.slots.discard(entry.key)
        else:
            self._owed.entered(entry.key, batch.source)

    def _finish_if_over(self, job: Job) -> None:
        if job.open or job.queued:
            return
        del self._jobs[job.job_id]
        failed = frozenset(range(len(job.blocks))) - job.ok
        # From the last block to the first, so that tails are evicted before heads.
        for key, _ in reversed(job.blocks):
            self._index.slots.touch(key)
        if job.kind == "load":
            self._note_uses(job.blocks[index][0] for index in job.ok)
            for tier in job.tiers:
                self._metrics.blocks_loaded.labels(tier or "none").inc()
            if failed:
                self._metrics.degraded_fetches.inc()
        self._results.append(JobResult(job.job_id, job.kind, failed, tuple(job.tiers)))
