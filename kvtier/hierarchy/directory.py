"""The directory: the half of the hierarchy that has the tokens. One per scheduler.

It knows what is in the arenas (one index for all ranks, since slot ids are the same in all of them),
mirrors what the movers report of their own tiers, and asks the shared tier in the background. It
decides; the movers carry out. Messages for them gather in `take_messages`, their answers come through
`deliver`. Nothing here blocks, and everything is for the scheduler thread alone.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import InvariantError
from kvtier.hierarchy.index import BlockIndex
from kvtier.hierarchy.jobs import Batch, Block, DirectorySettings, Job, JobResult, chunks
from kvtier.hierarchy.lookups import SharedLookups
from kvtier.hierarchy.messages import (
    HOST,
    CancelBatch,
    Cancelled,
    Copied,
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
from kvtier.hierarchy.planner import MISSING, PENDING, BlockStatus
from kvtier.keys import ChainHash, NamespaceId, TenantId
from kvtier.tiers.base import Status, Tier
from kvtier.tiers.slot_index import Entry


@dataclass(slots=True)
class _Lookup:
    statuses: list[BlockStatus]
    asked: list[int]
    future: Future[list[Status]] | None
    deadline: float


class Directory:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        tenant: TenantId,
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
        self._ranks = frozenset(range(len(namespaces)))
        self._shared = (
            SharedLookups(
                shared,
                tenant,
                namespaces,
                max_asking=self._settings.max_lookups,
                num_threads=self._settings.lookup_threads,
                on_answer=on_answer,
            )
            if shared is not None
            else None
        )
        self._index = BlockIndex(num_slots, len(namespaces), local_tiers)
        self._max_saving = max(1, int(num_slots * self._settings.saving_fraction))
        self._num_saving = 0
        self._last_id = 0
        self._lookups: dict[int, _Lookup] = {}
        self._jobs: dict[int, Job] = {}
        self._batches: dict[int, Batch] = {}
        self._outbox: list[bytes] = []
        self._results: list[JobResult] = []

    # Lookups

    def start_lookup(self, hashes: Sequence[ChainHash]) -> int:
        """Asks where these blocks are; returns the ticket for `poll_lookup`."""
        lookup = _Lookup(
            [self._index.locate(h) for h in hashes], [], None, self._clock() + self._settings.lookup_deadline_s
        )
        if self._shared is not None:
            lookup.asked = [i for i, status in enumerate(lookup.statuses) if status is MISSING]
            if lookup.asked:
                lookup.future = self._shared.ask([hashes[i] for i in lookup.asked])
                if lookup.future is None:
                    self._metrics.lookups_skipped.inc()
        ticket = self._new_id()
        self._lookups[ticket] = lookup
        return ticket

    def poll_lookup(self, ticket: int) -> list[BlockStatus] | None:
        """A status per hash, in order, which ends the ticket; None while the shared tier is being asked."""
        lookup = self._lookups[ticket]
        if lookup.future is not None and self._shared is not None:
            if lookup.future.done():
                for index, status in zip(lookup.asked, lookup.future.result(), strict=True):
                    lookup.statuses[index] = _found(status, self._shared.name)
            elif self._clock() < lookup.deadline:
                return None
            else:
                self._metrics.deadlines_missed.labels("lookup").inc()
        del self._lookups[ticket]
        return lookup.statuses

    def cancel_lookup(self, ticket: int) -> None:
        """Ends the ticket without an answer."""
        del self._lookups[ticket]

    def holds(self, chain_hash: ChainHash) -> bool:
        """Whether the arenas hold this block or are just being given it."""
        return self._index.slots.find(chain_hash) is not None

    # Jobs

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
        """Copies blocks from device slots to the arenas and from there to every tier below.

        The slots must not change until the job's result. None when there is nothing to copy: all are
        there already, or the queue is full and they were dropped (`kvtier_saves_dropped_total`).
        """
        job = self._new_job("save", blocks)
        entries: dict[int, Entry[ChainHash]] = {}
        for index, (chain_hash, _) in enumerate(blocks):
            if self._index.slots.find(chain_hash) is not None:
                job.ok.add(index)
                continue
            entry = self._index.prepare(chain_hash) if self._num_saving < self._max_saving else None
            if entry is None:
                self._metrics.saves_dropped.inc()
                continue
            self._num_saving += 1
            entries[index] = entry
        for indexes in chunks(list(entries), self._settings.batch_blocks):
            batch = self._open_batch(job, indexes, "", [entries[i] for i in indexes])
            self._send(SaveBatch(batch.batch_id, *batch.columns()))
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
        results, self._results = self._results, []
        return results

    # The movers

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
            batch = self._batches[message.batch_id]
            if isinstance(message, Cancelled):
                batch.cancelled = True
            elif not isinstance(message, Stored):
                batch.ok = [before and bool(now) for before, now in zip(batch.ok, message.ok, strict=True)]
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
        if self._shared is not None:
            self._shared.close()

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

    def _issue_loads(self, job: Job) -> None:
        """Gives the movers as many of the job's blocks as have a slot. The rest waits for the next poll."""
        by_source: dict[str, list[tuple[int, Entry[ChainHash]]]] = {}
        waiting: deque[int] = deque()
        for index in job.queued:
            chain_hash = job.blocks[index][0]
            where = self._index.locate(chain_hash)
            source = where.tier or (self._shared.name if self._shared is not None else "")
            if where is PENDING:
                waiting.append(index)  # another job is bringing it: then it comes from the arena
            elif source == HOST:
                pinned = self._index.slots.pin(chain_hash)
                assert pinned is not None
                by_source.setdefault(HOST, []).append((index, pinned))
            elif source:
                entry = self._index.prepare(chain_hash)
                if entry is None:
                    waiting.append(index)
                else:
                    by_source.setdefault(source, []).append((index, entry))
        job.queued = waiting
        for source, found in by_source.items():
            entries = dict(found)
            for indexes in chunks(list(entries), self._settings.batch_blocks):
                batch = self._open_batch(job, indexes, source, [entries[i] for i in indexes])
                self._send(LoadBatch(batch.batch_id, source, *batch.columns()))

    def _open_batch(self, job: Job, indexes: list[int], source: str, entries: list[Entry[ChainHash]]) -> Batch:
        ok = [True] * len(indexes)
        batch = Batch(self._new_id(), job, indexes, source, entries, ok, set(self._ranks), set(self._ranks))
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
        for index, entry, good in zip(batch.indexes, batch.entries, batch.ok, strict=True):
            if good and not batch.cancelled:
                job.ok.add(index)
                job.tiers[index] = batch.source
            if good and job.kind == "save":
                # Readable from now on; pinned, because the tiers below are written from this slot.
                self._index.slots.commit(entry, nbytes=0)
                self._index.slots.pin(entry.key)
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
            else:
                self._index.slots.abort(entry)
        if batch.job.kind == "save":
            self._num_saving -= len(batch.indexes)

    def _finish_if_over(self, job: Job) -> None:
        if job.open or job.queued:
            return
        del self._jobs[job.job_id]
        failed = frozenset(range(len(job.blocks))) - job.ok
        # From the last block to the first, so that tails are evicted before heads.
        for chain_hash, _ in reversed(job.blocks):
            self._index.slots.touch(chain_hash)
        if job.kind == "load":
            for tier in job.tiers:
                self._metrics.blocks_loaded.labels(tier or "none").inc()
            if failed:
                self._metrics.degraded_fetches.inc()
        self._results.append(JobResult(job.job_id, job.kind, failed, tuple(job.tiers)))


def _found(status: Status, tier: str) -> BlockStatus:
    if status is Status.HIT:
        return BlockStatus(Status.HIT, tier)
    return PENDING if status is Status.PENDING else MISSING
