"""What an engine will do with its configuration at its start, each step alone: tried before a model is loaded."""

from collections.abc import Callable
from functools import partial

from kvtier.config.accepted import accepted_engine_keys
from kvtier.config.config import Config
from kvtier.config.findings import size_words
from kvtier.config.places import require_writable_file
from kvtier.config.tls_files import engine_tls, pool_tls
from kvtier.errors import ConfigError
from kvtier.net.tls import client_tls, server_tls
from kvtier.system.memory import total_bytes


def engine_attempts(config: Config, device_type: str) -> list[Callable[[], object]]:
    """Returns calls that raise `ConfigError` for what an engine would refuse later. They read the files of secrets and
    certificates, open no connection, and write nothing.

    :param device_type: of the engine's KV, `cuda` or `cpu`.
    :raises ConfigError: no tenant is named.
    """
    attempts: list[Callable[[], object]] = [
        partial(config.verifies_on_device, device_type),
        partial(accepted_engine_keys, config),
        lambda: server_tls(engine_tls(config)),
        lambda: client_tls(pool_tls(config), config.pool.tls_server_name),
        lambda: _require_memory(config.host_bytes(), total_bytes()),
    ]
    trace = config.cache.record_trace
    if trace is not None:
        path = config.references.path(trace)
        attempts.append(partial(require_writable_file, config, "cache.record_trace", path, is_renamed=True))
    for name in config.engine_tenants():
        attempts += [partial(config.previous_secrets, name), partial(config.carriage_keys, name)]
        attempts.append(partial(config.storage_seals, [name]))
        if config.pool.address:
            attempts.append(partial(config.pool_token, name))
    return attempts


def _require_memory(wanted_bytes: int, total: int | None) -> None:
    """Engines touch all of it at their start: where there is less, the kernel ends a process, maybe another one."""
    if total is not None and wanted_bytes > total:
        raise ConfigError(
            f"host.capacity_bytes: {size_words(wanted_bytes)}, and this machine or its control group has "
            f"{size_words(total)} in all; lower it"
        )
