"""All tiers below the pool's memory as one: where its blocks go down to, and come up from."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from kvtier.clock import MONOTONIC
from kvtier.errors import KvtierError
from kvtier.events import TierState
from kvtier.identity.keys import StoreKey, TenantId
from kvtier.metrics import Metrics
from kvtier.policies.admission import Admission
from kvtier.store.cold_reads import Block, ColdReads
from kvtier.store.metrics import StoreMetrics
from kvtier.store.private_buffers import PrivateBuffers
from kvtier.store.tier_calls import TierCalls
from kvtier.store.write_behind import DrainReport, WriteBehind, WriteBehindSettings
from kvtier.system.tracing import tracing
from kvtier.tiers.base import Status, Tier
from kvtier.tiers.common.admission_gate import AdmissionGate
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.host.tier import HostTier

_PRIVATE_SHARE = 16
"""One tenant may take this part of memory beside it, for blocks that memory has no room for, and all together twice as
much. A larger number makes misses while memory waits for a slow disk; a smaller one takes memory that nobody has
configured."""
_LEAST_PRIVATE_BYTES = 8 << 20
"""What a tenant may take however small memory is: all blocks of one piece of a large answer are held at a time."""

_REMOVAL_S = 2.0
"""How long a purge waits for files that another thread removes. Then they cannot be removed, or the disk hangs."""
_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class LowerTier:
    """A tier below memory, and how blocks get there."""

    tier: Tier
    settings: WriteBehindSettings
    admission: Admission | None = None
    """Which blocks get there at all; None: all of them. No tier keeps a block that does not, though acknowledged."""
    set_caps: Callable[[Mapping[TenantId, int]], None] | None = None
    """Says how many bytes tenants may have there, all others being without a cap; None: such caps do not exist."""
    purge: Callable[[TenantId, float], int] | None = None
    """Removes everything of a tenant until a deadline (monotonic), and says how many values it was; raises
    `UnavailableError` where that could not be done. None: the tier is a disk, which has its own, or cannot."""
    problem: Callable[[], str | None] | None = None
    """Says what it does less well than it should. None: the tier is a disk, which has its own, or cannot."""


class LowerTiers:
    """The tiers below memory, from the fastest to the slowest, or none at all. Any thread that holds no lock of
    memory's."""

    def __init__(
        self, memory: HostTier, lower: Sequence[LowerTier], metrics: StoreMetrics, tier_metrics: Metrics
    ) -> None:
        """`start` starts the writers. Memory stays the caller's, the tiers are owned from now on."""
        self._calls = calls = [TierCalls(each.tier, tier_metrics) for each in lower]
        self.tiers = [each.tier for each in lower]
        self._set_caps = [each.set_caps for each in lower if each.set_caps is not None]
        self._purges = {each.tier.name: each.purge for each in lower if each.purge is not None}
        self._problems = [each.problem for each in lower if each.problem is not None]
        self._ways = [
            WriteBehind(memory, tier, metrics, each.settings, _gate_of(each, metrics))
            for tier, each in zip(calls, lower, strict=True)
        ]
        self._memory_bytes = memory.usage().capacity_bytes
        self._buffers = PrivateBuffers(max(_LEAST_PRIVATE_BYTES, self._memory_bytes // _PRIVATE_SHARE))
        self._cold_reads = [
            ColdReads(
                memory,
                tier,
                self._buffers,
                on_admitted=partial(self._note_admitted, source=tier.tier),
                on_unread=metrics.unread_blocks.labels(tier.name).inc,
            )
            for tier in calls
        ]
        for tier in self.tiers:
            metrics.prepare_tier(tier.name)

    def start(self) -> None:
        """Starts the background writers. Once, before the first write."""
        for way in self._ways:
            way.start()

    def set_caps(self, caps: Mapping[TenantId, int]) -> None:
        """The most bytes that these tenants may have in tiers elsewhere; all others have no cap there."""
        for set_caps in self._set_caps:
            set_caps(caps)

    def purge(self, tenant: TenantId, deadline: float) -> tuple[dict[str, int], list[str]]:
        """Removes all blocks of a tenant from these tiers. Returns how many each tier had (of a Redis, values), and in
        words what could not be done. Raises nothing. What memory has, or is about to get, may come down again."""
        removed, problems = dict[str, int](), list[str]()
        for tier in self.tiers:
            if isinstance(tier, DiskTier):
                removed[tier.name] = tier.purge(tenant)
                if left := _left_of(tier, tenant):
                    problem = tier.problem()
                    why = f"; it is {tier.state.value}: {problem}" if problem else ""
                    problems.append(f"{tier.name}: {left}{why}")
            elif (purge := self._purges.get(tier.name)) is not None:
                try:
                    removed[tier.name] = purge(tenant, deadline)
                except KvtierError as error:
                    problems.append(f"{tier.name}: {error}")
        return removed, problems

    def keep_evicted(self, tenant: TenantId) -> bool:
        """Whether one of them has every acknowledged block of the tenant before memory gives it up, and keeps it for as
        long as memory would. Takes no lock."""
        return any(
            way.keeps_evicted(tenant) and isinstance(tier, DiskTier) and tier.most_bytes >= self._memory_bytes
            for tier, way in zip(self.tiers, self._ways, strict=True)
        )

    def problem(self) -> str | None:
        """Says what keeps blocks from getting here, None when nothing does."""
        gone = [tier.name for tier, way in zip(self.tiers, self._ways, strict=True) if not way.alive]
        return f"a thread that writes to {gone[0]} is gone" if gone else None

    def degraded(self) -> list[str]:
        """Says which tiers do less than they should because of their media or servers. Blocks are kept without them."""
        disks = [tier for tier in self.tiers if isinstance(tier, DiskTier)]
        of_disks = [f"{disk.name} is {disk.state.value}: {problem}" for disk in disks if (problem := disk.problem())]
        return of_disks + [said for problem in self._problems if (said := problem())]

    def look_up(self, keys: Sequence[StoreKey], statuses: list[Status], *, counts: bool) -> dict[str, int]:
        """Makes a HIT of each of memory's `statuses` that is none and whose key is in a tier here. Returns how many
        those are, by tier.

        :param counts: whether the blocks count as looked up, in each tier that is asked about them.
        """
        found: dict[str, int] = {}
        for tier in self._calls:
            # Pending blocks count, too: a block on its way up can still be read from the tier that it comes from.
            missing = [i for i, status in enumerate(statuses) if status is not Status.HIT]
            if not missing:
                break
            with tracing.span(f"lookup {tier.name}", tier=tier.name, blocks=len(missing)) as span:
                answers = tier.lookup([keys[i] for i in missing], counts=counts)
                if span is not None:
                    span.attributes["hits"] = answers.count(Status.HIT)
            for i, status in zip(missing, answers, strict=True):
                statuses[i] = status if status is Status.HIT else statuses[i]
            found[tier.name] = answers.count(Status.HIT)
        return found

    def fetch(self, keys: Sequence[StoreKey], payload_bytes: int, blocks: dict[StoreKey, Block]) -> None:
        """Adds to `blocks` what is missing there and is here; see `ColdReads.fetch`."""
        for reads in self._cold_reads:
            if cold := [key for key in dict.fromkeys(keys) if key not in blocks]:
                with tracing.span(f"read {reads.tier_name}", tier=reads.tier_name, blocks=len(cold)) as span:
                    num_before = len(blocks)
                    reads.fetch(cold, payload_bytes, blocks)
                    if span is not None:
                        span.attributes["hits"] = len(blocks) - num_before

    def private_bytes(self, tenant: TenantId) -> int:
        """What reads of the tenant have beside memory at the moment."""
        return self._buffers.taken_by(tenant)

    def is_behind(self, tenant: TenantId) -> bool:
        """Whether no new block of this tenant may be taken: see `WriteBehind.is_behind`."""
        return any(way.is_behind(tenant) for way in self._ways)

    def make_room(self) -> bool:
        """Lets go of some blocks that wait, as memory would else refuse a write. Returns whether there were any."""
        made_room = [way.make_room() for way in self._ways]
        return any(made_room)

    def used(self, keys: Collection[StoreKey], run_blocks: int = 0) -> None:
        """Notes that these blocks were read from memory. Never waits.

        :param run_blocks: how many blocks the request names, if it is more than these.
        """
        for way in self._ways:
            way.used(keys, max(run_blocks, len(keys)))

    def entered(self, keys: Sequence[StoreKey], source: Tier | None = None, run_blocks: int = 0) -> list[bool]:
        """Notes that memory got blocks from a client, or from the tier `source`. Says which may be acknowledged.

        :param run_blocks: as in `used`.
        """
        kept = [True] * len(keys)
        for tier, way in zip(self.tiers, self._ways, strict=True):
            if tier is source:
                way.admitted()
            else:
                held = way.entered(keys, acknowledged=source is None, run_blocks=max(run_blocks, len(keys)))
                kept = [before and now for before, now in zip(kept, held, strict=True)]
        return kept

    def removed(self, keys: Sequence[StoreKey]) -> None:
        """Notes that memory gave up these blocks."""
        for way in self._ways:
            way.note_removed(keys)

    @contextmanager
    def without(self, keys: Sequence[StoreKey]) -> Iterator[None]:
        """Keeps these blocks out of all tiers here while the caller discards them in memory. May wait for a write.

        From below to above, so that no copy on its way down or up outlives a discard: the queues first, then the tiers,
        then memory, which also refuses what a cold read is about to commit.
        """
        with ExitStack() as stack:
            for way in self._ways:
                stack.enter_context(way.without(keys))
            for tier in reversed(self._calls):
                tier.discard(keys)
            yield

    def drain(self, grace_s: float) -> list[DrainReport]:
        """Gives the tiers up to `grace_s` seconds to take what they are owed; what comes now is not queued."""
        deadline = MONOTONIC() + grace_s
        for way in self._ways:
            way.begin_drain()
        return [way.drain(max(0.0, deadline - MONOTONIC())) for way in self._ways]

    def hurry(self, timeout_s: float) -> None:
        """Makes sure, before a stop, that an operation that hangs holds it up no longer than `timeout_s`."""
        for tier in self.tiers:
            if isinstance(tier, DiskTier):
                tier.hurry(timeout_s)

    def check(self) -> None:
        """Verifies the tiers' bookkeeping; raises `InvariantError`."""
        for tier in self.tiers:
            tier.check()

    def close(self) -> None:
        """Abandons what is queued, waits for the writes under way and closes the tiers. Idempotent."""
        for way in self._ways:
            way.close()
        for tier in self.tiers:
            tier.close()

    def _note_admitted(self, keys: Sequence[StoreKey], source: Tier) -> None:
        self.entered(keys, source)


def _left_of(disk: DiskTier, tenant: TenantId) -> str | None:
    """What a tenant still has of a disk that is purged, in words. Waits a moment for files that are being removed."""
    if disk.problem() and disk.state is TierState.OFF:
        return "nobody knows what is left"
    end_s = MONOTONIC() + _REMOVAL_S
    while (left := disk.usage_of(tenant)).used_bytes and not left.num_blocks and MONOTONIC() < end_s:
        time.sleep(_PAUSE_S)
    if left.num_blocks:
        return f"{left.num_blocks} blocks are there"
    if not left.used_bytes:
        return None
    return f"files of {left.used_bytes} bytes cannot be removed, as the log says, and are tried again in half a minute"


def _gate_of(lower: LowerTier, metrics: StoreMetrics) -> AdmissionGate | None:
    if lower.admission is None:
        return None
    gate = partial(AdmissionGate, lower.admission, tier=lower.tier.name, declined=metrics.declined_blocks)
    if isinstance(disk := lower.tier, DiskTier):
        return gate(tenant_bytes=lambda tenant: disk.usage_of(tenant).used_bytes)
    return gate()
