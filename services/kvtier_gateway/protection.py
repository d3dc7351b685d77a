"""What a gateway refuses to begin with."""

from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.net.address import is_loopback


def require_protected(config: Config) -> None:
    """Raises `ConfigError` where clients on other machines could connect without TLS, and `insecure` is not set."""
    table = config.gateway
    host = table.listen.rpartition(":")[0].strip("[]")
    if table.insecure or config.gateway_tls() is not None or is_loopback(host):
        return
    raise ConfigError(
        f"gateway.listen: {table.listen} can be reached by other machines, and without TLS keys and prompts would "
        "travel in the clear. Set tls_certificate and tls_key, listen on 127.0.0.1, or set gateway.insecure = true "
        "behind something that ends TLS, or where you trust the network"
    )


def require_usable(config: Config) -> None:
    """Raises `ConfigError` where nobody could use the gateway: no key is accepted, or there is no engine."""
    if not config.gateway.engines:
        raise ConfigError('gateway.engines: missing; name one, e.g. engines = ["http://127.0.0.1:8000"]')
    if not config.accepted_api_keys():
        raise ConfigError("api_keys: no key_sha256 anywhere: nobody could use the gateway; give an [api_keys.NAME] one")
