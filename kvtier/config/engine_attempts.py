"""What an engine will do with its configuration at its start, each step alone: tried before a model is loaded."""

from collections.abc import Callable
from functools import partial

from kvtier.config.config import Config
from kvtier.net.tls import client_tls


def engine_attempts(config: Config, device_type: str) -> list[Callable[[], object]]:
    """Returns calls that raise `ConfigError` for what an engine would refuse later. They read the files of secrets and
    certificates, open no connection, and write nothing.

    :param device_type: of the engine's KV, `cuda` or `cpu`.
    :raises ConfigError: no tenant is named.
    """
    attempts: list[Callable[[], object]] = [
        partial(config.verifies_on_device, device_type),
        lambda: client_tls(config.pool_tls(), config.pool.tls_server_name),
    ]
    for name in config.engine_tenants():
        attempts += [partial(config.previous_secrets, name), partial(config.carriage_keys, name)]
        attempts.append(partial(config.storage_seals, [name]))
        if config.pool.address:
            attempts.append(partial(config.pool_token, name))
    return attempts
