"""All verbs of the cache pool, whatever the transport. Adapters decode, call and encode."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvtier.clock import MONOTONIC, Clock
from kvtier.codec.stored_form import Header, verify
from kvtier.errors import CorruptBlockError
from kvtier.events import Event, EventKind
from kvtier.identity.keys import StoreKey, TenantId, tenant_of
from kvtier.memory.slab_layout import SharedSlab
from kvtier.metrics import Metrics
from kvtier.policies.base import EvictionPolicy
from kvtier.policies.lru import LRU
from kvtier.protocol.retention import PinStatus
from kvtier.store.cold_reads import Block, block_of
from kvtier.store.event_hub import EventHub, Subscription
from kvtier.store.lower_tiers import LowerTier, LowerTiers
from kvtier.store.metrics import StoreMetrics
from kvtier.store.purging import PurgeReport, purge
from kvtier.store.retention import Retention, RetentionLimits
from kvtier.store.tenant_counts import TenantCounts
from kvtier.store.tier_share import TierShare
from kvtier.store.write_behind import DrainReport
from kvtier.system.tracing import tracing
from kvtier.tiers.base import Status, Usage, WriteStatus
from kvtier.tiers.common.metered import TierCounts
from kvtier.tiers.common.shares import Share
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.host.pins import PinnedSlots
from kvtier.tiers.host.slab import OWN_PROCESS
from kvtier.tiers.host.slots import WriteSlot
from kvtier.tiers.host.tier import BLOCK_OVERHEAD_BYTES, HostTier
from kvtier.traces.recorder import TraceRecorder
from kvtier.traces.records import Kind


class Store:
    """Blocks in memory, and below it in as many tiers as there are: on disk, in Redis.

    A store key names its tenant, so code that builds keys from the authenticated tenant and from nothing
    else can reach that tenant's blocks only. A write is acknowledged when memory has the block, and goes
    down in the background as each tier's policy says. A read finds it in memory, or in the first tier
    that has it and then in memory; tiers that did not have it are offered it as if it were new.

    What is acknowledged is kept: below memory is a tier that `keeps_acknowledged`, then the block stays until that
    tier has it, and writers hear THROTTLED or FULL while that tier is behind. Else memory forgets blocks when it needs
    their room, each with an event, but none before `min_residency_s`: until then writers hear FULL. Tiers that fail,
    and those that nobody waits for, refuse no write: then it is as if there were only memory. See
    docs/adr/0010-acknowledged-means-kept.md.

    What a tenant pins stays in memory for a time, within bounds: see `Retention`.

    Any thread. Nothing is locked while a transport waits for its peer; what it holds meanwhile is bounded:
    the write slots of one piece that is coming in, the leases of one answer that is going out.
    """

    def __init__(  # noqa: PLR0913 - the parts that it is put together from
        self,
        *,
        memory_bytes: int,
        below: Sequence[LowerTier],
        hub: EventHub,
        metrics: StoreMetrics,
        min_residency_s: float = 0.0,
        shared: bool = False,
        pins: RetentionLimits | None = None,
        tier_metrics: Metrics | None = None,
        recorder: TraceRecorder | None = None,
        make_policy: Callable[[], EvictionPolicy[StoreKey]] = LRU,
        clock: Clock = MONOTONIC,
    ) -> None:
        """
        :param memory_bytes: capacity of the memory tier, bookkeeping included, taken as it is used.
        :param below: from the fastest to the slowest; owned from now on. Their events go to `hub` already.
        :param hub: receives the memory tier's events, and is closed with the core.
        :param min_residency_s: blocks stay in memory so long at least, unless a tier keeps what is acknowledged.
        :param shared: the memory is such that clients on this host can map it.
        :param pins: what tenants may pin in memory; None: nothing.
        :param tier_metrics: those of the tiers, for memory.
        :param recorder: told of lookups, reads and writes; the caller's. None: nothing is recorded.
        :param make_policy: makes the order in which a tenant's blocks are evicted from memory.
        :param clock: by which pins end.
        """
        self._hub = hub
        self._metrics, tier_metrics = metrics, tier_metrics or Metrics()
        self.recorder = recorder
        """May be changed at any time, by one thread; calls under way may still tell the one before."""
        self._num_mapped_reads = metrics.read_blocks.labels("memory")
        self._memory = HostTier(
            memory_bytes,
            name="memory",
            min_residency_s=min_residency_s,
            is_kept_elsewhere=lambda tenant: self._below.keep_evicted(tenant),
            shared=shared,
            block_overhead_bytes=BLOCK_OVERHEAD_BYTES,
            make_policy=make_policy,
            on_event=self._on_memory_event,
            metrics=tier_metrics,
        )
        self._memory_counts = TierCounts(self._memory.name, tier_metrics, has_lookups=False)
        tier_metrics.begin(self._memory.name)
        self.pins = Retention(self._memory, pins or RetentionLimits(), metrics, clock=clock)
        self._below = LowerTiers(self._memory, below, metrics, tier_metrics)
        for tier in self._local_tiers():
            tier_metrics.levels.watch_usage(tier.name, tier.usage)
        self.counts = TenantCounts(self._memory.num_evicted_of)

    def start(self) -> None:
        """Starts the background writers and the thread that ends pins. Once, before the first write."""
        self.pins.start()
        self._below.start()

    def lookup(self, keys: Sequence[StoreKey], *, counts: bool = True) -> list[Status]:
        """Returns a status per key, in order, which is not a use of the blocks.

        :param counts: whether it counts for the hit rate.
        """
        self._record(Kind.LOOKUP, keys)
        statuses, found = self._look_up(keys, counts=counts)
        if counts:
            self._metrics.count_looked_up(found, len(keys))
            if absent := statuses.count(Status.MISS):
                self.counts.count(tenant_of(keys[0]), num_misses=absent)
        return statuses

    @contextmanager
    def read(self, keys: Sequence[StoreKey], payload_bytes: int, run_blocks: int = 0) -> Iterator[list[Block | None]]:
        """Blocks in the order of `keys`, None for a miss, valid inside the `with` only: copy or send, then leave.

        :param payload_bytes: a block of another length is a miss.
        :param run_blocks: how many blocks the request names of which `keys` are a part, for `min-run`.
        """
        self._record(Kind.READ, keys)
        blocks: dict[StoreKey, Block] = {}
        try:
            with tracing.span("read memory", tier="memory", blocks=len(keys)) as span:
                for key, lease in zip(keys, self._memory.acquire(keys), strict=True):
                    if lease is not None and key in blocks:
                        self._memory.release([lease])
                    elif lease is not None:
                        blocks[key] = block_of(key, lease, "memory")
                if span is not None:
                    span.attributes["hits"] = len(blocks)
            self._memory_counts.note_read(len(keys), len(blocks), sum(len(b.payload) for b in blocks.values()))
            self._below.used(blocks, run_blocks)
            self._below.fetch(keys, payload_bytes, blocks)
            found = [blocks.get(key) for key in keys]
            answer = [b if b is not None and len(b.payload) == payload_bytes else None for b in found]
            self._count_read(keys, answer)
            yield answer
        finally:
            self._memory.release(block.lease for block in blocks.values())
            for block in blocks.values():
                if block.buffer is not None:
                    block.buffer.release()

    def touch(self, keys: Sequence[StoreKey]) -> None:
        """Notes a use of one request's blocks in memory, so that its tail is evicted before its head."""
        self._memory.release(self._memory.acquire(keys))

    def begin_write(
        self, tenant: TenantId, key: StoreKey, nbytes: int, writer: int = OWN_PROCESS
    ) -> WriteSlot | WriteStatus:
        """Finds room for a payload. A slot ends in `commit_all`, `commit_write` or `abort_write`.

        FAILED when the key names another tenant than the one who sends it, and for a payload of no bytes: no reader
        asks for one, and under its key it would keep out the block that readers ask for.

        :param writer: what will fill the room: this process, or a client that maps the memory, in one of its own slabs.
        """
        outcome: WriteSlot | WriteStatus = WriteStatus.FAILED
        if key.startswith(tenant) and nbytes:
            outcome = self._prepare(key, nbytes, writer)
        if isinstance(outcome, WriteStatus):
            self._count_unwritten(tenant, outcome)
        return outcome

    def commit_write(self, slot: WriteSlot, header: Header) -> WriteStatus:
        """Verifies the payload in `slot` by its header, then commits it as `commit_all` does. FAILED when it is bad."""
        try:
            verify(header, slot.key, slot.view)
        except CorruptBlockError:
            return self.abort_write(slot)
        return self.commit_all([slot], [header.checksum])[0]

    def commit_all(
        self, slots: Sequence[WriteSlot], checksums: Sequence[int], run_blocks: int = 0
    ) -> list[WriteStatus]:
        """Makes blocks readable, last to first, so that a batch's head is what was used last: STORED.

        Payloads are not verified here: they were as they came, or a client has written them to shared memory, and every
        reader verifies them again. A block is THROTTLED if it was evicted again in the same moment, before a tier that
        should keep it could have it.

        :param run_blocks: as in `read`.
        """
        self._memory.commit_all(dict(zip(slots, checksums, strict=True)))
        kept = self._below.entered([slot.key for slot in slots], run_blocks=run_blocks)
        self._record(Kind.WRITE, [slot.key for slot in slots], len(slots[0].view) if slots else 0)
        num_bytes = sum(len(slot.view) for slot, is_kept in zip(slots, kept, strict=True) if is_kept)
        self._count_written(WriteStatus.STORED, num_bytes, sum(kept))
        if not all(kept):
            self._count_unwritten(tenant_of(slots[0].key), WriteStatus.THROTTLED, kept.count(False))
        return [WriteStatus.STORED if is_kept else WriteStatus.THROTTLED for is_kept in kept]

    def abort_write(self, slot: WriteSlot) -> WriteStatus:
        """Gives back the slot of a block that did not arrive. Returns FAILED."""
        self._memory.abort(slot)
        self._count_written(WriteStatus.FAILED, 0)
        return WriteStatus.FAILED

    def abandon_writes(self, slots: Sequence[WriteSlot]) -> None:
        """Gives up slots that a client has not committed in time, and may still write to: see `HostTier.abandon`."""
        self._memory.abandon(slots)
        self._count_written(WriteStatus.FAILED, 0, len(slots))

    def set_shares(self, memory: Mapping[TenantId, Share], disk: Mapping[TenantId, Share]) -> None:
        """What tenants are owed of memory and of the disk, if there is one, from now on; all others have equal shares.

        Raises `InvalidInputError`, and leaves that tier's shares as they were, where more is guaranteed than there is.
        """
        self._memory.set_shares(memory)
        for tier in self._below.tiers:
            if isinstance(tier, DiskTier):
                tier.set_shares(disk)

    def set_remote_caps(self, caps: Mapping[TenantId, int]) -> None:
        """The most bytes that these tenants may have in a Redis, from now on; all others have no cap there."""
        self._below.set_caps(caps)

    def owed_bytes(self, tenant: TenantId) -> int:
        """Memory that the tenant can have, whatever those want who have memory now."""
        return self._memory.owed_bytes(tenant)

    def acquire_places(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> PinnedSlots:
        """Holds blocks in memory for a client that maps it; those that are only below are a MISS here, which does not
        count: the client asks for them again by `read`."""
        self._record(Kind.READ, keys)
        held = self._memory.acquire_places(keys, sizes)
        if self._below.tiers:
            self._below.used([key for key, status in zip(keys, held.statuses, strict=True) if status == Status.HIT])
        self._num_mapped_reads.inc(held.num_held)
        held_bytes = sum(size for size, status in zip(sizes, held.statuses, strict=True) if status == Status.HIT)
        self._memory_counts.note_read(held.num_held, held.num_held, held_bytes)
        if keys:
            self.counts.count(tenant_of(keys[0]), num_hits=held.num_held)
        return held

    def release_places(self, held: PinnedSlots) -> None:
        """Lets go of what `acquire_places` holds. Idempotent."""
        self._memory.release_places(held)

    def open_slab(self, tenant: TenantId, number: int, writer: int) -> SharedSlab | None:
        """A descriptor of a slab of the tenant's memory, for `writer`; the caller closes it. None: no such slab."""
        return self._memory.open_slab(tenant, number, writer)

    def retire_writer(self, writer: int) -> None:
        """Notes that this writer writes to its slabs in memory no more; their blocks can be read until an eviction."""
        self._memory.retire_writer(writer)

    @property
    def max_pin_s(self) -> float:
        """The longest time of a pin; 0: there are none."""
        return self.pins.max_s

    def pin(self, tenant: TenantId, keys: Sequence[StoreKey], ttl_s: float) -> list[PinStatus]:
        """Keeps blocks in memory for `ttl_s` seconds, at most `max_pin_s`; a status per key.

        A block that is pinned again stays until the later of both ends. Only blocks in memory are pinned, because a key
        does not say how large its block is. Never waits for a tier below. See `Retention` for the bounds.
        """
        return self.pins.pin(tenant, keys, ttl_s)

    def unpin(self, keys: Sequence[StoreKey]) -> int:
        """Ends pins of the tenant, whichever client made them; returns how many there were. The blocks stay until
        evicted."""
        return self.pins.unpin(keys)

    def discard(self, keys: Sequence[StoreKey]) -> int:
        """Forgets blocks everywhere; returns how many were there. May wait for a write under way."""
        distinct = list(dict.fromkeys(keys))
        num_there = sum(status is Status.HIT for status in self._look_up(distinct, counts=False)[0])
        with self._below.without(distinct):
            self._memory_counts.note_discard(self._memory.discard(distinct))
        return num_there

    def purge(self, tenant: TenantId, seconds: float) -> PurgeReport:
        """Removes everything of a tenant, here and in all tiers, in about so many seconds (`kvtier.store.purging`)."""
        return purge(self._memory, self._below, tenant, MONOTONIC() + seconds)

    def usage(self, tenant: TenantId) -> list[TierShare]:
        """What the tenant has in each tier that counts by tenant, from the fastest to the slowest. Redis does not."""
        return [TierShare.of(tier, tenant) for tier in self._local_tiers()]

    def local_usages(self) -> dict[str, Callable[[], Usage]]:
        """Returns the function that asks a tier on this machine how full it is, for each of them, by name."""
        return {tier.name: tier.usage for tier in self._local_tiers()}

    def subscribe(self, tenant: TenantId) -> Subscription:
        """The tenant's events from now on; the caller closes the subscription."""
        return self._hub.subscribe(tenant)

    def problem(self) -> str | None:
        """What keeps the pool from doing its work, None when nothing does."""
        if not self.pins.alive:
            return "the thread that ends pins is gone"
        return self._below.problem()

    def degraded(self) -> list[str]:
        """What works less well than it should, although the pool does its work. Never waits."""
        return self._below.degraded()

    def end_event_streams(self) -> None:
        """Ends all subscriptions, and takes no new ones."""
        self._hub.close()

    def drain(self, grace_s: float) -> list[DrainReport]:
        """Gives the lower tiers up to `grace_s` seconds to take what they are owed; what comes now is not queued."""
        return self._below.drain(grace_s)

    def hurry(self, timeout_s: float) -> None:
        """Called before a stop: from now on a disk counts as hung when an operation takes longer than `timeout_s`."""
        self._below.hurry(timeout_s)

    def check(self) -> None:
        """Verifies the bookkeeping of all tiers and of pins; raises `InvariantError`."""
        self.pins.check()
        self._memory.check()
        self._below.check()

    def close(self) -> None:
        """Abandons what is queued and closes the tiers. Idempotent."""
        self._hub.close()
        self._below.close()
        self._memory.close()
        self.pins.close()

    def _look_up(self, keys: Sequence[StoreKey], *, counts: bool) -> tuple[list[Status], dict[str, int]]:
        """Returns a status per key, and how many each tier has of those that none above it has."""
        with tracing.span("lookup memory", tier="memory", blocks=len(keys)) as span:
            statuses = self._memory.lookup(keys)
            if span is not None:
                span.attributes["hits"] = statuses.count(Status.HIT)
        found = {self._memory.name: statuses.count(Status.HIT)}
        return statuses, found | self._below.look_up(keys, statuses, counts=counts)

    def _record(self, kind: Kind, keys: Sequence[StoreKey], nbytes: int = 0) -> None:
        """Tells the recorder, if there is one, of blocks of one tenant."""
        recorder = self.recorder
        if recorder is not None and keys:
            recorder.record(kind, tenant_of(keys[0]), keys, nbytes)

    def _on_memory_event(self, event: Event) -> None:
        self._hub.publish(event)
        if event.kind is EventKind.REMOVED:
            self.pins.forget(event.keys)
            self._below.removed(event.keys)

    def _local_tiers(self) -> list[HostTier | DiskTier]:
        """The tiers on this machine (memory and disk), which count by tenant."""
        return [tier for tier in (self._memory, *self._below.tiers) if isinstance(tier, (HostTier, DiskTier))]

    def _prepare(self, key: StoreKey, nbytes: int, writer: int) -> WriteSlot | WriteStatus:
        """Finds room in memory for a block that may be acknowledged when it is there."""
        if self._below.is_behind(tenant_of(key)) and self._memory.lookup([key]) == [Status.MISS]:
            return WriteStatus.THROTTLED
        outcome = self._memory.prepare(key, nbytes, writer=writer)
        while outcome is WriteStatus.FULL and self._below.make_room():
            outcome = self._memory.prepare(key, nbytes, writer=writer)
        return outcome

    def _count_unwritten(self, tenant: TenantId, status: WriteStatus, num_blocks: int = 1) -> None:
        """Counts blocks of one tenant that got this answer and are not stored by this write."""
        self._count_written(status, 0, num_blocks)
        if status is WriteStatus.FULL:
            self.counts.count(tenant, num_full=num_blocks)
        elif status is WriteStatus.THROTTLED:
            self.counts.count(tenant, num_throttled=num_blocks)

    def _count_written(self, status: WriteStatus, nbytes: int, num_blocks: int = 1) -> None:
        if num_blocks:
            self._metrics.count_written(status, nbytes, num_blocks)
            self._memory_counts.note_write(status, num_blocks, nbytes)

    def _count_read(self, keys: Sequence[StoreKey], blocks: Sequence[Block | None]) -> None:
        if keys:
            num_misses = blocks.count(None)
            self.counts.count(tenant_of(keys[0]), num_hits=len(blocks) - num_misses, num_misses=num_misses)
            sources = (block.source if block is not None else "miss" for block in blocks)
            for block in blocks:
                if block is not None and block.buffer is not None:
                    self._metrics.unadmitted_blocks.labels(block.source).inc()
            self._metrics.count_read(sources, sum(len(block.payload) for block in blocks if block is not None))
