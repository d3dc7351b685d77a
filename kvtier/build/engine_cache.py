"""The only place that turns a `Config` into live objects."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry

from kvtier.build.hashers import tenant_hasher
from kvtier.build.key_info import describe_keys
from kvtier.build.tiers import DISK, POOL, begin_metrics, borrows, has_io_process, names_of_tiers, tiers_below
from kvtier.clock import MONOTONIC
from kvtier.config import Config
from kvtier.config.tiers import MIN_HOST_BLOCKS
from kvtier.device.kv import DeviceKV
from kvtier.device.layered_loads import CopiesByLayer
from kvtier.errors import ConfigError
from kvtier.identity.keys import BlockHasher, NamespaceId, tenant_id
from kvtier.identity.namespace import Namespace
from kvtier.memory.arena import Arena
from kvtier.metrics import Metrics
from kvtier.offload import (
    ALONE,
    AlwaysFetch,
    Directory,
    DirectorySettings,
    FetchIfFaster,
    Hierarchy,
    HierarchyMetrics,
    InventoryLog,
    Mover,
    MoverTiers,
    Planner,
    Replica,
)
from kvtier.offload.messages import HOST
from kvtier.policies.admission import Admission
from kvtier.policies.admission_text import parse_admission
from kvtier.policies.registry import by_name
from kvtier.tiers.base import Tier, Usage
from kvtier.tiers.common.gauges import MemoryGauges, RankMemory
from kvtier.tiers.common.write_policy import WritePolicy
from kvtier.tiers.sidecar import DirectReads
from kvtier.traces.recorder import TraceRecorder

_log = logging.getLogger(__name__)
_COPY_BYTES, _COPY_BLOCKS = 128 << 20, 1024
"""Most of a message that moves blocks between device and host memory, unless `cache.batch_blocks` is more."""
_LOAN_BYTES = 64 << 20
"""Most of one that moves blocks that are lent. It takes a call to the tier process, a verification and two changes of
threads: milliseconds, in which the bus moves a good part of that."""


@dataclass(frozen=True, slots=True)
class EngineCache:
    """What an engine in one process needs to share its KV: keys, and all tiers below its device."""

    hashers: Mapping[str, BlockHasher]
    """The hasher of each tenant that the engine serves, by the tenant's name; its own tenant's first."""
    hierarchy: Hierarchy
    metrics: HierarchyMetrics
    clean_ahead_blocks: int

    @property
    def hasher(self) -> BlockHasher:
        """The hasher of the first tenant, who is the only one of most engines."""
        return next(iter(self.hashers.values()))


@dataclass(frozen=True, slots=True)
class MoverHalf:
    """The half of a hierarchy that has the memory."""

    mover: Mover
    tiers: Mapping[str, Tier]
    """The tiers below the arena, by name."""
    memory_use: Callable[[], RankMemory]
    """Says what memory the rank takes. Any thread, also when the half is closed."""


@dataclass(frozen=True, slots=True)
class DirectoryHalf:
    """The half of a hierarchy that has the tokens."""

    directory: Directory
    hashers: Mapping[str, BlockHasher]
    """The hasher of each tenant that the engine serves, by the tenant's name."""
    metrics: HierarchyMetrics
    num_slots: int
    """The number of slots of each mover's arena."""


