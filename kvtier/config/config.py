"""The whole configuration, and the secrets and paths that it names."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pydantic import (
    ByteSize,
    Field,
    PrivateAttr,
)

from kvtier.codec.sealed_form import StorageSeal, StorageSeals
from kvtier.codec.sealing import Purpose, SealingKeys, parse_keys
from kvtier.config.credentials import AcceptedToken, Role, RoleConfig, TokenConfig
from kvtier.config.engine import EngineConfig
from kvtier.config.events import EventsConfig
from kvtier.config.fields import OVERRIDE_PREFIX, Section
from kvtier.config.gateway import ApiKeyConfig, GatewayConfig
from kvtier.config.log import LogConfig
from kvtier.config.pool import PoolConfig
from kvtier.config.pool_service import PoolServiceConfig
from kvtier.config.tenant import TenantConfig
from kvtier.config.tiers import CacheConfig, DiskConfig, HostConfig, default_load_threads
from kvtier.config.tracing import TracingConfig
from kvtier.errors import ConfigError
from kvtier.identity.keys import tenant_id
from kvtier.net.certificates import TlsFiles

_DIGESTS_OF_NOTHING = frozenset(hashlib.sha256(nothing).hexdigest() for nothing in (b"", b"\n"))
"""What a recipe makes of a token that it failed to make."""
_HOST_BYTES, _STAGING_BYTES = 1 << 30, 512 << 20


class Config(Section):
    """The whole file. Made by `load_config` or `parse_config`."""

    tenant: str | None = None
    """The tenant of this engine. Where a gateway names tenants, one of those that it may name."""
    gateway_tenants: list[str] = Field(default=[])
    """Tenants that a request to this engine may name for itself. Only for engines that only a gateway reaches, which
    lets no client choose: whoever names a tenant reads its cache."""
    tenants: dict[str, TenantConfig] = Field(default={})
    """The tenants, each a table by its name."""
    operators: dict[str, RoleConfig] = Field(default={})
    """Pool only: who administers all tenants over the HTTP port, and has no blocks."""
    observers: dict[str, RoleConfig] = Field(default={})
    """Pool only: who sees there what all tenants have together."""
    api_keys: dict[str, ApiKeyConfig] = Field(default={})
    """Gateway only: the keys of its clients, each a table by a name that logs and metrics show."""
    engine: EngineConfig = EngineConfig()
    cache: CacheConfig = CacheConfig()
    host: HostConfig = HostConfig()
    disk: DiskConfig = DiskConfig()
    pool: PoolConfig = PoolConfig()
    pool_service: PoolServiceConfig = PoolServiceConfig()
    gateway: GatewayConfig = GatewayConfig()
    log: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()
    events: EventsConfig = EventsConfig()

    _source: str = PrivateAttr("configuration")
    _folder: Path = PrivateAttr(Path())
    _environ: Mapping[str, str] = PrivateAttr(default_factory=dict)
    _file: Path | None = PrivateAttr(None)
    """What it was loaded from. The private fields are set by `kvtier.config.parsing` before anybody has it."""
    _secrets: dict[str, str] = PrivateAttr(default_factory=dict)
    """What `_resolve` has read, by reference: a file is read once, for it may be a pipe."""

    def engine_tenants(self) -> list[str]:
        """The tenants that this engine serves: its own one first, if it has one, then those that a gateway may name,
        and those with API keys."""
        own = [self.tenant] if self.tenant is not None else []
        names = list(dict.fromkeys([*own, *self.gateway_tenants, *self.key_tenants()]))
        if not names:
            raise self._error("tenant", 'missing; name one of [tenants.*], e.g. tenant = "default"')
        return names

    def key_tenants(self) -> list[str]:
        """The tenants whose clients have API keys; none where a gateway names tenants, whose clients they are then."""
        return [] if self.gateway_tenants else list(dict.fromkeys(table.tenant for table in self.api_keys.values()))

    @property
    def is_of_an_engine(self) -> bool:
        """Whether the file says whose blocks an engine has, which every engine needs."""
        return self.tenant is not None or bool(self.gateway_tenants) or bool(self.key_tenants())

    def only_tenant(self) -> str:
        """The tenant of an engine whose requests cannot say whose they are."""
        if self.gateway_tenants:
            raise self._error(
                "gateway_tenants",
                "only kvtier's own engine and vLLM's KvtierConnector take tenants from requests; leave it out",
            )
        if self.tenant is None and self.key_tenants():
            raise self._error("tenant", "missing; only `kvtier engine` knows tenants by [api_keys.*]")
        return self.engine_tenants()[0]

    def chain_secret(self, name: str) -> bytes:
        """The secret of one of the engine's tenants."""
        tenant = self.tenants[name]
        key = f"tenants.{name}.secret"
        if tenant.secret is None:
            raise self._error(key, 'missing; set it to "env:NAME" or "file:PATH" of at least 16 random bytes')
        return self._chain_secret(key, tenant.secret)

    def previous_secrets(self, name: str) -> list[tuple[bytes, float]]:
        """The secrets that one of the engine's tenants had before, the newest first, and when each retires, in seconds
        since 1970: also those that have retired.

        Raises `ConfigError` when one cannot be read, and where two are the same, the present one included.
        """
        known = {self.chain_secret(name): "the secret"}
        found: list[tuple[bytes, float]] = []
        for place, previous in enumerate(self.tenants[name].previous_secrets):
            entry = f"previous_secrets[{place}]"
            key = f"tenants.{name}.{entry}"
            secret = self._chain_secret(key, previous.secret)
            if secret in known:
                raise self._error(key, f"the same as {known[secret]}; name secrets that were replaced, each once")
            known[secret] = entry
            found.append((secret, previous.retire_at.timestamp()))
        return found

    def storage_seals(self, names: Iterable[str]) -> StorageSeals:
        """How blocks of these tenants are sealed on disk and in Redis, where they have `storage_keys`."""
        seals = {}
        for name in names:
            keys = self._sealing_keys(Purpose.STORAGE, name, "storage_keys")
            if keys is not None:
                seals[tenant_id(name)] = StorageSeal(keys, self.tenants[name].storage_reads_plain)
        return StorageSeals(seals)

    def carriage_keys(self, name: str) -> SealingKeys | None:
        """The keys of one of the engine's tenants for what goes to the pool; None: it goes as it is."""
        return self._sealing_keys(Purpose.CARRIAGE, name, "sealing_keys")

    def keys_text(self, name: str, field: str) -> str | None:
        """What a tenant's `field` of keys refers to, for a process that has neither the file nor the variable."""
        reference: str | None = getattr(self.tenants[name], field)
        return None if reference is None else self._resolve(f"tenants.{name}.{field}", reference)

    def host_bytes(self) -> int:
        """Host memory of a rank: what is set, for all if there are several (see `of_rank`), or what suits the pool."""
        if self.host.capacity_bytes is not None:
            return int(self.host.capacity_bytes)
        is_beside_pool = any(address.startswith("unix:") for address in self.pool.address)
        return _STAGING_BYTES if is_beside_pool else _HOST_BYTES

    def of_rank(self, num_ranks: int, num_processes: int) -> "Config":
        """The configuration of one rank: its part of what is meant for all of them.

        :param num_ranks: of the engine, on this host.
        :param num_processes: ranks of all engines that share this host's cores.
        """
        host, cache = self.host, self.cache
        if host.capacity_bytes is not None:
            host = host.model_copy(update={"capacity_bytes": ByteSize(host.capacity_bytes // num_ranks)})
        if "load_threads" not in cache.model_fields_set:
            cache = cache.model_copy(update={"load_threads": default_load_threads(num_processes)})
        return self.model_copy(update={"host": host, "cache": cache})

    def without_direct_loads(self) -> "Config":
        """Returns this configuration for a device that cannot copy from memory that it may only read."""
        return self.model_copy(update={"pool": self.pool.model_copy(update={"direct_loads": False})})

    def verifies_on_device(self, device_type: str) -> bool:
        """Whether a sample of what is loaded from host memory is verified on the device, too.

        Raises `ConfigError` where `cache.verify_loads` asks for that and it cannot be had: a setting that did nothing
        would be taken for a check that found nothing.

        :param device_type: of the KV, `cuda` or `cpu`.
        """
        if self.cache.verify_loads != "device":
            return False
        if device_type != "cuda":
            raise self._error("cache.verify_loads", f'"device", but KV is on {device_type}; set it to "host"')
        if self.engine.lossy_codec != "none":
            raise self._error(
                "cache.verify_loads",
                '"device" compares bytes, and engine.lossy_codec changes them on their way; set it to "host"',
            )
        return True

    def pool_token(self, name: str) -> str | None:
        """The bearer token of one of the engine's tenants. None: the engine's certificate stands for it."""
        tenant = self.tenants[name]
        key = f"tenants.{name}.token"
        if tenant.token is None:
            if self.pool.tls_certificate is not None and len(self.engine_tenants()) == 1:
                return None
            raise self._error(key, 'missing; the pool at pool.address wants it: set "env:NAME" or "file:PATH"')
        return self._resolve(key, tenant.token)

    def accepted_tokens(self) -> list[AcceptedToken]:
        """Returns the pool service's tokens, those that have expired included; no two have the same digest."""
        return self._accepted(self._configured_tokens())

    def accepted_api_keys(self) -> list[AcceptedToken]:
        """Returns the keys of the gateway's clients, as `accepted_tokens` does the pool's tokens."""
        return self._accepted(
            (f"api_keys.{name}.key_sha256", Role.CLIENT, name, token)
            for name, table in self.api_keys.items()
            for token in table.key_sha256
        )

    def accepted_engine_keys(self) -> list[AcceptedToken]:
        """Returns the keys of the clients of `kvtier engine`, named by their tenants. Without any, whoever reaches its
        port may use it; where a gateway names tenants there are none, for they are keys of the gateway's clients."""
        if self.gateway_tenants:
            return []
        return self._accepted(
            (f"api_keys.{name}.key_sha256", Role.TENANT, table.tenant, token)
            for name, table in self.api_keys.items()
            for token in table.key_sha256
        )

    def _accepted(self, tokens: Iterable[tuple[str, Role, str, TokenConfig]]) -> list[AcceptedToken]:
        accepted: dict[str, AcceptedToken] = {}
        for key, role, name, token in tokens:
            digest = self._digest(key, token)
            expires_at_s = None if token.expires_at is None else token.expires_at.timestamp()
            found = AcceptedToken(digest, role, name, expires_at_s)
            other = accepted.setdefault(digest, found)
            if (other.role, other.name) != (role, name):
                raise self._error(key, f"the same token as {other.role} {other.name!r}: each must have its own")
            if other is not found:
                raise self._error(key, f"the token {found.id} stands there twice; remove one of the two")
        return list(accepted.values())

    def require_clients(self) -> None:
        """Raises `ConfigError` where the pool service would accept the credentials of no tenant."""
        if not any(tenant.token_sha256 or tenant.certificate_names for tenant in self.tenants.values()):
            raise self._error(
                "tenants",
                "no token_sha256 anywhere: nobody could use the pool; give a [tenants.NAME] one, or "
                "`kvtier pool serve` --tenant NAME=SHA256",
            )

    def token_digest(self, name: str, token: TokenConfig) -> str:
        """Returns the digest of one of a tenant's tokens, wherever the entry says that it is."""
        return self._digest(f"tenants.{name}.token_sha256", token)

    def pool_files(self) -> list[Path]:
        """The files that say whom the pool service lets in: the configuration's, and those that its tokens name; and
        those of storage keys."""
        named = [token.sha256 for _, _, _, token in self._configured_tokens()]
        named += [tenant.storage_keys for tenant in self.tenants.values() if tenant.storage_keys is not None]
        return [*([self._file] if self._file is not None else []), *self._files_of(named)]

    def gateway_files(self) -> list[Path]:
        """The files that say whom the gateway lets in, and to which engines requests go."""
        named = [token.sha256 for table in self.api_keys.values() for token in table.key_sha256]
        return [*([self._file] if self._file is not None else []), *self._files_of(named)]

    def accepted_certificates(self) -> dict[str, str]:
        """Returns the pool service's client certificates: name in a certificate -> tenant name."""
        accepted: dict[str, str] = {}
        for tenant_name, tenant in self.tenants.items():
            for name in tenant.certificate_names:
                key = f"tenants.{tenant_name}.certificate_names"
                if self.pool_service.tls_client_ca is None:
                    raise self._error(key, "nobody verifies certificates without pool_service.tls_client_ca; set it")
                if accepted.setdefault(name, tenant_name) != tenant_name:
                    raise self._error(key, f"{name!r} is also of tenant {accepted[name]!r}: tenants must differ")
        return accepted

    def pool_tls(self) -> TlsFiles | None:
        """The engine's files for TLS towards the pool; None without TLS.

        :raises ConfigError: without TLS the token would travel over a network in the clear, and nobody has allowed it.
        """
        pool = self.pool
        if pool.tls_ca is None:
            for key in ("tls_certificate", "tls_key", "tls_server_name"):
                if getattr(pool, key) is not None:
                    raise self._error(f"pool.{key}", "needs tls_ca, which turns TLS on: name the CA of the pool")
            exposed = [] if pool.insecure else pool.addresses_elsewhere()
            if exposed:
                raise self._error(
                    "pool.address",
                    f"without TLS, token and blocks would travel to {', '.join(exposed)} in the clear. Set pool.tls_ca "
                    "(docs/tls.md), leave out this way, or set pool.insecure = true where you trust the network",
                )
            return None
        return TlsFiles(
            certificate=self._resolved(pool.tls_certificate),
            key=self._resolved(pool.tls_key),
            ca=self._resolved(pool.tls_ca),
        )

    def pool_service_tls(self) -> TlsFiles | None:
        """The pool service's files for TLS; None without TLS."""
        service = self.pool_service
        if service.tls_certificate is None and service.tls_key is None and service.tls_client_ca is None:
            return None
        if service.tls_certificate is None and service.tls_key is None:
            raise self._error(
                "pool_service.tls_client_ca", "a server needs a certificate, too: set tls_certificate and tls_key"
            )
        return TlsFiles(
            certificate=self._resolved(service.tls_certificate),
            key=self._resolved(service.tls_key),
            ca=self._resolved(service.tls_client_ca),
        )

    def gateway_tls(self) -> TlsFiles | None:
        """The gateway's files for TLS towards clients; None without TLS."""
        gateway = self.gateway
        if gateway.tls_certificate is None and gateway.tls_key is None:
            return None
        return TlsFiles(certificate=self._resolved(gateway.tls_certificate), key=self._resolved(gateway.tls_key))

    def engine_tls(self) -> TlsFiles | None:
        """The files of `kvtier engine` for TLS; None without TLS."""
        engine = self.engine
        if engine.tls_certificate is None and engine.tls_key is None:
            return None
        return TlsFiles(certificate=self._resolved(engine.tls_certificate), key=self._resolved(engine.tls_key))

    def redis_password(self) -> str | None:
        """The password of the pool's Redis; None without one."""
        reference = self.pool_service.redis_password
        return None if reference is None else self._resolve("pool_service.redis_password", reference)

    def secret_of(self, what: str, reference: str) -> str:
        """The secret that `env:NAME` or `file:PATH` refers to. Raises `ConfigError`, which names `what` it is for."""
        return self._resolve(what, reference)

    def resolve_path(self, path: Path) -> Path:
        """A path of the file: relative ones are relative to its folder."""
        return self._folder / path.expanduser()

    def _files_of(self, references: Iterable[str]) -> list[Path]:
        return [self._folder / text.removeprefix("file:") for text in references if text.startswith("file:")]

    def _chain_secret(self, key: str, reference: str) -> bytes:
        secret = self._resolve(key, reference).encode()
        if len(secret) < 16:
            raise self._error(key, f"only {len(secret)} bytes; make one with: openssl rand -hex 32")
        return secret

    def _sealing_keys(self, purpose: Purpose, name: str, field: str) -> SealingKeys | None:
        """None where the tenant has none. Raises `ConfigError` for what are no keys, and without `cryptography`."""
        text = self.keys_text(name, field)
        if text is None:
            return None
        try:
            return SealingKeys(purpose, tenant_id(name), parse_keys(text))
        except ConfigError as error:
            raise self._error(f"tenants.{name}.{field}", str(error)) from error

    def _configured_tokens(self) -> Iterator[tuple[str, Role, str, TokenConfig]]:
        """The tokens of all roles: key, role, name, entry."""
        tables = (
            ("tenants", Role.TENANT, self.tenants),
            ("operators", Role.OPERATOR, self.operators),
            ("observers", Role.OBSERVER, self.observers),
        )
        for table, role, named in tables:
            for name, of_name in named.items():
                for token in of_name.token_sha256:
                    yield f"{table}.{name}.token_sha256", role, name, token

    def _digest(self, key: str, token: TokenConfig) -> str:
        text = token.sha256
        digest = self._resolve(key, text) if text.startswith(("env:", "file:")) else text
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise self._error(key, "not 64 lower-case hex digits; make it with: printf %s TOKEN | sha256sum")
        if digest in _DIGESTS_OF_NOTHING:
            raise self._error(key, "the digest of an empty token; make a token with: openssl rand -hex 32")
        return digest

    def _resolved(self, path: Path | None) -> Path | None:
        return None if path is None else self.resolve_path(path)

    def _resolve(self, key: str, reference: str) -> str:
        if reference in self._secrets:
            return self._secrets[reference]
        scheme, _, name = reference.partition(":")
        if scheme == "env":
            value = self._environ.get(name, "").strip()
            remedy = f"environment variable {name} is missing or empty; export it"
        elif scheme == "file":
            path = self._folder / name
            try:
                value = path.read_text().strip()
            except (OSError, ValueError) as error:
                raise self._error(key, f"cannot read {path}: {error}") from error
            remedy = f"file {path} is empty; write the secret into it"
        else:
            raise self._error(key, 'use "env:NAME" or "file:PATH": secrets do not belong into the file itself')
        if not value:
            raise self._error(key, remedy)
        self._secrets[reference] = value
        return value

    def _error(self, key: str, text: str) -> ConfigError:
        variable = OVERRIDE_PREFIX + key.partition("[")[0].upper().replace(".", "__")
        source = f"environment variable {variable}" if variable in self._environ else self._source
        return ConfigError(f"{source}: {key}: {text}")
