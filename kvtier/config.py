"""Configuration: one TOML file, environment overrides, frozen after parsing.

    tenant = "red"                        # whose cache this engine uses

    [tenants.red]
    secret = "env:KVTIER_RED_SECRET"      # keys the prefix chain; stays in the engines
    token = "file:/run/secrets/red"       # proves to the pool who we are
    token_sha256 = ["..."]                # the pool's side: what the token must hash to

    [pool]
    address = "127.0.0.1:7600"

Any value can be overridden by `KVTIER__SECTION__FIELD`, e.g. `KVTIER__POOL__ADDRESS=pool:7600`; lists and
numbers are written as in TOML. Unknown keys are errors that name the nearest valid one. Sizes are bytes
as integers, or text with a unit: `"512MiB"`, `"2GiB"`.

Nothing else in kvtier reads the environment.
"""

import difflib
import hashlib
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
)

from kvtier.errors import ConfigError, InvalidInputError
from kvtier.keys import tenant_id
from kvtier.wire.address import GRPC_PREFIX, Address
from kvtier.wire.certificates import TlsFiles

OVERRIDE_PREFIX = "KVTIER__"

Bytes = Annotated[ByteSize, Field(ge=0, le=2**60)]
Seconds = Annotated[float, Field(gt=0, le=3600)]
Count = Annotated[int, Field(ge=1)]
WritePolicyName = Literal["write_through", "write_through_selective", "write_back"]
"""A `kvtier.tiers.write_policy.WritePolicy`: at once, at the n-th use, or at eviction."""
CodecName = Literal["raw", "lz4"]
"""A `kvtier.codec.Codec`, for what is written from now on; every tier reads all of them."""


def _checked_address(text: str) -> str:
    if not text.startswith(GRPC_PREFIX):
        try:
            Address.parse(text)
        except ConfigError as error:
            raise ValueError(str(error)) from error
    return text


BlockAddress = Annotated[str, AfterValidator(_checked_address)]
"""Text that `Address.parse` takes, or a gRPC address behind `grpc:`."""


def _as_list(value: Any) -> Any:
    """One address where several may stand."""
    return [value] if isinstance(value, str) else value


class Section(BaseModel):
    """A table of the file. Frozen; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class TenantConfig(Section):
    """One tenant. Values of secrets are `env:NAME` or `file:PATH`, never the secret itself."""

    secret: str | None = None
    """At least 16 random bytes that key the prefix chain. Engines only: the pool must not have it."""
    salt: str = ""
    """Separates caches under one secret. Changing it forgets everything."""
    token: str | None = None
    """Bearer token for the cache pool. Engines only."""
    token_sha256: list[str] = []
    """Pool only: lower-case hex SHA-256 of each token that is accepted, as text or as `env:` / `file:`."""
    certificate_names: list[Annotated[str, Field(min_length=1)]] = []
    """Pool only: DNS names and URIs, compared as they are. A client whose certificate has one of them among its subject
    alternative names needs no token. Needs `pool_service.tls_client_ca`."""


class EngineConfig(Section):
    """The engine of `kvtier engine serve`."""

    model: Path | None = None
    """Hugging Face folder with safetensors, or a GGUF file."""
    model_cache_dir: Path | None = None
    """Where a GGUF is dequantised to, once. Default: `~/.cache/kvtier/models`."""
    listen: str = "127.0.0.1:8000"
    """`host:port` of the OpenAI API; port 0 takes a free one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model and its KV are. `auto` takes the first CUDA device where torch and triton can use one. Engines on
    CPU and on CUDA do not share: their KV differs in the last bits."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Computation and KV. float32 takes twice the memory and flips no near ties."""
    num_threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Threads of a forward pass; 0 takes one per core."""
    kv_bytes: Bytes = ByteSize(2**30)
    """Device memory for paged KV. Too small: prefixes are evicted before they are hit, requests wait."""
    max_batch_tokens: Count = 4096
    """Tokens per step. Small: prefill in many chunks. Large: decoding requests wait longer for a prefill."""
    max_running: Count = 16
    """Requests in one batch."""
    cache: bool = True
    """False computes every prompt from scratch: no device hits, no tiers."""


class CacheConfig(Section):
    """What all tiers of an engine share."""

    tokens_per_block: Literal[1, 2, 4, 8, 16, 32, 64, 128, 256] = 16
    """Unit of hashing, sharing and transfer. Smaller hits more tokens, larger moves faster. Engines that
    differ do not share."""
    batch_blocks: Count = 32
    """Blocks per transfer. Smaller overlaps reads and copies better, larger has fewer round trips."""
    load_threads: Annotated[int, Field(ge=1, le=64)] = 2
    """Transfers at a time. 2 overlap reading and copying; more help tiers with latency. On CUDA each takes 64 MiB of
    device memory."""
    load_deadline_s: Seconds = 10.0
    """A fetch that takes longer is computed instead. Below the time of a good fetch, nothing hits."""
    lookup_deadline_s: Seconds = 1.0
    """A lookup that takes longer is a miss. A request waits this long at the most."""
    saving_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of host memory that may wait for lower tiers. Small drops saves in bursts, large crowds out fetches."""
    selective_uses: Annotated[int, Field(ge=1, le=1000)] = 2
    """At which use `write_through_selective` copies a block; computing it is the first. 1 is `write_through`."""
    clean_ahead_blocks: Annotated[int, Field(ge=0)] = 256
    """How many of the coldest device blocks are kept copied. 0 copies nothing but what was saved when full."""
    io_process: bool = sys.platform == "linux"
    """I/O of disk and pool in a process of its own, which costs about 40 MB; Linux only, and the default there. False
    does it in threads of the engine, which an engine busy in Python slows down to a tenth."""


