"""The only place that turns a `Config` into live objects."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from kvtier.codec import Codec
from kvtier.config import Config
from kvtier.errors import ConfigError, KvtierError
from kvtier.hierarchy import (
    AlwaysFetch,
    Directory,
    DirectorySettings,
    Hierarchy,
    HierarchyMetrics,
    InventoryLog,
    Mover,
)
from kvtier.keys import PrefixHasher, TenantId, tenant_id
from kvtier.metrics import Metrics
from kvtier.namespace import Namespace
from kvtier.tiers.base import Tier
from kvtier.tiers.breaker import CircuitBreaker
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.metered import Metered
from kvtier.tiers.pool import PoolTier, PoolTransport
from kvtier.tiers.pool_socket import SocketTransport
from kvtier.tiers.write_policy import WritePolicy
from kvtier.transfer import Arena, DeviceKV
from kvtier.wire.address import GRPC_PREFIX

_log = logging.getLogger(__name__)
_MIN_SLOTS = 16


@dataclass(frozen=True, slots=True)
class EngineCache:
    """What an engine needs to share its KV: keys, and all tiers below its device."""

    hasher: PrefixHasher
    hierarchy: Hierarchy
    metrics: HierarchyMetrics
    clean_ahead_blocks: int


@contextlib.contextmanager
def engine_cache(
    config: Config, *, device: DeviceKV, namespace: Namespace, registry: CollectorRegistry
) -> Iterator[EngineCache]:
    """Builds host, disk and pool tiers as configured; leaving the context writes out what is queued and closes them.

    :param device: the paged KV; stays the caller's, and must outlive the context.
    :param registry: takes the metrics of all parts.
    :raises ConfigError: a secret is missing, the disk folder cannot be used, host memory is too small.
    """
    tenant = tenant_id(config.engine_tenant()[0])
    hasher = PrefixHasher(config.chain_secret(), config.engine_tenant()[1].salt, config.cache.tokens_per_block)
    num_slots = int(config.host.capacity_bytes) // device.block_bytes
    if num_slots < _MIN_SLOTS:
        raise ConfigError(
            f"host.capacity_bytes: {int(config.host.capacity_bytes):,} bytes hold {num_slots} blocks of "
            f"{device.block_bytes:,}; every transfer goes through them: "
            f"give at least {_MIN_SLOTS * device.block_bytes:,}"
        )
    metrics, tier_metrics = HierarchyMetrics(registry), Metrics(registry)
    inventory = InventoryLog(tenant, namespace.id)
    with contextlib.ExitStack() as stack:
        tiers: dict[str, Tier] = {}
        if config.disk.directory is not None:
            disk = _disk_tier(config, inventory, tier_metrics)
            tiers[disk.name] = disk
            stack.callback(disk.close)
        shared: Tier | None = None
        if config.pool.address is not None:
            shared = _pool_tier(config, tenant, tier_metrics)
            tiers[shared.name] = shared
            stack.callback(shared.close)
        arena = Arena(num_slots, device.block_bytes)
        stack.callback(arena.close)
        mover = Mover(
            tenant=tenant,
            namespace=namespace.id,
            device=device,
            arena=arena,
            tiers=tiers,
            inventory=inventory,
            num_load_threads=config.cache.load_threads,
        )
        directory = Directory(
            tenant=tenant,
            namespaces=[namespace.id],
            num_slots=num_slots,
            local_tiers=[name for name, tier in tiers.items() if tier is not shared],
            shared=shared,
            metrics=metrics,
            settings=DirectorySettings(
                batch_blocks=config.cache.batch_blocks,
                saving_fraction=config.cache.saving_fraction,
                load_deadline_s=config.cache.load_deadline_s,
                lookup_deadline_s=config.cache.lookup_deadline_s,
                host_policy=WritePolicy(config.host.write_policy),
                tier_policies={
                    "disk": WritePolicy(config.disk.write_policy),
                    "pool": WritePolicy(config.pool.write_policy),
                },
                selective_uses=config.cache.selective_uses,
            ),
            on_answer=mover.nudge,
        )
        hierarchy = Hierarchy(directory, mover, AlwaysFetch(), metrics)
        stack.callback(hierarchy.close)
        # Cleaning more than the arena holds would evict one clean block for the next, for ever.
        yield EngineCache(hasher, hierarchy, metrics, min(config.cache.clean_ahead_blocks, num_slots // 2))


def _disk_tier(config: Config, inventory: InventoryLog, metrics: Metrics) -> Tier:
    assert config.disk.directory is not None
    return Metered(
        DiskTier.open(
            config.resolve_path(config.disk.directory),
            int(config.disk.capacity_bytes),
            reserve_bytes=int(config.disk.reserve_bytes),
            on_event=inventory.on_event,
            metrics=metrics,
            codec=Codec.parse(config.disk.codec),
        ),
        metrics,
    )


def _pool_tier(config: Config, tenant: TenantId, metrics: Metrics) -> Tier:
    pool = config.pool
    return Metered(
        PoolTier(
            _pool_transport(config, tenant),
            tenant,
            metrics=metrics,
            breaker=CircuitBreaker(pool.breaker_failures, pool.breaker_open_s),
            call_timeout_s=pool.call_timeout_s,
        ),
        metrics,
    )


def _pool_transport(config: Config, tenant: TenantId) -> PoolTransport:
    address, token = config.pool.address, config.pool_token()
    assert address is not None
    if address.startswith(GRPC_PREFIX):
        # Imported here, because engines that speak the block protocol have no use for grpc.
        from kvtier.tiers.pool_grpc import GrpcTransport

        return GrpcTransport(address.removeprefix(GRPC_PREFIX), token, connect_timeout_s=config.pool.connect_timeout_s)
    transport = SocketTransport(address, token, tenant, connect_timeout_s=config.pool.connect_timeout_s)
    threading.Thread(target=_connect_ahead, args=(transport,), name="kvtier-connect", daemon=True).start()
    return transport


def _connect_ahead(transport: SocketTransport) -> None:
    """So that the first request does not wait for it. Ends within `connect_timeout_s`."""
    try:
        transport.connect()
    except KvtierError as error:
        _log.warning("no connection yet, everything misses until there is one: %s", error)
