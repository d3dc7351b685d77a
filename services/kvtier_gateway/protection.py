"""What a gateway refuses to begin with."""

from kvtier.config import Config
from kvtier.config.accepted import accepted_api_keys
from kvtier.config.tls_files import gateway_tls
from kvtier.errors import ConfigError
from kvtier.net.address import is_loopback


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


def require_usable(config: Config) -> None:
    """Raises `ConfigError` where nobody could use the gateway: no key is accepted, or there is no engine."""
    if not config.gateway.engines:
        raise ConfigError('gateway.engines: missing; name one, e.g. engines = ["http://127.0.0.1:8000"]')
    if not accepted_api_keys(config):
        raise ConfigError("api_keys: no key_sha256 anywhere: nobody could use the gateway; give an [api_keys.NAME] one")
