"""Whom a pool, a gateway and an engine let in: the credentials that a configuration accepts, and the files of them."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from kvtier.config.config import Config
from kvtier.config.credentials import AcceptedToken, Role, TokenConfig, require_digest


def require_clients(config: Config) -> None:
    """Raises `ConfigError` where the pool service would accept the credentials of no tenant."""
    if not any(tenant.token_sha256 or tenant.certificate_names for tenant in config.tenants.values()):
        raise config.references.error_about(
            "tenants",
            "no token_sha256 anywhere: nobody could use the pool; give a [tenants.NAME] one, or "
            "`kvtier pool serve` --tenant NAME=SHA256",
        )


def accepted_tokens(config: Config) -> list[AcceptedToken]:
    """Returns the pool service's tokens, those that have expired included; no two have the same digest."""
    return _accepted(config, _pool_tokens(config))


def accepted_api_keys(config: Config) -> list[AcceptedToken]:
    """Returns the keys of the gateway's clients, as `accepted_tokens` does the pool's tokens."""
    return _accepted(
        config,
        (
            (f"api_keys.{name}.key_sha256", Role.CLIENT, name, token)
            for name, table in config.api_keys.items()
            for token in table.key_sha256
        ),
    )


def accepted_engine_keys(config: Config) -> list[AcceptedToken]:
    """Returns the keys of the clients of `kvtier engine`, named by their tenants. Without any, whoever reaches its
    port may use it; where a gateway names tenants there are none, for they are keys of the gateway's clients."""
    if config.gateway_tenants:
        return []
    return _accepted(
        config,
        (
            (f"api_keys.{name}.key_sha256", Role.TENANT, table.tenant, token)
            for name, table in config.api_keys.items()
            for token in table.key_sha256
        ),
    )


def accepted_certificates(config: Config) -> dict[str, str]:
    """Returns the pool service's client certificates: name in a certificate -> tenant name."""
    accepted: dict[str, str] = {}
    for tenant_name, tenant in config.tenants.items():
        for name in tenant.certificate_names:
            key, error = f"tenants.{tenant_name}.certificate_names", config.references.error_about
            if config.pool_service.tls_client_ca is None:
                raise error(key, "nobody verifies certificates without pool_service.tls_client_ca; set it")
            if "*" in name:
                raise error(key, f"{name!r} matches no certificate: names are compared whole; give each of them")
            if accepted.setdefault(name, tenant_name) != tenant_name:
                raise error(key, f"{name!r} is also of tenant {accepted[name]!r}: tenants must differ")
    return accepted


def token_digest(config: Config, key: str, token: TokenConfig) -> str:
    """Returns the digest of one token, wherever its entry says that it is. Raises `ConfigError`, which names `key`."""
    text, references = token.sha256, config.references
    if not text.startswith(("env:", "file:")):
        return text
    digest = references.secret(key, text)
    try:
        require_digest(digest)
    except ValueError as error:
        raise references.error_about(key, str(error)) from error
    return digest


def pool_files(config: Config) -> list[Path]:
    """The files that say whom the pool service lets in: the configuration's, and those that its tokens name; and
    those of storage keys."""
    named = [token.sha256 for _, _, _, token in _pool_tokens(config)]
    named += [tenant.storage_keys for tenant in config.tenants.values() if tenant.storage_keys is not None]
    return config.references.files(named)


def gateway_files(config: Config) -> list[Path]:
    """The files that say whom the gateway lets in, and to which engines requests go."""
    return config.references.files(token.sha256 for table in config.api_keys.values() for token in table.key_sha256)


def _pool_tokens(config: Config) -> Iterator[tuple[str, Role, str, TokenConfig]]:
    """The tokens of all roles: key, role, name, entry."""
    tables = (
        ("tenants", Role.TENANT, config.tenants),
        ("operators", Role.OPERATOR, config.operators),
        ("observers", Role.OBSERVER, config.observers),
    )
    for table, role, named in tables:
        for name, of_name in named.items():
            for token in of_name.token_sha256:
                yield f"{table}.{name}.token_sha256", role, name, token


def _accepted(config: Config, tokens: Iterable[tuple[str, Role, str, TokenConfig]]) -> list[AcceptedToken]:
    accepted: dict[str, AcceptedToken] = {}
    for key, role, name, token in tokens:
        digest, error = token_digest(config, key, token), config.references.error_about
        expires_at_s = None if token.expires_at is None else token.expires_at.timestamp()
        found = AcceptedToken(digest, role, name, expires_at_s)
        other = accepted.setdefault(digest, found)
        if (other.role, other.name) != (role, name):
            raise error(key, f"the same token as {other.role} {other.name!r}: each must have its own")
        if other is not found:
            raise error(key, f"the token {found.id} stands there twice; remove one of the two")
    return list(accepted.values())