class HostConfig(Section):
    """Host memory of an engine."""

    capacity_bytes: Bytes = ByteSize(2**30)
    """Also the staging area of every transfer: at least a few hundred blocks. Touched at start."""
    write_policy: WritePolicyName = "write_through"
    """When device blocks are copied here. `write_back` copies least, but other engines see blocks only after that."""


class DiskConfig(Section):
    """Local disk of an engine; off unless `directory` is set."""

    directory: Path | None = None
    """A folder for this engine process alone."""
    capacity_bytes: Bytes = ByteSize(10 * 2**30)
    """Never exceeded."""
    reserve_bytes: Bytes = ByteSize(2**30)
    """Free space left to others on the file system; below it the tier shrinks. Too small, and neighbours see a
    full disk; larger than what is free, and nothing is stored."""
    write_policy: WritePolicyName = "write_through"
    """When blocks in host memory are copied here. The other two spare the drive."""
    codec: CodecName = "raw"
    """`lz4` saves about a fifth of bf16 KV and costs more time than a fast drive does."""


class PoolConfig(Section):
    """Access to the shared cache pool; off unless `address` is set."""

    address: Annotated[list[BlockAddress], BeforeValidator(_as_list)] = []
    """`unix:/path` or `host:port` of the pool's `listen`, `grpc:host:port` of its `grpc_listen`, or a list of several
    of these: of the ways that work, the fastest is taken, which is the order here. Over a Unix socket, the pool shares
    its memory."""
    shared_memory: bool = True
    """Map the pool's memory where it is shared. Off to compare, or where descriptors cannot be passed."""
    tls_ca: Path | None = None
    """CAs, in PEM, of the pool's certificate. Turns TLS on, for all but Unix sockets; without, token and blocks travel
    in the clear."""
    tls_certificate: Path | None = None
    """This engine's certificate, for a pool with `tls_client_ca`. One in its tenant's `certificate_names` stands for
    the token."""
    tls_key: Path | None = None
    """Of that certificate."""
    tls_server_name: str | None = None
    """What the pool's certificate must be for; without, the host in `address`."""
    connect_timeout_s: Seconds = 1.0
    call_timeout_s: Annotated[float, Field(gt=0, le=30)] = 5.0
    """Deadline of one call; the pool itself ends those that take over a minute. Below the time of a good transfer
    of `batch_blocks`, nothing hits."""
    breaker_failures: Count = 3
    """Failures in a row after which the pool is left alone for `breaker_open_s`."""
    breaker_open_s: Seconds = 2.0
    """Then one call probes it. Short probes a dead pool often, long misses its return."""
    write_policy: WritePolicyName = "write_through"
    """When blocks in host memory are copied to the pool. The other two make engines share later, or less."""


