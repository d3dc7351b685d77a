"""What the pool service is told at start. Values only: nothing here reads files or the environment."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.identity.keys import tenant_id
from kvtier.memory import memfd
from kvtier.net.address import Address
from kvtier.net.certificates import TlsFiles
from kvtier.store.retention import RetentionLimits
from kvtier.tiers.common.write_policy import WritePolicy

_SHA256_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """What one call may ask for. Above: an error that names the limit, before any work.

    No configuration changes them: clients rely on them. Tests have smaller ones.
    """

    max_batch_blocks: int = 65_536
    """Hashes in one request, blocks in one write stream. Lower: more round trips. Higher: longer calls."""
    max_batch_bytes: int = 256 << 20
    """Payload bytes of one read or write. Bounds how long a call may keep a thread."""
    max_block_bytes: int = 64 << 20
    """Payload bytes of one block."""
    max_call_s: float = 60.0
    """Longest deadline of a read or write: bounds how long a stalled client may keep a thread and a slot."""
    max_stall_s: float = 10.0
    """Block protocol: how long a peer may take to send or to receive one piece of about 8 MiB. Blocks are held
    in place meanwhile. Small cuts off slow links, large lets a stopped client hold memory."""
    lease_s: float = 10.0
    """How long a client on this host may read a block in shared memory. Small sends slow clients to the socket, large
    lets a stopped one keep memory from others."""
    max_held_bytes: int | None = None
    """Payload bytes that one such client may hold at a time, to read and to write. None: a quarter of the memory."""
    max_event_streams: int = 4
    """Each keeps one thread of `num_threads`."""
    event_buffer: int = 4096
    """Keys buffered per event stream before the oldest are lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """A Redis or Valkey below the pool, shared with the other pools of the site."""

    url: str
    """See `kvtier.tiers.redis.address`; without credentials."""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ttl_s: float = 86_400.0
    """A block that nobody uses for so long is forgotten; 0 leaves that to the server's `maxmemory-policy`."""
    timeout_s: float = 1.0
    """Deadline of one call."""
    lookup_timeout_s: float = 0.2
    """Deadline of one lookup: so long a hanging server hides what the pool has itself."""
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    codec: str = "raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """One cache pool process."""

    tenants: Mapping[str, str]
    """Lower-case hex SHA-256 of a bearer token -> tenant name. A tenant may have several tokens."""
    memory_bytes: int
    """Size of the memory tier. The process needs about 100 MB besides."""
    min_residency_s: float = 1.0
    """A block in memory is not evicted before, writers hear FULL; unless a tier below keeps what is acknowledged. 0
    turns it off."""
    certificate_names: Mapping[str, str] = field(default_factory=dict)
    """DNS name or URI of a client certificate -> tenant name. Clients with such a certificate need no token."""
    tls: TlsFiles | None = None
    """For all ports but Unix sockets; with a CA, clients need a certificate. None: everything travels in the clear."""
    listen: tuple[str, ...] = ("127.0.0.1:7600",)
    """Addresses of the block protocol, `host:port` or `unix:/path`; port 0 takes a free one."""
    grpc_listen: tuple[str, ...] = ("127.0.0.1:7601",)
    """Addresses where clients connect by gRPC: `host:port` or `unix:/path`."""
    http_listen: str = "127.0.0.1:7602"
    """`host:port` of /healthz and /metrics; port 0 takes a free one."""
    disk_dir: Path | None = None
    """Folder of the disk tier, for this process alone. None: memory only, nothing survives a restart."""
    disk_bytes: int = 0
    """Size of the disk tier; needed with `disk_dir`."""
    disk_reserve_bytes: int = 1 << 30
    """Free space left to others on the disk's file system; below it the disk tier shrinks."""
    disk_write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    """When blocks in memory are copied to disk."""
    disk_codec: str = "raw"
    """How payloads are packed on disk: `raw`, `lz4` or `planes-zstd`."""
    disk_segment_bytes: int = 64 << 20
    """Size of the disk tier's files."""
    disk_sync: str = "none"
    """What of the disk tier's files outlives a loss of power: `none`, `sealed` or `batch`."""
    disk_direct_io: str = "auto"
    """Whether the disk tier's files are read and written past the page cache: `auto`, `on` or `off`."""
    redis: RedisSettings | None = None
    """Redis below memory and disk; None: no such tier."""
    selective_uses: int = 2
    """The use at which `write_through_selective` copies a block; writing it is the first."""
    shared_memory: bool = True
    """Clients on a Unix socket map the memory tier, where the system can do that (Linux)."""
    socket_mode: int = 0o600
    """Permissions of the block protocol's Unix socket: who may connect. A token is needed besides."""
    max_connections: int = 256
    """Connections of the block protocol, one thread each; more are refused, first those whose clients have not said who
    they are. An engine needs one per transfer at a time. As many of gRPC are allowed on each of its addresses, where
    connections without a call for a minute are closed."""
    max_pin_s: float = 86_400.0
    """The longest time for which a tenant may pin blocks in memory; 0: there are no pins."""
    pin_share: float = 0.25
    """How much of memory pins may hold, in whole slabs; 0: there are no pins."""
    num_threads: int = 16
    """gRPC calls served at the same time; more wait or are refused. More than this gains nothing below 10 Gbit/s."""
    shutdown_grace_s: float = 30.0
    """How long a stop may take to finish calls and to write down what waits. What is left is counted and logged."""
    limits: PoolLimits = field(default_factory=PoolLimits)

    @property
    def shares_memory(self) -> bool:
        """Whether there is anybody to share memory with."""
        local = any(Address.parse(address).path for address in self.listen)
        return self.shared_memory and local and memfd.available()

    @property
    def retention_limits(self) -> RetentionLimits:
        """What the tenants may pin."""
        return RetentionLimits(
            max_s=self.max_pin_s,
            most_bytes=int(self.memory_bytes * self.pin_share),
            several_tenants=len({*self.tenants.values(), *self.certificate_names.values()}) > 1,
        )

    def __post_init__(self) -> None:
        if not self.tenants and not self.certificate_names:
            raise ConfigError("the pool has no tenants, nobody could use it: configure at least one token")
        for digest, name in self.tenants.items():
            if not _SHA256_HEX.fullmatch(digest):
                raise ConfigError(
                    f"tenant {name!r}: {digest[:80]!r} is no SHA-256 in lower-case hex; "
                    'make one with: printf %s "$TOKEN" | sha256sum'
                )
            tenant_id(name)
        if self.certificate_names and (self.tls is None or self.tls.ca is None):
            raise ConfigError("certificate_names without tls_client_ca: nobody would verify the certificates; set it")
        if self.tls is not None and self.tls.certificate is None:
            raise ConfigError("tls_client_ca without tls_certificate and tls_key: a server needs a certificate, too")
        if self.memory_bytes < 1 << 20:
            raise ConfigError(f"memory_bytes {self.memory_bytes}: give the memory tier at least 1 MiB")
        if self.disk_dir is not None and self.disk_bytes < 1 << 20:
            raise ConfigError(f"disk_bytes {self.disk_bytes} for {self.disk_dir}: give the disk tier at least 1 MiB")
        if not (self.max_pin_s >= 0 and 0 <= self.pin_share <= 1):
            raise ConfigError(f"max_pin_s {self.max_pin_s}, pin_share {self.pin_share}: need >= 0, and from 0 to 1")
        if self.num_threads <= self.limits.max_event_streams:
            raise ConfigError(
                f"num_threads {self.num_threads}: must be above max_event_streams {self.limits.max_event_streams}, "
                "since each event stream keeps a thread"
            )
