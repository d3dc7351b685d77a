"""The parts of a pool that its configuration decides: store, audit log, recorder, shares, and what may be pinned."""

from functools import partial

from prometheus_client import CollectorRegistry

from kvtier.codec.sealed_form import StorageSeals
from kvtier.config import Config
from kvtier.config.pool_service import PoolServiceConfig
from kvtier.config.tenant import ShareConfig
from kvtier.errors import ConfigError
from kvtier.identity.keys import TenantId, tenant_id
from kvtier.memory import memfd
from kvtier.metrics import Metrics
from kvtier.net.address import Address
from kvtier.policies.registry import by_name
from kvtier.store.event_hub import EventHub
from kvtier.store.metrics import StoreMetrics
from kvtier.store.retention import RetentionLimits
from kvtier.store.store import Store
from kvtier.store.write_workers import WriteParts
from kvtier.tiers.common.shares import Share
from kvtier.traces.recorder import TraceRecorder
from kvtier_pool.audit import AuditLog, require_writable
from kvtier_pool.metrics import PoolMetrics
from kvtier_pool.open_tiers import open_lower_tiers


def open_store(
    config: Config,
    seals: StorageSeals,
    hub: EventHub,
    registry: CollectorRegistry,
    *,
    recorder: TraceRecorder | None,
    parts: WriteParts,
) -> Store:
    """The tiers as one, not started yet; the caller closes it. Raises as `open_lower_tiers` does.

    :param parts: when blocks are written down, and how many at a time.
    """
    table, tier_metrics = config.pool_service, Metrics(registry)
    return Store(
        memory_bytes=int(table.memory_bytes),
        min_residency_s=table.min_residency_s,
        below=open_lower_tiers(config, seals, hub, tier_metrics, parts),
        hub=hub,
        metrics=StoreMetrics(registry),
        shared=shares_memory(table),
        pins=retention_limits(table, num_tenants=len(tenant_names(config))),
        tier_metrics=tier_metrics,
        recorder=recorder,
        make_policy=partial(by_name, table.memory_policy),
    )


def tenant_names(config: Config) -> dict[TenantId, str]:
    """The tenants that may be let in, by their ids."""
    tenants = config.tenants.items()
    return {tenant_id(name): name for name, tenant in tenants if tenant.token_sha256 or tenant.certificate_names}


def audit_log_of(config: Config, metrics: PoolMetrics) -> AuditLog:
    """The audit log that the configuration asks for, not started. Raises `ConfigError` where it cannot be written."""
    table = config.pool_service
    if table.audit_log == "stderr":
        return AuditLog(None, metrics)
    file = config.references.path(table.audit_log)
    try:
        require_writable(file)
    except OSError as error:
        raise ConfigError(
            f"pool_service.audit_log: {file} cannot be written: {error}; name a file in a folder of the pool's user"
        ) from error
    return AuditLog(file, metrics, max_bytes=int(table.audit_log_bytes))


def share_of(configured: ShareConfig) -> Share:
    """A tenant's share of a tier, as a configuration has it."""
    cap_bytes = int(configured.cap_bytes) if configured.cap_bytes is not None else None
    return Share(int(configured.guaranteed_bytes), cap_bytes, configured.weight)


def shares_memory(table: PoolServiceConfig) -> bool:
    """Whether there is anybody to share memory with, and a way to do it."""
    is_local = any(Address.parse(address).path for address in table.listen)
    return table.shared_memory and is_local and memfd.available()


def retention_limits(table: PoolServiceConfig, *, num_tenants: int) -> RetentionLimits:
    """What the tenants may pin."""
    return RetentionLimits(
        max_s=table.max_pin_s,
        most_bytes=int(table.memory_bytes * table.pin_share),
        several_tenants=num_tenants > 1,
    )


def recorder_of(config: Config, metrics: PoolMetrics) -> TraceRecorder | None:
    """The recorder that the configuration asks for, not started."""
    table = config.pool_service
    if table.record_trace is None:
        return None
    path = config.references.path(table.record_trace)
    recorder = TraceRecorder(path, trace_description(table), max_bytes=int(table.record_trace_bytes))
    metrics.trace_dropped.set_function(lambda: recorder.num_dropped)
    return recorder


def start_recorder(recorder: TraceRecorder, config: Config) -> None:
    """Starts it. Raises `ConfigError`, which names the key, when the file cannot be written."""
    try:
        recorder.start()
    except ConfigError as error:
        raise config.references.error_about("pool_service.record_trace", str(error)) from error


def trace_description(table: PoolServiceConfig) -> dict[str, str | int]:
    """What a trace says of the memory that was there."""
    return {"source": "pool", "policy": table.memory_policy, "capacity_bytes": int(table.memory_bytes)}