class PoolServiceConfig(Section):
    """The service of `kvtier pool serve`."""

    listen: list[BlockAddress] = ["127.0.0.1:7600"]
    """Where engines connect (block protocol): `host:port` or `unix:/path`; port 0 takes a free one."""
    grpc_listen: list[str] = ["127.0.0.1:7601"]
    """Addresses of the gRPC API, likewise."""
    http_listen: str = "127.0.0.1:7602"
    """`host:port` of /healthz and /metrics."""
    tls_certificate: Path | None = None
    """Certificate chain, in PEM, of all ports but Unix sockets. Without, tokens and blocks travel in the clear. Renewed
    files count from the next connection on."""
    tls_key: Path | None = None
    """Of that certificate, not encrypted."""
    tls_client_ca: Path | None = None
    """CAs, in PEM, of clients' certificates: who has none is refused, but by `http_listen`, since probes have none."""
    shared_memory: bool = True
    """Engines on a Unix socket in `listen` map the memory tier instead of having blocks sent. Linux only."""
    socket_mode: Annotated[int, Field(ge=0, le=0o777)] = 0o600
    """Permissions of a Unix socket in `listen`; `0o660` lets a group in. Clients need a token besides."""
    max_connections: Count = 256
    """Of the block protocol, one thread each. An engine needs `load_threads` and two or three more."""
    memory_bytes: Bytes = ByteSize(2**30)
    """Memory tier; the process needs about 100 MB besides."""
    min_residency_s: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """So long a block stays in memory at least: writers hear FULL rather than that others lose what they have just been
    told is kept. Long enough to hear of a block and to fetch it. Memory takes `memory_bytes` in this time at most, so
    large refuses bursts; 0 forgets them. Does not count above a disk with `write_through`, which keeps what memory
    evicts."""
    disk_dir: Path | None = None
    """Folder of the disk tier, for this process alone; without it nothing survives a restart."""
    disk_bytes: Bytes = ByteSize(10 * 2**30)
    """Disk tier; never exceeded."""
    disk_reserve_bytes: Bytes = ByteSize(2**30)
    """Free space left to others on the file system; below it the disk tier shrinks."""
    disk_write_policy: WritePolicyName = "write_through"
    """When blocks in memory are copied to disk. With `write_back`, a killed pool forgets more."""
    disk_codec: CodecName = "raw"
    """`lz4` saves about a fifth of bf16 KV and costs more time than a fast drive does."""
    redis_url: str | None = None
    """Redis or Valkey below memory and disk, shared by all pools of a site: `redis://host:port/0`, `rediss://`,
    `unix://`, `redis+sentinel://host:port,host:port/service`, `redis+cluster://host:port`. Without: no such tier."""
    redis_username: str | None = None
    redis_password: str | None = None
    """`env:NAME` or `file:PATH`, never the password itself."""
    redis_ttl_s: Annotated[int, Field(ge=0, le=2**31)] = 86_400
    """A block that nobody uses for so long is forgotten by Redis; 0 leaves that to its `maxmemory-policy`."""
    redis_timeout_s: Annotated[float, Field(gt=0, le=30)] = 1.0
    """Deadline of one call."""
    redis_lookup_timeout_s: Annotated[float, Field(gt=0, le=30)] = 0.2
    """Deadline of one lookup. An engine's lookup waits for it when Redis hangs, until the breaker opens: keep it well
    below the engines' `lookup_deadline_s`, or they miss what the pool has itself."""
    redis_write_policy: WritePolicyName = "write_through"
    """When blocks in memory are copied to Redis. With the other two, pools share later, or less."""
    redis_codec: CodecName = "raw"
    """`lz4` saves about a fifth of bf16 KV: worth it where the network gives less than 0.4 GB/s, or 0.9 when blocks
    are mostly read (`kvtier bench codec`)."""
    selective_uses: Annotated[int, Field(ge=1, le=1000)] = 2
    """At which use `write_through_selective` copies a block; writing it is the first. 1 is `write_through`."""
    num_threads: Annotated[int, Field(ge=1, le=1024)] = 16
    """gRPC calls served at a time."""
    shutdown_grace_s: Seconds = 30.0
    """How long a stop may take to write to disk what is queued. Keep the container's grace period above it."""


