"""One small engine's worth of hierarchy over real tiers, and tiers that can be held up or broken."""

import math
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from prometheus_client import CollectorRegistry

from kvtier.clock import MONOTONIC, Clock
from kvtier.device.kv import HostMemoryKV
from kvtier.device.layered_loads import CopiesByLayer
from kvtier.identity.keys import (
    BlockHasher,
    BlockKey,
    NamespaceId,
    PrefixHasher,
    StoreKey,
    TenantId,
    rank_keys,
    tenant_id,
)
from kvtier.memory.arena import Arena
from kvtier.memory.buffers import ReadableBuffer
from kvtier.metrics import Metrics
from kvtier.offload import (
    AlwaysFetch,
    Block,
    BlockStatus,
    Directory,
    DirectorySettings,
    Hierarchy,
    HierarchyMetrics,
    InventoryLog,
    JobResult,
    Mover,
    MoverTiers,
)
from kvtier.tiers.base import Item, Status, Tier, WriteStatus
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.sidecar.direct_reads import DirectRead, LeasedBlocks
from wrapped_tier import WrappedTier

BLOCK_BYTES = 512
TENANT = tenant_id("red")
NAMESPACE = NamespaceId(b"n" * 16)
PATIENCE_S = 20.0


def chain(num_blocks: int, seed: int = 0, tenant: TenantId = TENANT) -> list[BlockKey]:
    return BlockHasher(tenant, PrefixHasher(bytes(32), str(seed), 1)).hash_blocks(np.arange(num_blocks, dtype=np.int32))


def memory_tier(name: str) -> HostTier:
    """A real tier that stands below: what matters to the hierarchy is the protocol."""
    return HostTier(2**22, slab_bytes=2**16, name=name)


def pool_tier() -> Iterator[HostTier]:
    """For a fixture: what engines share, sound and closed at the end."""
    tier = memory_tier("pool")
    yield tier
    tier.check()
    tier.close()


