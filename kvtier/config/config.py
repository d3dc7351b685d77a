"""The whole configuration, and the secrets that it names."""

from collections.abc import Iterable
from dataclasses import replace

from pydantic import (
    ByteSize,
    Field,
    PrivateAttr,
)

from kvtier.codec.sealed_form import StorageSeal, StorageSeals
from kvtier.codec.sealing import Purpose, SealingKeys, parse_keys
from kvtier.config.credentials import RoleConfig
from kvtier.config.engine import EngineConfig
from kvtier.config.events import EventsConfig
from kvtier.config.fields import Section
from kvtier.config.gateway import ApiKeyConfig, GatewayConfig
from kvtier.config.log import LogConfig
from kvtier.config.pool import PoolConfig
from kvtier.config.pool_service import PoolServiceConfig
from kvtier.config.references import References
from kvtier.config.tenant import TenantConfig
from kvtier.config.tiers import CacheConfig, DiskConfig, HostConfig, default_load_threads
from kvtier.config.tracing import TracingConfig
from kvtier.errors import ConfigError
from kvtier.identity.keys import tenant_id

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

    _references: References = PrivateAttr(default_factory=References)
    """Set by `kvtier.config.parsing` before anybody has the configuration."""

    @property
    def references(self) -> References:
        """What it refers to outside itself, and how what is wrong with it is told."""
        return self._references

    def with_options(self, table: str, section: Section, names: Iterable[str]) -> "Config":
        """Returns a copy with another table, some of whose keys options of a command line have set: errors say so."""
        copy = self.model_copy(update={table: section})
        copy._references = replace(self._references, options=frozenset(f"{table}.{name}" for name in names))
        return copy

    def engine_tenants(self) -> list[str]:
        """The tenants that this engine serves: its own one first, if it has one, then those that a gateway may name,
        and those with API keys."""
        own = [self.tenant] if self.tenant is not None else []
        names = list(dict.fromkeys([*own, *self.gateway_tenants, *self.key_tenants()]))
        if not names:
            raise self.references.error_about("tenant", 'missing; name one of [tenants.*], e.g. tenant = "default"')
        return names

    def key_tenants(self) -> list[str]:
        """The tenants whose clients have API keys; none where a gateway names tenants, whose clients they are then."""
        return [] if self.gateway_tenants else list(dict.fromkeys(table.tenant for table in self.api_keys.values()))

    @property
    def is_of_an_engine(self) -> bool:
        """Whether the file says whose blocks an engine has, which every engine needs. In a file with the table of a
        gateway, API keys are that one's."""
        has_keys = "gateway" not in self.model_fields_set and bool(self.key_tenants())
        return self.tenant is not None or bool(self.gateway_tenants) or has_keys

    def only_tenant(self) -> str:
        """The tenant of an engine whose requests cannot say whose they are."""
        if self.gateway_tenants:
            raise self.references.error_about(
                "gateway_tenants",
                "only kvtier's own engine and vLLM's KvtierConnector take tenants from requests; leave it out",
            )
        if self.tenant is None and self.key_tenants():
            raise self.references.error_about("tenant", "missing; only `kvtier engine` knows tenants by [api_keys.*]")
        return self.engine_tenants()[0]

    def chain_secret(self, name: str) -> bytes:
        """The secret of one of the engine's tenants."""
        tenant = self.tenants[name]
        key = f"tenants.{name}.secret"
        if tenant.secret is None:
            raise self.references.error_about(
                key, 'missing; set it to "env:NAME" or "file:PATH" of at least 16 random bytes'
            )
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
                raise self.references.error_about(
                    key, f"the same as {known[secret]}; name secrets that were replaced, each once"
                )
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
        return None if reference is None else self.references.secret(f"tenants.{name}.{field}", reference)

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
            raise self.references.error_about(
                "cache.verify_loads", f'"device", but KV is on {device_type}; set it to "host"'
            )
        if self.engine.lossy_codec != "none":
            raise self.references.error_about(
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
            raise self.references.error_about(
                key, 'missing; the pool at pool.address wants it: set "env:NAME" or "file:PATH"'
            )
        token = self.references.secret(key, tenant.token)
        if tenant.secret is not None and token == self.references.secret(f"tenants.{name}.secret", tenant.secret):
            raise self.references.error_about(
                key, "the same as the tenant's secret, which the pool must not know; make another: openssl rand -hex 32"
            )
        return token

    def redis_password(self) -> str | None:
        """The password of the pool's Redis, of this moment where a file has it; None without one."""
        reference = self.pool_service.redis_password
        return None if reference is None else self.references.newest_secret("pool_service.redis_password", reference)

    def _chain_secret(self, key: str, reference: str) -> bytes:
        secret = self.references.secret(key, reference).encode()
        if len(secret) < 16:
            raise self.references.error_about(key, f"only {len(secret)} bytes; make one with: openssl rand -hex 32")
        return secret

    def _sealing_keys(self, purpose: Purpose, name: str, field: str) -> SealingKeys | None:
        """None where the tenant has none. Raises `ConfigError` for what are no keys, and without `cryptography`."""
        text = self.keys_text(name, field)
        if text is None:
            return None
        try:
            return SealingKeys(purpose, tenant_id(name), parse_keys(text))
        except ConfigError as error:
            raise self.references.error_about(f"tenants.{name}.{field}", str(error)) from error
