"""The only place that turns a `Config` into live objects."""

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvtier.codec import Codec
from kvtier.config import Config, parse_config
from kvtier.errors import ConfigError
from kvtier.events import EventSink
from kvtier.hierarchy import (
    AlwaysFetch,
    Directory,
    DirectorySettings,
    Hierarchy,
    HierarchyMetrics,
    InventoryLog,
    Mover,
)
from kvtier.keys import NamespaceId, PrefixHasher, TenantId, tenant_id
from kvtier.metrics import Metrics
from kvtier.namespace import Namespace
from kvtier.tiers import memfd
from kvtier.tiers.aside import AsideTier, ProcessSettings, SharedMemory, TierProcess
from kvtier.tiers.base import Tier
from kvtier.tiers.breaker import CircuitBreaker
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.metered import Metered
from kvtier.tiers.pool.access import PoolAccess, open_transport
from kvtier.tiers.pool.tier import PoolTier
from kvtier.tiers.write_policy import WritePolicy
from kvtier.transfer import Arena, DeviceKV
from kvtier.wire.tls import ClientTls

_log = logging.getLogger(__name__)
_MIN_SLOTS = 16
_DISK, _POOL = "disk", "pool"
"""Names of the tiers below host memory."""
_PROCESS_MARGIN_S = 1.0
"""Above the deadlines of tiers: who answers late is not hung."""


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
        arena = Arena(num_slots, device.block_bytes, shared=_has_io_process(config))
        stack.callback(arena.close)
        opened, process = stack.enter_context(_tiers_below(config, namespace.id, arena, inventory, tier_metrics))
        below = {tier.name: tier for tier in opened}

        def forget_untold(tier: str) -> None:
            if process is not None:
                process.forget_untold(tier, tenant + namespace.id)

        mover = Mover(
            tenant=tenant,
            namespace=namespace.id,
            device=device,
            arena=arena,
            tiers=below,
            inventory=inventory,
            num_load_threads=config.cache.load_threads,
            forget_untold=forget_untold,
        )
        directory = Directory(
            tenant=tenant,
            namespaces=[namespace.id],
            num_slots=num_slots,
            local_tiers=[name for name in below if name != _POOL],
            shared=below.get(_POOL),
            metrics=metrics,
            settings=DirectorySettings(
                batch_blocks=config.cache.batch_blocks,
                saving_fraction=config.cache.saving_fraction,
                load_deadline_s=config.cache.load_deadline_s,
                lookup_deadline_s=config.cache.lookup_deadline_s,
                host_policy=WritePolicy(config.host.write_policy),
                tier_policies={
                    _DISK: WritePolicy(config.disk.write_policy),
                    _POOL: WritePolicy(config.pool.write_policy),
                },
                selective_uses=config.cache.selective_uses,
            ),
            on_answer=mover.nudge,
        )
        hierarchy = Hierarchy(directory, mover, AlwaysFetch(), metrics)
        stack.callback(hierarchy.close)
        # Cleaning more than the arena holds would evict one clean block for the next, for ever.
        yield EngineCache(hasher, hierarchy, metrics, min(config.cache.clean_ahead_blocks, num_slots // 2))


def tiers_of_process(settings: str, on_event: EventSink, metrics: Metrics) -> list[Tier]:
    """What runs in a tier process; see `kvtier.tiers.aside.process.MakeTiers`.

    :param settings: made by `_process_settings`.
    """
    packed = json.loads(settings)
    folder = Path(packed["folder"])
    config = parse_config(packed["config"], source="tier process", folder=folder, environ=packed["environ"])
    return _open_tiers(config, NamespaceId(bytes.fromhex(packed["namespace"])), on_event, metrics)


def _has_io_process(config: Config) -> bool:
    if not config.cache.io_process or (config.disk.directory is None and not config.pool.address):
        return False
    if not memfd.available():
        raise ConfigError("cache.io_process: needs Linux; set it to false")
    return True


@contextlib.contextmanager
def _tiers_below(
    config: Config, namespace: NamespaceId, arena: Arena, inventory: InventoryLog, metrics: Metrics
) -> Iterator[tuple[list[Tier], TierProcess | None]]:
    """The tiers below the arena, wherever their I/O happens, and their process if any; closed at the end."""
    with contextlib.ExitStack() as stack:
        process: TierProcess | None = None
        if _has_io_process(config):
            shared = SharedMemory(arena.descriptor, arena.memory)
            settings = _process_settings(config, namespace)
            process = TierProcess(shared, settings, on_event=inventory.on_event, metrics=metrics)
            stack.callback(process.close)
            tiers: list[Tier] = [AsideTier(name, process) for name in _names(config)]
        else:
            tiers = _open_tiers(config, namespace, inventory.on_event, metrics)
        for tier in tiers:
            stack.callback(tier.close)
        yield [Metered(tier, metrics) for tier in tiers], process


def _process_settings(config: Config, namespace: NamespaceId) -> ProcessSettings:
    """What the tier process has to know: not the secret that keys the hash chain."""
    name, _ = config.engine_tenant()
    token = config.pool_token() if config.pool.address else None
    settings = {
        "config": {
            "tenant": name,
            "tenants": {name: {"token": "env:TOKEN"} if token is not None else {}},
            **config.model_dump(mode="json", include={"disk", "pool"}),
        },
        "namespace": namespace.hex(),
        "folder": str(config.resolve_path(Path())),
        "environ": {"TOKEN": token} if token is not None else {},
    }
    return ProcessSettings(
        factory=f"{__name__}:{tiers_of_process.__name__}",
        settings=json.dumps(settings),
        call_timeout_s=max(config.cache.load_deadline_s, config.pool.call_timeout_s + _PROCESS_MARGIN_S),
        hidden_environ=_named_variables(config.model_dump(mode="json")),
    )


def _named_variables(value: object) -> frozenset[str]:
    """All NAMEs of `env:NAME` in a configuration."""
    if isinstance(value, str):
        return frozenset([value.removeprefix("env:")] if value.startswith("env:") else [])
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return frozenset().union(*map(_named_variables, inside))


def _names(config: Config) -> list[str]:
    """Of the tiers that `_open_tiers` opens."""
    disk = [_DISK] if config.disk.directory is not None else []
    return disk + ([_POOL] if config.pool.address else [])


def _open_tiers(config: Config, namespace: NamespaceId, on_event: EventSink, metrics: Metrics) -> list[Tier]:
    """Disk and pool as configured. Does their I/O in threads of this process."""
    with contextlib.ExitStack() as stack:
        tiers: list[Tier] = []
        if config.disk.directory is not None:
            tiers.append(_disk_tier(config, on_event, metrics))
            stack.callback(tiers[0].close)
        if config.pool.address:
            tiers.append(_pool_tier(config, tenant_id(config.engine_tenant()[0]), namespace, metrics))
        stack.pop_all()
        return tiers


def _disk_tier(config: Config, on_event: EventSink, metrics: Metrics) -> Tier:
    assert config.disk.directory is not None
    return DiskTier.open(
        config.resolve_path(config.disk.directory),
        int(config.disk.capacity_bytes),
        reserve_bytes=int(config.disk.reserve_bytes),
        codec=Codec.parse(config.disk.codec),
        name=_DISK,
        on_event=on_event,
        metrics=metrics,
    )


def _pool_tier(config: Config, tenant: TenantId, namespace: NamespaceId, metrics: Metrics) -> Tier:
    pool = config.pool
    access = PoolAccess(
        addresses=pool.address,
        tenant=tenant,
        token=config.pool_token(),
        tls=_pool_tls(config),
        namespaces=[namespace],
        connect_timeout_s=pool.connect_timeout_s,
        shared_memory=pool.shared_memory,
    )
    return PoolTier(
        open_transport(access, metrics),
        tenant,
        metrics=metrics,
        breaker=CircuitBreaker(pool.breaker_failures, pool.breaker_open_s),
        call_timeout_s=pool.call_timeout_s,
        name=_POOL,
    )


def _pool_tls(config: Config) -> ClientTls | None:
    """Raises `ConfigError` when the files are no good: now, rather than at the first connection."""
    files = config.pool_tls()
    if files is None:
        return None
    tls = ClientTls(files, config.pool.tls_server_name)
    tls.check()
    return tls
