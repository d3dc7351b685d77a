"""What `kvtier config check` says of a pool's settings."""

from collections.abc import Iterable
from functools import partial

from kvtier.config import Config
from kvtier.config.accepted import accepted_certificates, accepted_tokens, require_clients
from kvtier.config.certificate_findings import ending_certificates
from kvtier.config.findings import (
    Finding,
    Severity,
    ended_tokens,
    errors_of,
    fields_of,
    room_in_memory,
    room_on_disk,
    size_words,
    without_effect,
)
from kvtier.config.tls_files import pool_service_tls
from kvtier.net.tls import server_tls
from kvtier.system.open_files import reachable_open_files
from kvtier_pool.exposure import require_protected, tokens_in_clear
from kvtier_pool.startable import place_attempts

_DESCRIPTORS_PER_CONNECTION = 4
"""Two ports, and for a moment twice as many connections of each."""
_LEAST_CAP_BYTES = 1 << 20
"""What a tenant's cap should be at least."""


def is_of_a_pool(config: Config) -> bool:
    """Whether the file has credentials of tenants, or the table `pool_service`."""
    is_a_pools = any(tenant.token_sha256 or tenant.certificate_names for tenant in config.tenants.values())
    return is_a_pools or "pool_service" in config.model_fields_set


def pool_findings(config: Config) -> Iterable[Finding]:
    """Looks at a file of a pool."""
    if not is_of_a_pool(config):
        return
    yield from errors_of(
        partial(require_clients, config),
        partial(accepted_tokens, config),
        partial(accepted_certificates, config),
        config.redis_password,
        lambda: require_protected(config),
        lambda: server_tls(pool_service_tls(config)),
        lambda: config.storage_seals(config.tenants),
    )
    yield from setting_findings(config)
    yield from errors_of(*place_attempts(config))


def setting_findings(config: Config) -> Iterable[Finding]:
    """What there is to say of a pool's settings alone. It reads no secret: a pool that starts does that when it has
    begun to watch the files."""
    yield from _http(config)
    yield from _memory(config)
    yield from _guarantees(config)
    yield from _redis(config)
    yield from _tenants(config)
    yield from _connections(config)
    yield from ending_certificates(config, "pool_service", ("tls_certificate", "tls_client_ca"))
    yield from _disk(config)  # last: a disk may hang


def _tenants(config: Config) -> Iterable[Finding]:
    is_a_pool_s_alone = not config.is_of_an_engine and "gateway" not in config.model_fields_set
    for name, tenant in config.tenants.items():
        if not tenant.certificate_names:
            yield from ended_tokens(f"tenants.{name}.token_sha256", tenant.token_sha256)
        if is_a_pool_s_alone and (tenant.secret is not None or tenant.previous_secrets):
            yield Finding(
                Severity.WARNING,
                f"tenants.{name}.secret",
                "is for engines alone: whoever has it and a token can forge the tenant's blocks; leave it out",
            )


def _http(config: Config) -> Iterable[Finding]:
    reason = tokens_in_clear(config)
    if reason is not None:
        yield Finding(Severity.WARNING, "pool_service.http_listen", f"takes no token of an operator: {reason}")


def _memory(config: Config) -> Iterable[Finding]:
    effect = "the kernel will end the pool when its memory fills"
    yield from room_in_memory("pool_service.memory_bytes", int(config.pool_service.memory_bytes), effect)


def _disk(config: Config) -> Iterable[Finding]:
    table = config.pool_service
    if table.disk_dir is None:
        yield from without_effect(config, "pool_service", fields_of(config, "pool_service", "disk_"), "disk_dir")
        return
    yield from room_on_disk(
        "pool_service.disk_bytes",
        config.references.path(table.disk_dir),
        int(table.disk_bytes),
        int(table.disk_reserve_bytes),
        "pool_service.disk_reserve_bytes",
    )
    if table.disk_bytes < table.memory_bytes:
        yield Finding(
            Severity.WARNING,
            "pool_service.disk_bytes",
            f"{size_words(int(table.disk_bytes))}, and memory_bytes is {size_words(int(table.memory_bytes))}: the disk "
            "has little that memory has not; make it several times as large",
        )


def _redis(config: Config) -> Iterable[Finding]:
    table, engines_wait_s = config.pool_service, config.cache.lookup_deadline_s
    if table.redis_url is None:
        yield from without_effect(config, "pool_service", fields_of(config, "pool_service", "redis_"), "redis_url")
    elif min(table.redis_lookup_timeout_s, table.redis_timeout_s) >= engines_wait_s:
        yield Finding(
            Severity.WARNING,
            "pool_service.redis_lookup_timeout_s",
            f"{table.redis_lookup_timeout_s:g} s, and engines wait {engines_wait_s:g} s for a lookup "
            "(cache.lookup_deadline_s): while the Redis hangs they miss what the pool has itself; make it shorter",
        )


def _guarantees(config: Config) -> Iterable[Finding]:
    table = config.pool_service
    tiers = {"memory": int(table.memory_bytes)} | ({"disk": int(table.disk_bytes)} if table.disk_dir else {})
    for tier, nbytes in tiers.items():
        guaranteed = sum(getattr(tenant, tier).guaranteed_bytes for tenant in config.tenants.values())
        if guaranteed > nbytes:
            yield Finding(
                Severity.ERROR,
                f"tenants.*.{tier}.guaranteed_bytes",
                f"{size_words(guaranteed)} in all, and pool_service.{tier}_bytes is {size_words(nbytes)}; "
                "guarantee less",
            )
        for name, tenant in config.tenants.items():
            cap = getattr(tenant, tier).cap_bytes
            if cap is not None and cap < _LEAST_CAP_BYTES:
                yield Finding(
                    Severity.WARNING,
                    f"tenants.{name}.{tier}.cap_bytes",
                    f"{size_words(int(cap))} hold no block of most models, and nothing of the tenant is kept there "
                    "then; raise it or leave it out",
                )
    if table.disk_dir is None:
        for name, tenant in config.tenants.items():
            if "disk" in tenant.model_fields_set:
                yield Finding(
                    Severity.WARNING,
                    f"tenants.{name}.disk",
                    "has no effect without pool_service.disk_dir; set that too",
                )
            if table.redis_url is None and tenant.storage_keys is not None:
                yield Finding(
                    Severity.WARNING,
                    f"tenants.{name}.storage_keys",
                    "has no effect: there is neither a disk (disk_dir) nor a Redis (redis_url)",
                )


def _connections(config: Config) -> Iterable[Finding]:
    needed, limit = config.pool_service.max_connections * _DESCRIPTORS_PER_CONNECTION, reachable_open_files()
    if needed > limit:
        yield Finding(
            Severity.WARNING,
            "pool_service.max_connections",
            f"{config.pool_service.max_connections} need {needed:,} open files at times, and this process may have "
            f"{limit:,}: raise the limit (ulimit -Hn, LimitNOFILE=), or lower the key",
        )