class Config(Section):
    """The whole file. Made by `load_config` or `parse_config`."""

    tenant: str | None = None
    """The tenant of this engine."""
    tenants: dict[str, TenantConfig] = {}
    engine: EngineConfig = EngineConfig()
    cache: CacheConfig = CacheConfig()
    host: HostConfig = HostConfig()
    disk: DiskConfig = DiskConfig()
    pool: PoolConfig = PoolConfig()
    pool_service: PoolServiceConfig = PoolServiceConfig()

    _source: str = PrivateAttr("configuration")
    _folder: Path = PrivateAttr(Path())
    _environ: Mapping[str, str] = PrivateAttr(default_factory=dict)

    def engine_tenant(self) -> tuple[str, TenantConfig]:
        """Name and table of the engine's own tenant."""
        if self.tenant is None:
            raise self._error("tenant", 'missing; name one of [tenants.*], e.g. tenant = "default"')
        return self.tenant, self.tenants[self.tenant]

    def chain_secret(self) -> bytes:
        """The secret of the engine's tenant."""
        name, tenant = self.engine_tenant()
        key = f"tenants.{name}.secret"
        if tenant.secret is None:
            raise self._error(key, 'missing; set it to "env:NAME" or "file:PATH" of at least 16 random bytes')
        secret = self._resolve(key, tenant.secret).encode()
        if len(secret) < 16:
            raise self._error(key, f"only {len(secret)} bytes; make one with: openssl rand -hex 32")
        return secret

    def pool_token(self) -> str | None:
        """The bearer token of the engine's tenant. None: its certificate stands for it."""
        name, tenant = self.engine_tenant()
        key = f"tenants.{name}.token"
        if tenant.token is None:
            if self.pool.tls_certificate is not None:
                return None
            raise self._error(key, 'missing; the pool at pool.address wants it: set "env:NAME" or "file:PATH"')
        return self._resolve(key, tenant.token)

    def accepted_tokens(self) -> dict[str, str]:
        """For the pool service: hex SHA-256 of a token -> tenant name."""
        accepted: dict[str, str] = {}
        for name, tenant in self.tenants.items():
            for value in tenant.token_sha256:
                key = f"tenants.{name}.token_sha256"
                digest = self._resolve(key, value) if value.startswith(("env:", "file:")) else value
                if not re.fullmatch("[0-9a-f]{64}", digest):
                    raise self._error(key, "not 64 lower-case hex digits; make it with: printf %s TOKEN | sha256sum")
                if accepted.setdefault(digest, name) != name:
                    raise self._error(key, f"the same token as tenant {accepted[digest]!r}: tenants must differ")
        if not accepted and not any(tenant.certificate_names for tenant in self.tenants.values()):
            raise self._error("tenants", "no token_sha256 anywhere: nobody could use the pool; add a tenant's")
        return accepted

    def accepted_certificates(self) -> dict[str, str]:
        """For the pool service: name in a client certificate -> tenant name."""
        accepted: dict[str, str] = {}
        for tenant_name, tenant in self.tenants.items():
            for name in tenant.certificate_names:
                if accepted.setdefault(name, tenant_name) != tenant_name:
                    key = f"tenants.{tenant_name}.certificate_names"
                    raise self._error(key, f"{name!r} is also of tenant {accepted[name]!r}: tenants must differ")
        return accepted

    def pool_tls(self) -> TlsFiles | None:
        """The engine's files for TLS towards the pool; None without TLS."""
        pool = self.pool
        if pool.tls_ca is None:
            for key, value in (("tls_certificate", pool.tls_certificate), ("tls_server_name", pool.tls_server_name)):
                if value is not None:
                    raise self._error(f"pool.{key}", "needs tls_ca, which turns TLS on: name the CA of the pool")
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
        return TlsFiles(
            certificate=self._resolved(service.tls_certificate),
            key=self._resolved(service.tls_key),
            ca=self._resolved(service.tls_client_ca),
        )

    def redis_password(self) -> str | None:
        """The password of the pool's Redis; None without one."""
        reference = self.pool_service.redis_password
        return None if reference is None else self._resolve("pool_service.redis_password", reference)

    def resolve_path(self, path: Path) -> Path:
        """A path of the file: relative ones are relative to its folder."""
        return self._folder / path.expanduser()

    def _resolved(self, path: Path | None) -> Path | None:
        return None if path is None else self.resolve_path(path)

    def _resolve(self, key: str, reference: str) -> str:
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
        return value

    def _error(self, key: str, text: str) -> ConfigError:
        return ConfigError(f"{self._source}: {key}: {text}")