@contextlib.contextmanager
def engine_cache(
    config: Config,
    *,
    device: DeviceKV,
    namespace: Namespace,
    registry: CollectorRegistry,
    numa_node: int | None = None,
    layered: CopiesByLayer | None = None,
) -> Iterator[EngineCache]:
    """Builds host, disk and pool tiers as configured; leaving the context writes out what is queued and closes them.

    :param device: the paged KV; stays the caller's, and must outlive the context.
    :param registry: takes the metrics of all parts.
    :param numa_node: see `mover_half`, as for `layered`.
    :raises ConfigError: a secret is missing, the disk folder cannot be used, host memory is too small.
    """
    metrics = Metrics(registry)
    with contextlib.ExitStack() as stack:
        of_rank = mover_half(
            config, device=device, namespace=namespace.id, metrics=metrics, numa_node=numa_node, layered=layered
        )
        movers = stack.enter_context(of_rank)
        half = directory_half(
            config,
            namespaces=[namespace.id],
            block_bytes=device.block_bytes,
            shared=movers.tiers.get(POOL),
            metrics=metrics,
            on_answer=movers.mover.nudge,
        )
        hierarchy = Hierarchy(half.directory, movers.mover, planner(config, half.directory), half.metrics)
        stack.callback(hierarchy.close)
        # Cleaning more than the arena holds would evict one clean block for the next, for ever.
        clean_ahead_blocks = min(config.cache.clean_ahead_blocks, half.num_slots // 2)
        yield EngineCache(half.hashers, hierarchy, half.metrics, clean_ahead_blocks)


@contextlib.contextmanager
def mover_half(  # noqa: PLR0913 - the parts that it is put together from
    config: Config,
    *,
    device: DeviceKV,
    namespace: NamespaceId,
    metrics: Metrics,
    numa_node: int | None = None,
    replica: Replica = ALONE,
    layered: CopiesByLayer | None = None,
) -> Iterator[MoverHalf]:
    """Arena, tiers and mover of one rank; leaving the context ends after what was submitted. Raises as `engine_cache`.

    Touches the arena and has the device attach it, which may take a second per GiB, so that no copy waits for that.

    :param device: the rank's paged KV; stays the caller's, and must outlive the context.
    :param metrics: of the rank's tiers; its registry takes those of its memory, too.
    :param numa_node: the one that the device is attached to, if that is known: the arena's memory is taken from there.
    :param replica: which of the ranks with this namespace it is: each writes some of the blocks to the pool.
    :param layered: the device's copies by layer, for an engine that waits for layers.
    """
    tenants = [tenant_id(name) for name in config.engine_tenants()]
    inventory = InventoryLog(tenants, namespace)
    with contextlib.ExitStack() as stack:
        num_slots = _num_slots(config, device.block_bytes)
        begun_s, arena_bytes = MONOTONIC(), num_slots * device.block_bytes
        arena = Arena(num_slots, device.block_bytes, shared=has_io_process(config), numa_node=numa_node)
        stack.callback(arena.close)
        _log.info("touched %.2f GiB of host memory in %.2f s", arena_bytes / 2**30, MONOTONIC() - begun_s)
        stack.callback(device.detach, arena)
        device.attach(arena)
        opened, process = stack.enter_context(tiers_below(config, namespace, arena, inventory.on_event, metrics))
        below = {tier.name: tier for tier in opened}
        begin_metrics(config, metrics)

        def forget_untold(tier: str) -> None:
            if process is not None:
                for tenant in tenants:
                    process.forget_untold(tier, tenant + namespace)

        direct_reads: dict[str, DirectReads] = {}
        if process is not None and borrows(config):
            on_device = config.cache.verify_loads != "host" and device.begin_verifying()
            pinned_bytes = int(config.pool.pinned_bytes)
            direct_reads[POOL] = DirectReads(
                POOL, process, device, metrics, most_bytes=pinned_bytes, verified=not on_device
            )
            stack.callback(direct_reads[POOL].close)
        mover = Mover(
            namespace=namespace,
            device=device,
            arena=arena,
            tiers=MoverTiers(
                by_name=below,
                inventory=inventory,
                lenders=direct_reads,
                shared=[POOL],
                replica=replica,
                forget_untold=forget_untold,
            ),
            num_load_threads=config.cache.load_threads,
            layered=layered,
        )
        stack.callback(mover.close)

        def memory_use() -> RankMemory:
            leased_bytes = sum(each.mapped_bytes for each in direct_reads.values())
            return RankMemory(arena_bytes, leased_bytes, device.memory_use)

        MemoryGauges(metrics.registry, memory_use)
        yield MoverHalf(mover, below, memory_use)


def directory_half(
    config: Config,
    *,
    namespaces: Sequence[NamespaceId],
    block_bytes: int,
    shared: Tier | None,
    metrics: Metrics,
    on_answer: Callable[[], None] = lambda: None,
) -> DirectoryHalf:
    """The directory over the movers of all ranks, which have the same configuration. The caller closes it.

    :param namespaces: of all ranks, in order.
    :param metrics: of the tiers as this process asks them; its registry takes those of the hierarchy, too.
    :param block_bytes: of a block in one rank; the same in all.
    :param shared: the pool, as this process asks it; stays the caller's.
    :param on_answer: called from another thread when a lookup is worth polling.
    :raises ConfigError: the tenant's secret is missing, host memory is too small.
    """
    hashers = {name: tenant_hasher(config, name, config.cache.tokens_per_block) for name in config.engine_tenants()}
    describe_keys(metrics.registry, namespaces, config.cache.tokens_per_block)
    of_hierarchy, num_slots = HierarchyMetrics(metrics), _num_slots(config, block_bytes)
    of_all_ranks = block_bytes * len(namespaces)
    directory = Directory(
        namespaces=namespaces,
        num_slots=num_slots,
        local_tiers=[DISK] if config.disk.directory is not None else [],
        shared=shared,
        metrics=of_hierarchy,
        settings=DirectorySettings(
            batch_blocks=config.cache.batch_blocks,
            copy_batch_blocks=min(_COPY_BYTES // block_bytes, _COPY_BLOCKS),
            borrows=borrows(config),
            loan_blocks=max(1, min(_LOAN_BYTES // block_bytes, _COPY_BLOCKS)),
            saving_fraction=config.cache.saving_fraction,
            load_deadline_s=config.cache.load_deadline_s,
            lookup_deadline_s=config.cache.lookup_deadline_s,
            host_policy=WritePolicy(config.host.write_policy),
            make_policy=partial(by_name, config.host.policy),
            tier_policies={
                DISK: WritePolicy(config.disk.write_policy),
                POOL: WritePolicy(config.pool.write_policy),
            },
            tier_admissions=_admissions(config, len(namespaces)),
            block_bytes=of_all_ranks,
            selective_uses=config.cache.selective_uses,
        ),
        on_answer=on_answer,
        recorder=_recorder(config, num_slots, block_bytes),
    )

    def host_usage() -> Usage:
        num_blocks = directory.num_in_host
        return Usage(num_blocks, num_blocks * of_all_ranks, num_slots * of_all_ranks)

    metrics.levels.watch_usage(HOST, host_usage)
    of_hierarchy.begin(names_of_tiers(config))
    return DirectoryHalf(directory, hashers, of_hierarchy, num_slots)


def _admissions(config: Config, num_ranks: int) -> dict[str, Admission]:
    """Which blocks get to a local tier at all, by the tier's name. Sizes are those of all ranks together."""
    disk = config.disk
    if disk.directory is None or disk.admission is None:
        return {}
    return {DISK: parse_admission(disk.admission, int(disk.capacity_bytes) * num_ranks)}


def _recorder(config: Config, num_slots: int, block_bytes: int) -> TraceRecorder | None:
    """The recorder that the configuration asks for, started. Raises `ConfigError` when its file cannot be written."""
    cache = config.cache
    if cache.record_trace is None:
        return None
    described: dict[str, str | int] = {"source": "engine", "policy": config.host.policy, "capacity_blocks": num_slots}
    path = config.references.path(cache.record_trace)
    recorder = TraceRecorder(path, described, max_bytes=int(cache.record_trace_bytes))
    try:
        recorder.start()
    except ConfigError as error:
        raise config.references.error_about("cache.record_trace", str(error)) from error
    return recorder


def planner(config: Config, directory: Directory) -> Planner:
    """How much of a hit is fetched, as configured."""
    return AlwaysFetch() if config.cache.fetch == "always" else FetchIfFaster(directory.speeds)


def _num_slots(config: Config, block_bytes: int) -> int:
    """Slots of the arena. Raises `ConfigError` when they are too few."""
    capacity_bytes = config.host_bytes()
    num_slots = capacity_bytes // block_bytes
    if num_slots < MIN_HOST_BLOCKS:
        raise ConfigError(
            f"host.capacity_bytes: {capacity_bytes:,} bytes hold {num_slots} blocks of {block_bytes:,}; every transfer "
            f"goes through them: give each rank at least {MIN_HOST_BLOCKS * block_bytes:,}"
        )
    return num_slots
