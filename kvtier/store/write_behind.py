"""Blocks on their way from memory to one tier below, in the background, as its write policy says."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier.identity.keys import StoreKey, TenantId, tenant_of
from kvtier.store.metrics import StoreMetrics
from kvtier.store.tier_calls import TierCalls
from kvtier.store.write_queue import WriteQueue
from kvtier.store.write_workers import WriteParts, WriteWorkers, in_one_part
from kvtier.tiers.base import Status
from kvtier.tiers.common.admission_gate import AdmissionGate
from kvtier.tiers.common.write_policy import UseCounts, WritePolicy
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.host.pins import ReadPin
from kvtier.tiers.host.tier import HostTier

_MAX_COUNTED_USES = 1 << 18
"""Blocks whose uses are remembered, about 200 bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBehindSettings:
    """How blocks get to one tier below memory."""

    policy: WritePolicy = WritePolicy.WRITE_THROUGH
    keeps_acknowledged: bool = False
    """An acknowledged block waits in memory until this tier has it, and writers are refused when too much waits. For
    a local disk under `write_through`. Off for a tier that nobody may have to wait for, such as a server elsewhere."""
    selective_uses: int = 2
    """The use at which `write_through_selective` writes a block. Writing it to the pool is the first."""
    queue_bytes: int
    """Payload bytes that a tenant which is alone may have pinned, queued and being written. A tier that keeps what is
    acknowledged is behind from there on; any other gets no more than that. All tenants together have twice as much at
    most, and each may have as much as is free (`FairRoom`). Too small: writers are refused, or bursts kept in memory
    only. Too large: memory has room for little else while the tier catches up."""
    parts: WriteParts = in_one_part
    """When the blocks of a batch are written, and how many in a call of the tier. Called by the writers' threads."""


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What a tier got at the end, and what it did not."""

    tier: str
    num_written: int
    """Blocks that waited when the drain began and are there now."""
    num_abandoned: int
    """Blocks for which there was no time left; those being written at this moment may still get there."""
    num_memory_only: int
    """The number of blocks in memory alone, because the tier refused them or the queue was full when they came."""


class WriteBehind:
    """The blocks that memory has and the tier below gets, and the threads that write them.

    What is queued is pinned: it cannot be evicted, so it is readable until the tier has it. A tier that
    `keeps_acknowledged` gets every acknowledged block into its queue: whoever admits writes asks `is_behind` first. A
    write that was under way by then may still exceed `queue_bytes`; its room in memory was taken already. Any other
    tier's queue ends at `queue_bytes`, and gives its room back when memory needs it (`make_room`). Tenants share that
    room and are served in turns, so a tenant waits for what it has queued itself and for a turn of each other one, and
    never for all that another one has queued (docs/adr/0031-fair-scheduling.md).

    A block that finds no place in the queue, or that the tier does not take, stays in memory only. It is tried again
    while the writers are idle (in one batch of eight if they never are), after the tier has taken others, every few
    seconds, and at the end. So a tier that takes nothing, such as a broken disk, holds nobody up. A block that memory
    gives up before the tier has it is counted as `evicted_unwritten`: nobody waits.

    Where the tier has an admission, a block that is to get on its way is offered first. One that is declined stays in
    memory only and is owed to nobody; it is offered again at each further use. Any thread may call anything.
    """

    def __init__(
        self,
        memory: HostTier,
        tier: TierCalls,
        metrics: StoreMetrics,
        settings: WriteBehindSettings,
        gate: AdmissionGate | None = None,
    ) -> None:
        """`start` starts the writers. Memory and tier stay the caller's.

        :param gate: the tier's admission; None: every block is let in.
        """
        self._gate = gate
        self._memory = memory
        self._tier = tier
        self._metrics = metrics
        self._settings = settings
        self._selective = settings.policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        self._write_back = settings.policy is WritePolicy.WRITE_BACK
        self._waiting = WriteQueue(settings.queue_bytes, metrics.write_down_queue_bytes.labels(tier.name).set)
        self._uses: UseCounts[StoreKey] = UseCounts(settings.selective_uses, _MAX_COUNTED_USES)
        """Guarded by the queue's lock."""
        self._num_before_drain = 0
        """Guarded by the queue's lock."""
        self._writers = WriteWorkers(memory, tier, metrics, self._waiting, settings.parts)

    def start(self) -> None:
        """Starts the writers. Once."""
        self._writers.start()

    @property
    def alive(self) -> bool:
        """Whether all writers run."""
        return self._writers.alive

    def keeps_evicted(self, tenant: TenantId) -> bool:
        """Whether the tier has every acknowledged block of the tenant before memory gives it up. Takes no lock."""
        return self._settings.keeps_acknowledged and self._gate is None and self._waiting.takes_of(tenant)

    def is_behind(self, tenant: TenantId) -> bool:
        """Whether no new block of this tenant may be taken: too much of it waits for a tier that keeps what is
        acknowledged. False for any other tier, and for one that would not take the block."""
        if not self._settings.keeps_acknowledged:
            return False
        with self._waiting.changed:
            return self._waiting.takes_of(tenant) and self._waiting.is_full_for(tenant)

    def entered(self, keys: Sequence[StoreKey], *, acknowledged: bool, run_blocks: int) -> list[bool]:
        """Notes that memory got these blocks, not from this tier, which is a use of them. Never waits.

        Returns False for a block that memory has lost before it could be pinned: it must not be acknowledged.

        :param acknowledged: they come from a writer, not from another tier.
        :param run_blocks: how many blocks of one request come together.
        """
        if self._write_back:
            self._owe(keys, run_blocks)
            return [True] * len(keys)
        if self._selective:
            with self._waiting.changed:
                for key in keys:
                    self._uses.note(key)
                due = [key for key in keys if self._uses.is_enough(key)]
            self._queue(due, run_blocks)
            return [True] * len(keys)
        promised = acknowledged and self._settings.keeps_acknowledged
        held = self._queue(keys, run_blocks, promised=promised)
        return held if promised else [True] * len(keys)

    def admitted(self) -> None:
        """Notes that memory got a block from this tier, by which others came nearer to eviction. Never waits."""
        if self._write_back:
            with self._waiting.changed:
                self._waiting.entered = True
                self._waiting.changed.notify()

    def used(self, keys: Collection[StoreKey], run_blocks: int) -> None:
        """Notes that these blocks were read from memory, so many of one request together. Never waits."""
        if self._gate is None and not self._selective:
            return  # before the lock, which whoever reads would wait for
        due: list[StoreKey] = []
        with self._waiting.changed:
            if self._gate is not None:
                due = self._waiting.declined(keys)
            if self._selective:
                due += [key for key in keys if self._uses.note(key)]
        if due:
            (self._owe if self._write_back else self._queue)(due, run_blocks)

    def make_room(self) -> bool:
        """Lets go of what the tenant with most waiting has queued for a tier that keeps nothing, as memory would else
        refuse a write. Returns whether there was any."""
        if self._settings.keeps_acknowledged:
            return False
        with self._waiting.changed:
            leases = self._waiting.unpin()
        self._memory.release(leases)
        self._count("dropped", len(leases))
        return bool(leases)

    @contextmanager
    def without(self, keys: Iterable[StoreKey]) -> Iterator[None]:
        """Keeps these blocks from getting on their way. Waits for those being written at this moment."""
        wanted = set(keys)
        with self._waiting.changed:
            leases = self._waiting.bar(wanted)
            self._waiting.changed.notify_all()
            self._waiting.changed.wait_for(lambda: not self._waiting.is_writing(wanted))
            self._waiting.forget(wanted)
        self._memory.release(leases)
        self._count("cancelled", len(leases))
        try:
            yield
        finally:
            with self._waiting.changed:
                self._waiting.unbar(wanted)

    def note_removed(self, keys: Sequence[StoreKey]) -> None:
        """Counts those blocks that memory gave up although the tier should have had them.

        Blocks that memory has again by now are not lost.
        """
        with self._waiting.changed:
            self._forget_gone(self._waiting.declined(keys))
            num_lost = self._forget_gone(self._waiting.unpinned(keys))
        self._metrics.evicted_unwritten.labels(self._tier.name).inc(num_lost)

    def begin_drain(self) -> None:
        """Starts to write all that is owed, and once more what was put off. What enters memory now is not queued."""
        with self._waiting.changed:
            if not self._waiting.closing:
                self._waiting.closing = True
                self._waiting.expect_success()
                self._num_before_drain = self._waiting.num_written
                self._waiting.changed.notify_all()

    def drain(self, deadline_s: float) -> DrainReport:
        """Waits up to `deadline_s` seconds for the tier to get what it is owed, then abandons the rest."""
        self.begin_drain()
        waiting = self._waiting
        with waiting.changed:
            waiting.changed.wait_for(lambda: not (waiting.num_writing or waiting.more_to_write), timeout=deadline_s)
            given_up = waiting.num_waiting
            report = DrainReport(
                self._tier.name,
                num_written=waiting.num_written - self._num_before_drain,
                num_abandoned=given_up + waiting.num_writing,
                num_memory_only=waiting.num_memory_only,
            )
            leases = waiting.give_up()
            waiting.changed.notify_all()
        self._memory.release(leases)
        self._count("abandoned", given_up)
        return report

    def close(self) -> None:
        """Abandons what is owed and waits for the writes under way. Idempotent."""
        self.drain(0.0)
        self._writers.join()

    def _queue(self, keys: Sequence[StoreKey], run_blocks: int, *, promised: bool = False) -> list[bool]:
        """Pins and queues what is let in and there is room for; all of it when it is `promised`. Says what memory
        still has."""
        leases = self._memory.acquire(keys)
        declined = self._declined(keys, leases, run_blocks)
        unused: list[ReadPin] = []
        queued: list[StoreKey] = []
        num_dropped = 0
        with self._waiting.changed:
            for key, lease in zip(keys, leases, strict=True):
                if lease is None:
                    continue
                if key in declined:
                    unused.append(lease)
                    self._note_declined(key)
                    continue
                if self._has_place(key, len(lease.view), promised):
                    self._waiting.push(key, lease)
                    queued.append(key)
                    continue
                unused.append(lease)
                if not (self._waiting.is_on_its_way(key) or self._waiting.is_barred(key)):
                    (self._waiting.leave_out if self._waiting.closing else self._waiting.put_off)(key)
                    num_dropped += 1
            self._forget_gone(declined)
            self._waiting.changed.notify(len(queued))
        self._memory.release(unused)
        self._count("dropped", num_dropped)
        self._count("declined", len(declined))
        self._metrics.evicted_unwritten.labels(self._tier.name).inc(leases.count(None))
        self._take_back_discarded(queued)
        return [lease is not None for lease in leases]

    def _has_place(self, key: StoreKey, nbytes: int, promised: bool) -> bool:
        """Whether the queue takes this block. While the tier takes nothing of its tenant's, what was promised counts no
        more than the rest. Caller holds the queue's lock."""
        if self._waiting.closing or self._waiting.is_on_its_way(key) or self._waiting.is_barred(key):
            return False
        promised = promised and self._waiting.takes_of(tenant_of(key))
        return promised or self._waiting.has_room(key, nbytes)

    def _take_back_discarded(self, queued: Sequence[StoreKey]) -> None:
        """Takes from the tier what was discarded between its lease and the queue."""
        statuses = self._memory.lookup(queued) if queued else []
        if gone := [key for key, status in zip(queued, statuses, strict=True) if status is Status.MISS]:
            with self.without(gone):
                self._tier.discard(gone)

    def _declined(self, keys: Sequence[StoreKey], leases: Sequence[ReadPin | None], run_blocks: int) -> set[StoreKey]:
        """Offers the tier those of the blocks that it lacks. Returns those that it is not to get."""
        if self._gate is None:
            return set()
        blocks = [(key, len(lease.view)) for key, lease in zip(keys, leases, strict=True) if lease is not None]
        if isinstance(self._tier.tier, DiskTier):  # knows at once; to ask another one would take a round trip
            there = self._tier.lookup([key for key, _ in blocks])
            blocks = [block for block, status in zip(blocks, there, strict=True) if status is Status.MISS]
        answers = self._gate.admits(blocks, run_blocks)
        return {key for (key, _), admitted in zip(blocks, answers, strict=True) if not admitted}

    def _note_declined(self, key: StoreKey) -> None:
        """Has the block offered again at its next use. Caller holds the queue's lock."""
        if not (self._waiting.is_on_its_way(key) or self._waiting.is_barred(key)):
            self._waiting.decline(key)

    def _forget_gone(self, keys: Collection[StoreKey]) -> int:
        """Forgets those of these blocks that memory has no more; says how many. Caller holds the queue's lock."""
        tracked = list(keys)
        there = self._memory.lookup(tracked) if tracked else []
        gone = [key for key, status in zip(tracked, there, strict=True) if status is Status.MISS]
        self._waiting.forget(gone)
        return len(gone)

    def _owe(self, keys: Sequence[StoreKey], run_blocks: int) -> None:
        """Notes that the tier is owed these blocks, if they are let in."""
        declined: set[StoreKey] = set()
        if self._gate is not None:
            leases = self._memory.acquire(keys, touch=False)
            declined = self._declined(keys, leases, run_blocks)
            self._memory.release(leases)
            self._count("declined", len(declined))
        with self._waiting.changed:
            for key, status in zip(keys, self._memory.lookup(keys), strict=True):
                if status is Status.MISS or self._waiting.is_barred(key):
                    continue
                if key in declined:
                    self._note_declined(key)
                else:
                    self._note_owed(key)

    def _note_owed(self, key: StoreKey) -> None:
        """Notes that the tier is owed this block. Caller holds the queue's lock."""
        if self._waiting.closing:
            self._waiting.leave_out(key)
            return
        self._waiting.owe(key)
        self._waiting.entered = True
        self._waiting.changed.notify()

    def _count(self, result: str, amount: int = 1) -> None:
        if amount:
            self._metrics.written_down_blocks.labels(self._tier.name, result).inc(amount)
