"""What a pool refuses to begin with: tokens and blocks in the clear on a network, unless somebody has said so."""

from kvtier.config import Config
from kvtier.config.tls_files import pool_service_tls
from kvtier.errors import ConfigError
from kvtier.net.address import Address, is_loopback


def require_protected(config: Config) -> None:
    """Raises `ConfigError` where other machines could connect without TLS, and `insecure` is not set.

    /healthz and /metrics may be anywhere; /tenants takes no token there (`tokens_in_clear`), and /metrics that asks for
    one is an error.
    """
    table = config.pool_service
    in_clear = tokens_in_clear(config)
    if table.metrics_access == "observer" and in_clear is not None:
        raise ConfigError(f"pool_service.metrics_access: nobody could read /metrics: {in_clear}")
    if table.insecure or pool_service_tls(config) is not None:
        return
    for field, addresses in (("listen", table.listen), ("grpc_listen", table.grpc_listen)):
        for text in addresses:
            if not Address.parse(text).is_of_this_machine:
                raise ConfigError(
                    f"pool_service.{field}: {text} can be reached by other machines, and without TLS tokens and "
                    "blocks would travel in the clear. Set tls_certificate and tls_key (docs/tls.md), listen on "
                    "127.0.0.1 or a Unix socket, or set pool_service.insecure = true where you trust the network"
                )


def tokens_in_clear(config: Config) -> str | None:
    """Why nobody may send a token to the HTTP port, and what to do; None: one may be sent."""
    table = config.pool_service
    host = table.http_listen.rpartition(":")[0].strip("[]")
    is_protected = table.insecure or table.tls_certificate is not None
    if is_protected or is_loopback(host):
        return None
    return (
        f"pool_service.http_listen: {table.http_listen} can be reached by other machines, and without TLS a token "
        "would travel in the clear. Set tls_certificate and tls_key, listen on 127.0.0.1, or set "
        "pool_service.insecure = true"
    )
