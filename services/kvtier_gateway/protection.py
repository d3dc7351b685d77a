"""What a gateway refuses to begin with, and how many clients it takes."""

from collections.abc import Callable
from functools import partial

from kvtier.config import Config
from kvtier.config.accepted import accepted_api_keys
from kvtier.config.gateway import GatewayConfig
from kvtier.config.places import require_addresses_apart
from kvtier.config.tls_files import gateway_engine_tls, gateway_tls, pool_tls
from kvtier.errors import ConfigError
from kvtier.net.address import is_loopback
from kvtier.net.certificates import client_context
from kvtier.net.tls import client_tls, server_tls
from kvtier.system.open_files import reachable_open_files
from kvtier_gateway.http.parameters import OWN

OPEN_FILES_PER_CONNECTION, OPEN_FILES_BESIDES = 2, 64


def start_attempts(config: Config) -> list[Callable[[], object]]:
    """Returns calls that raise `ConfigError` for what a gateway would not start with. They read the files of secrets
    and certificates, open no connection, and change nothing."""
    table, tenants = config.gateway, config.tenants.items()
    named = [("gateway.listen", table.listen), ("gateway.status_listen", table.status_listen)]
    attempts: list[Callable[[], object]] = [
        partial(require_protected, config),
        partial(require_usable, config),
        partial(_require_passable, config),
        partial(require_addresses_apart, config, named),
        lambda: server_tls(gateway_tls(config)),
    ]
    if table.engine_token is not None:
        attempts.append(partial(config.references.secret, "gateway.engine_token", table.engine_token))
    if (engine_files := gateway_engine_tls(config)) is not None:
        attempts.append(partial(client_context, engine_files))
    if table.tokenizer is not None:
        attempts.append(partial(_require_tokenizer, config))
    attempts += [partial(config.chain_secret, name) for name, tenant in tenants if tenant.secret is not None]
    with_token = [name for name, tenant in tenants if tenant.token is not None]
    if with_token and config.pool.address:
        attempts.append(lambda: client_tls(pool_tls(config), config.pool.tls_server_name))
        attempts += [partial(config.pool_token, name) for name in with_token]
    return attempts


def _require_passable(config: Config) -> None:
    own = sorted(OWN.intersection(config.gateway.pass_parameters))
    if own:
        raise config.references.error_about(
            "gateway.pass_parameters",
            f"{', '.join(own)}: clients may not set what names a tenant, cache, server, file or code; leave it out",
        )


def _require_tokenizer(config: Config) -> None:
    assert config.gateway.tokenizer is not None
    file = config.references.path(config.gateway.tokenizer) / "tokenizer.json"
    if not file.is_file():
        raise config.references.error_about(
            "gateway.tokenizer", f"there is no {file}; name the folder of the engines' model"
        )


def require_protected(config: Config) -> None:
    """Raises `ConfigError` where clients on other machines could connect without TLS, and `insecure` is not set."""
    table = config.gateway
    host = table.listen.rpartition(":")[0].strip("[]")
    if table.insecure or gateway_tls(config) is not None or is_loopback(host):
        return
    raise ConfigError(
        f"gateway.listen: {table.listen} can be reached by other machines, and without TLS keys and prompts would "
        "travel in the clear. Set tls_certificate and tls_key, listen on 127.0.0.1, or set gateway.insecure = true "
        "behind something that ends TLS, or where you trust the network"
    )


def shows_tenants(table: GatewayConfig) -> bool:
    """Whether whoever reaches `status_listen` may see series of single tenants and API keys."""
    host = table.status_listen.rpartition(":")[0].strip("[]")
    return table.metrics_access == "tenants" or is_loopback(host)


def require_usable(config: Config) -> None:
    """Raises `ConfigError` where nobody could use the gateway: no key is accepted, or there is no engine."""
    if not config.gateway.engines:
        raise ConfigError('gateway.engines: missing; name one, e.g. engines = ["http://127.0.0.1:8000"]')
    if not accepted_api_keys(config):
        raise ConfigError("api_keys: no key_sha256 anywhere: nobody could use the gateway; give an [api_keys.NAME] one")


def most_connections(table: GatewayConfig) -> int:
    """`max_connections`, or fewer where this process may not have as many open files."""
    files = reachable_open_files()
    return max(1, min(table.max_connections, (files - files // 8 - OPEN_FILES_BESIDES) // OPEN_FILES_PER_CONNECTION))
