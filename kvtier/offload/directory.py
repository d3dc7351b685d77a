"""The directory: the half of the hierarchy that has the tokens. One per scheduler.

It knows what is in the arenas (one index for all ranks, since slot ids are the same in all of them),
mirrors what the movers report of their own tiers, and asks the shared tier in the background. It
decides; the movers carry out. Messages for them gather in `take_messages`, their answers come through
`deliver`. Nothing here blocks, and everything is for the scheduler thread alone.

What is under way is in modules of its own: `lookups`, `loads`, `saves` and `stores`. Write policies decide
about saves and stores: `host_policy` between the device and the arenas, `pending_writes` below them.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import InvariantError
from kvtier.identity.keys import BlockKey, NamespaceId, TenantId, tenant_of
from kvtier.offload.changes import ContentChanges
from kvtier.offload.host_policy import HostPolicy
from kvtier.offload.index import BlockIndex
from kvtier.offload.jobs import Block, DirectorySettings, JobResult
from kvtier.offload.loads import Loads
from kvtier.offload.lookups import Lookups, SharedLookups
from kvtier.offload.message_queue import MessageQueue
from kvtier.offload.messages import (
    HOST,
    Cancelled,
    Copied,
    DiscardBatch,
    Discarded,
    Inventory,
    Loaded,
    Queued,
    Stored,
    ToDirectory,
    ToMover,
)
from kvtier.offload.metrics import HierarchyMetrics
from kvtier.offload.pending_writes import PendingWrites
from kvtier.offload.planner import BlockStatus
from kvtier.offload.previous import PreviousKeys, PreviousNames
from kvtier.offload.saves import Saves
from kvtier.offload.stores import Stores
from kvtier.policies.admission import Admission
from kvtier.tiers.base import Tier
from kvtier.tiers.common.admission_gate import AdmissionGate
from kvtier.tiers.common.write_policy import UseCounts, WritePolicy
from kvtier.traces.recorder import TraceRecorder
from kvtier.traces.records import Kind

_log = logging.getLogger(__name__)
_MAX_COUNTED_USES = 1 << 18
"""Blocks whose uses are remembered, about 150 bytes each."""


@dataclass(slots=True)
class _Discard:
    """A tier that is being emptied. Over when `open` is empty."""

    tier: str
    open: set[int]
    """Ranks that have not answered."""


class Directory:
    """The directory that the module's docstring describes."""

    def __init__(  # noqa: PLR0913 - the parts that it is put together from
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
        recorder: TraceRecorder | None = None,
    ) -> None:
        """
        :param namespaces: one per rank, in rank order; a block is a hit when all of them have it.
        :param num_slots: slots of each mover's arena.
        :param local_tiers: tiers below the arena that belong to each mover alone, in order of preference.
        :param shared: the tier that ranks and engines share; stays the caller's.
        :param on_answer: called from another thread when a lookup is worth polling.
        :param recorder: told of lookups and of blocks that became full; started, and closed with the directory. None:
            nothing is recorded.
        """
        settings = settings or DirectorySettings()
        self._metrics, self._local_tiers, self._recorder = metrics, list(local_tiers), recorder
        self._index = BlockIndex(num_slots, len(namespaces), local_tiers, self._note_evicted, settings.make_policy)
        self._movers = MessageQueue(len(namespaces))
        asking: SharedLookups | None = None
        if shared is not None:
            asking = SharedLookups(shared, namespaces, max_asking=settings.max_lookups, on_answer=on_answer)
        self._previous = PreviousNames()
        self._lookups = Lookups(
            self._index, asking, self._previous, metrics, deadline_s=settings.lookup_deadline_s, clock=clock
        )
        uses: UseCounts[BlockKey] = UseCounts(settings.selective_uses, _MAX_COUNTED_USES)
        below = [*local_tiers, *([shared.name] if shared is not None else [])]
        policies = {tier: settings.tier_policies.get(tier, WritePolicy.WRITE_THROUGH) for tier in below}
        gates = {tier: self._gate(tier, admission, settings) for tier, admission in settings.tier_admissions.items()}
        self._owed = PendingWrites(policies, uses, gates, settings.block_bytes)
        self._policy = HostPolicy(settings.host_policy, uses, self._index, self._owed)
        self._loads = Loads(
            self._index,
            self._owed,
            settings,
            previous=self._previous,
            shared_tier=shared.name if shared is not None else "",
            movers=self._movers,
            policy=self._policy,
            metrics=metrics,
            clock=clock,
            on_end=self._note_end,
        )
        self._saves = Saves(
            self._index, self._owed, settings, movers=self._movers, metrics=metrics, on_end=self._note_end
        )
        self._stores = Stores(self._index, self._owed, settings, movers=self._movers)
        self._max_saving = max(1, int(num_slots * settings.saving_fraction))
        """Arena slots that saves and stores may hold together."""
        self._discards: dict[int, _Discard] = {}
        """The discards under way, by batch."""
        self._results: list[JobResult] = []
        """The results since the last poll."""
        self.speeds = self._loads.speeds
        """The speeds of fetching and of computing blocks; `Speeds.note_computed` tells it of the latter."""

    def start_lookup(self, keys: Sequence[BlockKey], previous: Sequence[PreviousKeys] = ()) -> int:
        """Asks where these blocks are; returns the ticket for `poll_lookup`.

        :param previous: their keys under previous secrets, the newest first, for what is missing under the present one:
            loads bring what is found by them, under the keys given here.
        """
        self._record(Kind.LOOKUP, keys)
        ticket = self._movers.new_id()
        self._lookups.start(ticket, keys, previous)
        return ticket

    def poll_lookup(self, ticket: int) -> list[BlockStatus] | None:
        """Returns a status per key, in order, which ends the ticket; None while the shared tier is being asked."""
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

    @property
    def num_in_host(self) -> int:
        """The number of blocks that the arenas hold. Any thread."""
        return self._index.slots.num_ready

    def watch(self) -> ContentChanges:
        """Notes from now on what comes to these tiers and goes from them. What is there already is not noted."""
        if self._index.content_changes is None:
            self._index.content_changes = ContentChanges([HOST, *self._local_tiers])
        return self._index.content_changes

    def worth_saving(self, key: BlockKey) -> bool:
        """Whether a block that the device is about to lose should be copied before."""
        return self._policy.of_evicted(key)

    @property
    def room_for_saves(self) -> int:
        """Blocks that can be saved now; more would be dropped. Grows when the tiers below have taken some."""
        return max(0, self._max_saving - self._saves.num_blocks - self._stores.num_blocks)

    def save_full(self, blocks: Sequence[Block]) -> int | None:
        """Blocks became full on the device, which is a use of each. Starts a save of those that the policy wants now.

        Returns the job of the save, to which all that `start_save` says of device slots applies; None if there is none.
        """
        self._record(Kind.WRITE, [key for key, _ in blocks])
        wanted = self._policy.of_full(blocks)
        return self.start_save(wanted) if wanted else None

    def note_hits(self, blocks: Sequence[Block]) -> int | None:
        """Blocks on the device were hit, which is a use of each. Starts a save of those that have become worth it."""
        worth = self._policy.of_hit(blocks)
        return self.start_save(worth) if worth else None

    def start_load(self, blocks: Sequence[Block], *, by_layer: bool = False) -> int:
        """Brings blocks to device slots, which are the movers' until the job's result.

        Each block comes from the nearest tier that has it; one that is nowhere fails.

        :param by_layer: the job may end when its copies are queued, layer after layer, if all blocks are in host
            memory. The engine then waits on the device for each layer (`LayeredLoads.wait`).
        """
        return self._loads.start(blocks, by_layer=by_layer)

    def start_save(self, blocks: Sequence[Block]) -> int | None:
        """Copies blocks from device slots to the arenas and from there to the tiers below, as their policies say.

        The slots must not change until the job's result. None when there is nothing to copy: all are
        there already, or the queue is full and they were dropped (`kvtier_saves_dropped_total`).
        """
        return self._saves.start(blocks, self.room_for_saves)

    def cancel(self, job_id: int) -> None:
        """Asks for the end of a load; its result follows as soon as the movers keep off its slots.

        Saves end by themselves and are not cancelled.
        """
        self._loads.cancel(job_id)

    def poll(self) -> list[JobResult]:
        """Returns jobs that ended since the last poll. Gives waiting loads what has become free, and ends late ones."""
        self._loads.advance()
        self._issue_stores()
        results, self._results = self._results, []
        return results

    def settle(self) -> bool:
        """Starts writing down what is still owed, before a stop. Returns whether there is a point in waiting."""
        self._owed.settle_all()
        self._issue_stores()
        # A save holds room that what is due waits for, and its own blocks are owed only once they are copied.
        waits_for_saves = self._owed.due > 0 or self._owed.owes_after_saves
        return self._stores.num_blocks > 0 or (self._saves.num_blocks > 0 and waits_for_saves)

    def give_up(self) -> None:
        """Counts what is owed as lost, and what would be once it is copied: `settle` had no more time."""
        self._owed.entered(self._saves.copying(), source="")
        for tier, num_blocks in self._owed.unpaid():
            self._metrics.evicted_unwritten.labels(tier).inc(num_blocks)
        self._owed.clear()

    def reset(self) -> None:
        """Forgets every block in the arenas and in the tiers that belong to the movers.

        They miss at once; the tiers are emptied in the background, and until then nothing is found in them.
        Blocks on the move are forgotten as soon as they have arrived. The shared tier keeps what it has.
        """
        moving = self._stores.moving() | self._loads.forget() | self._saves.forget()
        self._index.note(HOST, self._index.slots.discard_ready())
        self._owed.clear()
        self._previous.clear()
        for tier in self._local_tiers:
            batch_id = self._movers.new_id()
            self._discards[batch_id] = _Discard(tier, set(self._movers.ranks))
            self._index.begin_forgetting(tier)
            self._movers.send(DiscardBatch(batch_id, tier, list(self._index.in_local_tier(tier) | moving)))

    @property
    def is_moving(self) -> bool:
        """Whether movers may still work at a load or a save, even if its job is over."""
        return bool(self._loads.batches or self._saves.batches)

    @property
    def is_telling(self) -> bool:
        """Whether there are messages for the movers, or a tier is being emptied."""
        return bool(self._movers or self._discards)

    def take_messages(self) -> list[ToMover]:
        """Removes and returns the messages that every mover has to be given, in order."""
        return self._movers.take()

    def deliver(self, rank: int, messages: Iterable[ToDirectory]) -> None:
        """Takes in the answers of one mover, in order."""
        for message in messages:
            if isinstance(message, Inventory):
                self._index.apply(rank, message)
            elif isinstance(message, Discarded) and message.batch_id in self._discards:
                self._end_discard(message.batch_id, rank)
            elif isinstance(message, Loaded) and message.batch_id in self._loads.batches:
                self._loads.loaded(rank, message)
            elif isinstance(message, Queued) and message.batch_id in self._loads.batches:
                self._loads.queued(rank, message.batch_id)
            elif isinstance(message, Cancelled) and message.batch_id in self._loads.batches:
                self._loads.cancelled(rank, message.batch_id)
            elif isinstance(message, Copied) and message.batch_id in self._saves.batches:
                self._saves.copied(rank, message)
            elif isinstance(message, Stored) and message.batch_id in self._saves.batches:
                self._saves.stored(rank, message.batch_id)
                self._note_refused(message)
            elif isinstance(message, Stored) and message.batch_id in self._stores.batches:
                self._stores.stored(rank, message.batch_id)
                self._note_refused(message)
            else:  # a bug in a mover must not end the engine
                _log.error("rank %d answers for batch %d, which nobody asked for", rank, message.batch_id)

    def check(self) -> None:
        """Verifies the bookkeeping; raises `InvariantError`."""
        self._index.slots.check()
        self._saves.check()
        if not self.is_moving and self._index.slots.num_ready != len(self._index.slots):
            raise InvariantError("no batch is under way, but a slot is being written")

    def close(self) -> None:
        """Stops the lookup threads, and ends the recording."""
        self._lookups.close()
        if self._recorder is not None:
            self._recorder.close()

    def _gate(self, tier: str, admission: Admission, settings: DirectorySettings) -> AdmissionGate:
        """Makes the admission of a local tier."""

        def tenant_bytes(tenant: TenantId) -> int:
            return settings.block_bytes * self._index.num_blocks_of(tenant, tier)

        declined = self._metrics.declined_blocks
        return AdmissionGate(admission, tier=tier, declined=declined, tenant_bytes=tenant_bytes)

    def _record(self, kind: Kind, keys: Sequence[BlockKey]) -> None:
        """Tells the recorder, if there is one: a call for each run of blocks of one tenant."""
        if self._recorder is not None:
            for tenant, run in groupby(keys, key=tenant_of):
                self._recorder.record(kind, tenant, list(run))

    def _note_end(self, result: JobResult) -> None:
        if result.kind == "save":
            self._metrics.saved_blocks.inc(len(result.tiers) - len(result.failed) - len(result.found))
        self._results.append(result)

    def _note_evicted(self, key: BlockKey) -> None:
        self._metrics.host_evicted.inc()
        for tier in self._owed.evicted(key):
            self._metrics.evicted_unwritten.labels(tier).inc()

    def _note_refused(self, message: Stored) -> None:
        for tier, keys in message.refused.items():
            self._owed.refused(tier, [key for key in map(BlockKey, keys) if self._index.slots.find(key) is not None])

    def _issue_stores(self) -> None:
        """Leaves half of what may be saving to copies from the device, which cannot wait for a slow tier."""
        self._stores.issue(min(self.room_for_saves, max(1, self._max_saving // 2) - self._stores.num_blocks))

    def _end_discard(self, batch_id: int, rank: int) -> None:
        discard = self._discards[batch_id]
        discard.open.discard(rank)
        if not discard.open:
            del self._discards[batch_id]
            self._index.end_forgetting(discard.tier)
