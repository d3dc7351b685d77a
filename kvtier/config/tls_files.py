"""The files for TLS of every end, as configured."""

from pathlib import Path

from kvtier.config.config import Config
from kvtier.net.certificates import TlsFiles


def pool_tls(config: Config) -> TlsFiles | None:
    """The engine's files for TLS towards the pool; None without TLS.

    :raises ConfigError: without TLS the token would travel over a network in the clear, and nobody has allowed it.
    """
    pool, error = config.pool, config.references.error_about
    if pool.tls_ca is None:
        for key in ("tls_certificate", "tls_key", "tls_server_name"):
            if getattr(pool, key) is not None:
                raise error(f"pool.{key}", "needs tls_ca, which turns TLS on: name the CA of the pool")
        exposed = [] if pool.insecure else pool.addresses_elsewhere()
        if exposed:
            raise error(
                "pool.address",
                f"without TLS, token and blocks would travel to {', '.join(exposed)} in the clear. Set pool.tls_ca "
                "(docs/tls.md), leave out this way, or set pool.insecure = true where you trust the network",
            )
        return None
    return _files(config, "pool", pool.tls_certificate, pool.tls_key, pool.tls_ca)


def pool_service_tls(config: Config) -> TlsFiles | None:
    """The pool service's files for TLS; None without TLS."""
    service = config.pool_service
    if service.tls_certificate is None and service.tls_key is None and service.tls_client_ca is not None:
        raise config.references.error_about(
            "pool_service.tls_client_ca", "a server needs a certificate, too: set tls_certificate and tls_key"
        )
    return _files(
        config, "pool_service", service.tls_certificate, service.tls_key, service.tls_client_ca, ca_key="tls_client_ca"
    )


def gateway_tls(config: Config) -> TlsFiles | None:
    """The gateway's files for TLS towards clients; None without TLS."""
    return _files(config, "gateway", config.gateway.tls_certificate, config.gateway.tls_key)


def engine_tls(config: Config) -> TlsFiles | None:
    """The files of `kvtier engine` for TLS; None without TLS."""
    return _files(config, "engine", config.engine.tls_certificate, config.engine.tls_key)


def gateway_engine_tls(config: Config) -> TlsFiles | None:
    """The CA of the gateway's engines; None where it is one that the system knows."""
    return _files(config, "gateway", None, None, config.gateway.engine_tls_ca, ca_key="engine_tls_ca")


def _files(
    config: Config,
    table: str,
    certificate: Path | None,
    key: Path | None,
    ca: Path | None = None,
    *,
    ca_key: str = "tls_ca",
) -> TlsFiles | None:
    """None where none of them is set."""
    if certificate is None and key is None and ca is None:
        return None
    references = config.references
    certificate, key, ca = (None if path is None else references.path(path) for path in (certificate, key, ca))
    of_certificate, of_key, of_ca = (
        references.name_of(f"{table}.{name}") for name in ("tls_certificate", "tls_key", ca_key)
    )
    return TlsFiles(certificate=certificate, key=key, ca=ca, names=(of_certificate, of_key, of_ca))