class Held(WrappedTier):
    """A tier whose reads and writes wait for `gate`, and whose reads of `broken` keys miss."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.lookup_gate = threading.Event()
        self.lookup_gate.set()
        self.broken: set[bytes] = set()

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        assert self.lookup_gate.wait(PATIENCE_S)
        return super().lookup(keys)

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[Status]:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        statuses = super().read(keys, into)
        return [Status.MISS if (k[:16] + k[32:]) in self.broken else s for k, s in zip(keys, statuses, strict=True)]

    def write(self, items: Sequence[Item[ReadableBuffer]]) -> list[WriteStatus]:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        return super().write(items)


class SomeLent:
    """A `DirectReads` of a tier here that lends whatever it likes of its blocks, and takes some back before they are
    settled: what lies in their places then is anything."""

    def __init__(self, tier: Tier) -> None:
        self._tier, self._random = tier, random.Random(1)
        self.num_leased = self.num_taken_back = 0

    def start_read(self, keys: Sequence[StoreKey], nbytes: int) -> DirectRead | None:
        if self._random.random() < 0.2:
            return None
        memory = Arena(len(keys), nbytes)
        statuses = self._tier.read(keys, [memory.view(i) for i in range(len(keys))])
        leased = [i for i, status in enumerate(statuses) if status is Status.HIT and self._random.random() < 0.7]
        taken_back = [i for i in leased if self._random.random() < 0.2]
        memory.rows[taken_back] = 0xEE
        self.num_leased += len(leased)
        self.num_taken_back += len(taken_back)
        blocks = [
            LeasedBlocks(memory, leased[turn::2], leased[turn::2], [], []) for turn in range(2) if leased[turn::2]
        ]
        return DirectRead(blocks, 1, len(keys), nbytes, math.inf, taken_back)

    def end_read(self, direct_read: DirectRead, _wrong: Collection[int] = ()) -> list[bool]:
        whole = {i for leased in direct_read.blocks for i in leased.indexes} - set(direct_read.serials)
        return [i in whole for i in range(direct_read.num_blocks)]


class Rig:
    """An engine's device memory, arena and hierarchy; `device[i]` is block i's bytes."""

    def __init__(
        self,
        shared: Tier | None = None,
        *,
        local: Tier | None = None,
        inventory: InventoryLog | None = None,
        num_slots: int = 32,
        num_blocks: int = 32,
        settings: DirectorySettings | None = None,
        lookup_deadline_s: float = PATIENCE_S,
        clock: Clock = MONOTONIC,
        tenant: TenantId = TENANT,
        namespace: NamespaceId = NAMESPACE,
        settle_s: float = 10.0,
        direct_reads: SomeLent | None = None,
        layered: CopiesByLayer | None = None,
    ) -> None:
        """:param borrower: of the shared tier."""
        self.device = np.random.default_rng(7).integers(0, 256, (num_blocks, BLOCK_BYTES), dtype=np.uint8)
        self.registry = CollectorRegistry()
        self.metrics = HierarchyMetrics(Metrics(self.registry))
        tiers = {tier.name: tier for tier in (local, shared) if tier is not None}
        self.arena = Arena(num_slots, BLOCK_BYTES)
        self.mover = Mover(
            namespace=namespace,
            device=HostMemoryKV(self.device),
            arena=self.arena,
            tiers=MoverTiers(
                by_name=tiers,
                inventory=inventory or InventoryLog([tenant], namespace),
                lenders={shared.name: direct_reads} if shared and direct_reads else {},
            ),
            layered=layered,
        )
        self.directory = Directory(
            namespaces=[namespace],
            num_slots=num_slots,
            local_tiers=[local.name] if local else [],
            shared=shared,
            metrics=self.metrics,
            settings=replace(
                settings or DirectorySettings(), lookup_deadline_s=lookup_deadline_s, borrows=direct_reads is not None
            ),
            clock=clock,
            on_answer=self.mover.nudge,
        )
        self.hierarchy = Hierarchy(self.directory, self.mover, AlwaysFetch(), self.metrics, settle_s=settle_s)

    def lookup(self, keys: Sequence[BlockKey]) -> list[BlockStatus]:
        ticket = self.hierarchy.start_lookup(keys)
        return until(lambda: self.hierarchy.poll_lookup(ticket))

    def tiers_of(self, keys: Sequence[BlockKey]) -> list[str]:
        """Tier per hit, the status's name for others."""
        return [s.tier or s.status.name for s in self.lookup(keys)]

    def result(self, job_id: int) -> JobResult:
        def poll() -> JobResult | None:
            self.hierarchy.wait(0.05)
            return next((r for r in self.hierarchy.poll() if r.job_id == job_id), None)

        return until(poll)

    def load(self, keys: Sequence[BlockKey], slots: Sequence[int]) -> JobResult:
        return self.result(self.hierarchy.start_load(list(zip(keys, slots, strict=True))))

    def save(self, keys: Sequence[BlockKey], slots: Sequence[int]) -> JobResult | None:
        job_id = self.hierarchy.start_save(list(zip(keys, slots, strict=True)))
        return None if job_id is None else self.result(job_id)

    def settle(self) -> None:
        """Waits until nothing is under way, and checks."""
        until(lambda: self._idle() or None)
        self.hierarchy.check()

    def _idle(self) -> bool:
        self.hierarchy.poll()
        directory = self.hierarchy._directory
        return not (directory.is_moving or directory._stores.num_blocks or directory._discards)

    def counter(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"kvtier_{name}_total", labels) or 0.0

    def close(self) -> None:
        self.hierarchy.close()
        self.hierarchy.check()


T = TypeVar("T")


def until(poll: Callable[[], T | None]) -> T:
    """Polls until there is an answer; fails rather than hangs."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        answer = poll()
        if answer is not None:
            return answer
        time.sleep(0.0005)
    raise AssertionError("no answer in time")


def in_tier(tier: HostTier, hashes: list[BlockKey]) -> list[bool]:
    """Whether a tier has each block."""
    return [s is Status.HIT for s in tier.lookup(rank_keys(hashes, NAMESPACE))]


def blocks(hashes: list[BlockKey], first_slot: int = 0) -> list[Block]:
    """Blocks in device slots that follow one another."""
    return [(h, first_slot + i) for i, h in enumerate(hashes)]


def full(rig: Rig, hashes: list[BlockKey], first_slot: int = 0) -> None:
    """Blocks become full on the device, and what is due is done."""
    rig.hierarchy.save_full(blocks(hashes, first_slot))
    rig.settle()
