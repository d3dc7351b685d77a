"""The tiers below an engine's host memory, as configured: here, or in a process of their own."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.codec.stored_form import Codec
from kvtier.config import Config, parse_config
from kvtier.config.tls_files import pool_tls
from kvtier.errors import ConfigError
from kvtier.events import EventSink
from kvtier.identity.keys import NamespaceId, StoreKey, TenantId, tenant_id
from kvtier.memory import memfd
from kvtier.memory.arena import Arena
from kvtier.memory.pieces import Payload, Target
from kvtier.metrics import Metrics
from kvtier.net.address import GRPC_PREFIX, UNIX_PREFIX
from kvtier.net.tls import ClientTls, client_tls
from kvtier.tiers.base import Tier, TierOf
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.common.metered import Metered
from kvtier.tiers.common.packer import counted_forms
from kvtier.tiers.common.per_tenant import PerTenant
from kvtier.tiers.common.traced import traced
from kvtier.tiers.disk.medium.direct_io import DirectIo
from kvtier.tiers.disk.state.segment_files import SyncPolicy
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.pool.access import PoolAccess, open_transport
from kvtier.tiers.pool.path_counts import PathCounts
from kvtier.tiers.pool.tier import PoolTier, counted_pins
from kvtier.tiers.sidecar import ProcessSettings, SharedMemory, SidecarTier, TierProcess

DISK, POOL = "disk", "pool"
"""Names of the tiers below host memory."""
_PROCESS_MARGIN_S = 1.0
"""Seconds above the deadlines of tiers: a process whose tier answers late must not count as hung."""


def tiers_of_process(settings: str, on_event: EventSink, metrics: Metrics) -> list[Tier]:
    """What runs in a tier process; see `kvtier.tiers.sidecar.process.MakeTiers`.

    :param settings: made by `_process_settings`.
    """
    packed = json.loads(settings)
    folder = Path(packed["folder"])
    config = parse_config(packed["config"], source="tier process", folder=folder, environ=packed["environ"])
    return _open_tiers(config, NamespaceId(bytes.fromhex(packed["namespace"])), on_event, metrics)


def has_io_process(config: Config) -> bool:
    """Whether the tiers of this engine live in a process of their own. `ConfigError`: they cannot."""
    if not config.cache.io_process or (config.disk.directory is None and not config.pool.address):
        return False
    if not memfd.available():
        raise ConfigError("cache.io_process: needs Linux; set it to false")
    return True


def borrows(config: Config) -> bool:
    """Whether the pool is asked to lend blocks that lie in its memory: see `kvtier.tiers.lease`. Not where they are
    sealed: a device cannot open them."""
    pool = config.pool
    if any(config.tenants[name].sealing_keys is not None for name in config.engine_tenants()):
        return False
    is_here = any(address.startswith(UNIX_PREFIX) for address in pool.address)
    is_wanted = pool.shared_memory and pool.direct_loads and pool.pinned_bytes > 0
    return is_here and is_wanted and has_io_process(config)


@contextlib.contextmanager
def tiers_below(
    config: Config, namespace: NamespaceId, arena: Arena, on_event: EventSink, metrics: Metrics
) -> Iterator[tuple[list[Tier], TierProcess | None]]:
    """The tiers below the arena, wherever their I/O happens, and their process if any; closed at the end."""
    with contextlib.ExitStack() as stack:
        process: TierProcess | None = None
        if has_io_process(config):
            shared = SharedMemory(arena.descriptor, arena.memory)
            settings = _process_settings(config, namespace)
            process = TierProcess(shared, settings, on_event=on_event, metrics=metrics)
            stack.callback(process.close)
            tiers: list[Tier] = [SidecarTier(name, process) for name in names_of_tiers(config)]
        else:
            tiers = _open_tiers(config, namespace, on_event, metrics)
        for tier in tiers:
            stack.callback(tier.close)
        yield [traced(Metered(tier, metrics)) for tier in tiers], process


@dataclass(frozen=True, slots=True)
class SharedTier:
    """The pool, for all tenants of the engine."""

    tier: TierOf[Payload, Target]
    pin: Callable[[Sequence[StoreKey], float], int]
    """Calls `PoolTier.pin`; keys of several tenants are several calls."""
    is_left_alone: Callable[[TenantId], bool]
    """Whether the pool has failed for this tenant of late and is not asked but for probes: blocks are misses."""


@contextlib.contextmanager
def shared_tier(config: Config, namespaces: Sequence[NamespaceId], metrics: Metrics) -> Iterator[SharedTier | None]:
    """The pool, for a process that asks it and moves no blocks; None without one. Closed at the end.

    :param namespaces: all that will be asked for.
    """
    if not config.pool.address:
        yield None
        return
    _begin_pool(config, metrics)
    pool = _open_pool(config, namespaces, metrics)
    with contextlib.closing(pool.tier):
        yield replace(pool, tier=traced(Metered(pool.tier, metrics)))


def _process_settings(config: Config, namespace: NamespaceId) -> ProcessSettings:
    """What the tier process has to know: not the secret that keys the hash chain."""
    names = config.engine_tenants()
    environ: dict[str, str] = {}
    tenants: dict[str, dict[str, object]] = {}
    for number, name in enumerate(names):
        texts = _secrets_of(config, name)
        tenants[name] = {field: f"env:{field}_{number}" for field in texts}
        tenants[name]["storage_reads_plain"] = config.tenants[name].storage_reads_plain
        environ |= {f"{field}_{number}": text for field, text in texts.items()}
    settings = {
        "config": {
            "tenants": tenants,
            "gateway_tenants": names,
            **config.model_dump(mode="json", include={"disk", "pool"}),
        },
        "namespace": namespace.hex(),
        "folder": str(config.references.path(Path())),
        "environ": environ,
    }
    return ProcessSettings(
        factory=f"{__name__}:{tiers_of_process.__name__}",
        settings=json.dumps(settings),
        call_timeout_s=max(config.cache.load_deadline_s, len(names) * config.pool.call_timeout_s + _PROCESS_MARGIN_S),
        hidden_environ=_named_variables(config.model_dump(mode="json")),
        log_format=config.log.format or "text",
    )


def _secrets_of(config: Config, name: str) -> dict[str, str]:
    """What the tiers of one tenant need to know, by the fields of `TenantConfig`."""
    found = {
        "token": config.pool_token(name) if config.pool.address else None,
        "sealing_keys": config.keys_text(name, "sealing_keys") if config.pool.address else None,
        "storage_keys": config.keys_text(name, "storage_keys") if config.disk.directory is not None else None,
    }
    return {field: text for field, text in found.items() if text is not None}


def _named_variables(value: object) -> frozenset[str]:
    """The NAMEs of every `env:NAME` in a configuration."""
    if isinstance(value, str):
        return frozenset([value.removeprefix("env:")] if value.startswith("env:") else [])
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return frozenset().union(*map(_named_variables, inside))


def names_of_tiers(config: Config) -> list[str]:
    """The names of the tiers below host memory, from the fastest to the slowest."""
    disk = [DISK] if config.disk.directory is not None else []
    return disk + ([POOL] if config.pool.address else [])


def begin_metrics(config: Config, metrics: Metrics) -> None:
    """Makes the samples of what an engine's tiers below host memory count: they read 0 before anything happened, in
    whichever process it will."""
    if config.disk.directory is not None:
        metrics.begin(DISK)
        counted_forms(Codec.parse(config.disk.codec), DISK, metrics)
    if config.pool.address:
        _begin_pool(config, metrics)


def _begin_pool(config: Config, metrics: Metrics) -> None:
    metrics.begin(POOL)
    counted_pins(POOL, metrics)
    for path in _paths(config):
        PathCounts(path, metrics)


def _paths(config: Config) -> set[str]:
    """The paths that blocks may take to the pool, as metrics call them."""
    found: set[str] = set()
    for address in config.pool.address:
        if address.startswith(UNIX_PREFIX):
            found |= {"unix", "shm"} if config.pool.shared_memory else {"unix"}
        else:
            in_clear = pool_tls(config) is None
            found.add("grpc" if address.startswith(GRPC_PREFIX) else "tcp" if in_clear else "tls")
    return found


def _open_tiers(config: Config, namespace: NamespaceId, on_event: EventSink, metrics: Metrics) -> list[Tier]:
    """Disk and pool as configured. Does their I/O in threads of this process."""
    with contextlib.ExitStack() as stack:
        tiers: list[Tier] = []
        if config.disk.directory is not None:
            tiers.append(_disk_tier(config, on_event, metrics))
            stack.callback(tiers[0].close)
            metrics.levels.watch_usage(DISK, tiers[0].usage)
        if config.pool.address:
            tiers.append(_open_pool(config, [namespace], metrics).tier)
        stack.pop_all()
        return tiers


def _disk_tier(config: Config, on_event: EventSink, metrics: Metrics) -> Tier:
    assert config.disk.directory is not None
    return DiskTier.open(
        config.references.path(config.disk.directory),
        int(config.disk.capacity_bytes),
        reserve_bytes=int(config.disk.reserve_bytes),
        codec=Codec.parse(config.disk.codec),
        seals=config.storage_seals(config.engine_tenants()),
        segment_bytes=int(config.disk.segment_bytes),
        sync=SyncPolicy(config.disk.sync),
        direct_io=DirectIo(config.disk.direct_io),
        timeout_s=config.disk.timeout_s,
        name=DISK,
        on_event=on_event,
        metrics=metrics,
    )


def _open_pool(config: Config, namespaces: Sequence[NamespaceId], metrics: Metrics) -> SharedTier:
    """A client of its own for each tenant."""
    tls = client_tls(pool_tls(config), config.pool.tls_server_name)
    names = config.engine_tenants()
    clients = {tenant_id(name): _pool_client(config, name, namespaces, tls, metrics) for name in names}
    both = PerTenant(POOL, clients)

    def pin(keys: Sequence[StoreKey], ttl_s: float) -> int:
        return sum(clients[tenant].pin(theirs, ttl_s) for tenant, theirs in both.by_tenant(keys).items())

    tier = next(iter(clients.values())) if len(clients) == 1 else both
    return SharedTier(tier, pin, lambda tenant: clients[tenant].is_left_alone)


def pool_access(config: Config, name: str, namespaces: Sequence[NamespaceId], tls: ClientTls | None) -> PoolAccess:
    """What a tenant needs to reach the pool, as configured.

    :param tls: of `pool_tls`.
    """
    pool = config.pool
    return PoolAccess(
        addresses=pool.address,
        tenant=tenant_id(name),
        token=config.pool_token(name),
        tls=tls,
        namespaces=namespaces,
        connect_timeout_s=pool.connect_timeout_s,
        shared_memory=pool.shared_memory,
    )


def _pool_client(
    config: Config, name: str, namespaces: Sequence[NamespaceId], tls: ClientTls | None, metrics: Metrics
) -> PoolTier:
    pool, access = config.pool, pool_access(config, name, namespaces, tls)
    return PoolTier(
        open_transport(access, metrics),
        access.tenant,
        metrics=metrics,
        breaker=CircuitBreaker(pool.breaker_failures, pool.breaker_open_s),
        call_timeout_s=pool.call_timeout_s,
        sealing=config.carriage_keys(name),
        name=POOL,
    )
