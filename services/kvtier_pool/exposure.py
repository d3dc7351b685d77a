"""What a pool refuses to begin with: tokens and blocks in the clear on a network, unless somebody has said so."""

import ipaddress

from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.net.address import Address


def require_protected(config: Config) -> None:
    """Raises `ConfigError` where other machines could connect without TLS, and `insecure` is not set.

    /healthz and /metrics may be anywhere: nobody sends a token there.
    """
    table = config.pool_service
    if table.insecure or config.pool_service_tls() is not None:
        return
    for field, addresses in (("listen", table.listen), ("grpc_listen", table.grpc_listen)):
        for text in addresses:
            if not _is_of_this_machine(Address.parse(text)):
                raise ConfigError(
                    f"pool_service.{field}: {text} can be reached by other machines, and without TLS tokens and "
                    "blocks would travel in the clear. Set tls_certificate and tls_key (docs/tls.md), listen on "
                    "127.0.0.1 or a Unix socket, or set pool_service.insecure = true where you trust the network"
                )


def _is_of_this_machine(address: Address) -> bool:
    if address.path or address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:  # a name, which may be of any network
        return False