def load_config(path: Path, environ: Mapping[str, str] | None = None) -> Config:
    """Parses a TOML file. Raises `ConfigError` naming file, key and remedy."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error}") from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return parse_config(data, source=str(path), folder=path.parent, environ=environ)


def parse_config(
    data: dict[str, Any], *, source: str, folder: Path = Path(), environ: Mapping[str, str] | None = None
) -> Config:
    """Checks parsed TOML.

    :param source: what errors call it.
    :param folder: what relative paths, `file:` references included, are relative to.
    :param environ: overrides and `env:` secrets; the process's environment when None.
    """
    environ = dict(os.environ) if environ is None else dict(environ)
    data = _overridden(data, environ)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(source, e) for e in error.errors())) from error
    config._source, config._folder, config._environ = source, folder, environ
    for name in config.tenants:
        try:
            tenant_id(name)
        except InvalidInputError as error:
            raise ConfigError(f"{source}: tenants.{name}: {error}") from error
    if config.tenant is not None and config.tenant not in config.tenants:
        raise ConfigError(f"{source}: tenant: {config.tenant!r} has no table{_nearest(config.tenant, config.tenants)}")
    return config


def token_sha256(token: str) -> str:
    """What the pool's `token_sha256` must be for this token."""
    return hashlib.sha256(token.encode()).hexdigest()


def _overridden(data: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """A copy of `data` with `KVTIER__A__B=value` put at data["a"]["b"]."""
    merged: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in data.items()}
    for variable, value in environ.items():
        if variable.startswith(OVERRIDE_PREFIX):
            *path, last = variable.removeprefix(OVERRIDE_PREFIX).lower().split("__")
            table = merged
            for part in path:
                below = table.get(part, {})
                table[part] = dict(below) if isinstance(below, dict) else {}
                table = table[part]
            table[last] = _toml_value(value)
    return merged


def _toml_value(text: str) -> Any:
    """`text` as a TOML value, or as it stands when it is none: numbers and lists work, plain text needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(source: str, error: Any) -> str:
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        return f"{source}: {key}: unknown key{_nearest(location[-1], _fields_beside(location))}"
    return f"{source}: {key}: {error['msg']}"


def _fields_beside(location: list[str]) -> list[str]:
    """Valid keys of the table that holds the key at `location`."""
    section: type[BaseModel] = Config
    for part in location[:-1]:
        if section is Config and part == "tenants":
            return list(TenantConfig.model_fields)
        annotation = section.model_fields[part].annotation
        assert isinstance(annotation, type)
        section = annotation
    return list(section.model_fields)


def _nearest(name: str, valid: Any) -> str:
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; valid: {', '.join(sorted(valid)) or 'none'}"
