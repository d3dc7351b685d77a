"""The table of the cache pool service."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
)

from kvtier.config.fields import (
    AdmissionText,
    Bytes,
    CodecName,
    Count,
    DirectIoName,
    Group,
    HttpAddress,
    ListenAddress,
    PolicyName,
    RedisUrl,
    Seconds,
    SecretReference,
    Section,
    SegmentBytes,
    Size,
    SocketMode,
    SyncName,
    TierBytes,
    WritePolicyName,
    as_list,
)


class PoolServiceConfig(Section):
    """The service of `kvtier pool serve`."""

    listen: Annotated[list[ListenAddress], BeforeValidator(as_list)] = Field(default=["127.0.0.1:7600"])
    """The places to which engines connect (block protocol): `host:port` or `unix:/path`; port 0 takes a free one."""
    grpc_listen: Annotated[list[ListenAddress], BeforeValidator(as_list)] = Field(default=["127.0.0.1:7601"])
    """Addresses of the gRPC API: `host:port` or `unix:/path`; port 0 takes a free one."""
    http_listen: HttpAddress = "127.0.0.1:7602"
    """`host:port` of /healthz and /metrics, and of /tenants, which takes bearer tokens where nobody can read them on
    their way: on a loopback address, with TLS, or with `insecure`."""
    metrics_access: Literal["open", "observer"] = "open"
    """Which clients may read /metrics: `open` lets anybody who reaches the port see exact totals of all tenants
    together, from which one of two tenants can subtract itself; `observer` asks for the bearer token of an observer or
    an operator, as Prometheus sends it (`authorization` of its `scrape_configs`). Figures of single tenants are for
    operators alone."""
    tls_certificate: Path | None = None
    """Certificate chain, in PEM, of all ports but Unix sockets. Without, tokens and blocks travel in the clear. Renewed
    files count from the next connection on."""
    tls_key: Path | None = None
    """The private key of `tls_certificate`, in PEM and not encrypted."""
    tls_client_ca: Path | None = None
    """CAs, in PEM, of clients' certificates. A client without a certificate is refused, but by `http_listen`, since
    probes have none."""
    shared_memory: bool = True
    """Engines on a Unix socket in `listen` map the memory tier instead of having blocks sent. Linux only."""
    socket_mode: SocketMode = 0o600
    """Permissions of Unix sockets in `listen` and `grpc_listen`; `0o660` lets a group in. Clients need a token, too."""
    socket_group: Group | None = None
    """Group of these sockets, by name or number: with `socket_mode = 0o660`, clients need not run as the pool's user,
    who has all tenants' blocks. The pool's user must be a member of it, or root. Without: the pool's own group."""
    insecure: bool = False
    """Whether other machines may connect without TLS, so that tokens and blocks travel in the clear. A pool that
    listens on another address than a loopback one does not start without TLS unless this is true: for networks that
    you trust, and containers whose ports are published on one."""
    max_connections: Count = 256
    """Connections of the block protocol, one thread each, and as many of gRPC over TCP. An engine needs
    `load_threads` and two or three more. Half of them is divided among the tenants and kept for each (at least one, so
    that there are more if there must be), the rest goes to whoever comes first: of two tenants each has 64 for sure and
    192 at most, one alone has all. Connections whose clients have not said who they are make way, and of gRPC those
    without a call for a minute. Descriptors: for a moment there are twice as many of each."""
    audit_log: Literal["stderr"] | Path = "stderr"
    """The place where logins, refusals, changes of credentials and what operators do go, a JSON object a line:
    standard error, or a file that only the pool's user reads. Tokens are named by the first digits of their digests."""
    audit_log_bytes: Annotated[ByteSize, Field(ge=4096, le=2**40), Size] = ByteSize(16 * 2**20)
    """Size of that file at which another one is begun; three older ones are kept, as `.1` to `.3`. Small: a flood of
    strangers, of which there are at most fifty lines a second, leaves no room for what was before."""
    memory_bytes: TierBytes = ByteSize(2**30)
    """Memory tier, 1 MiB or more; the process needs about 100 MB besides."""
    memory_policy: PolicyName = "lru"
    """Which block of a tenant goes when another one needs room: see `docs/policies.md`, and `kvtier simulate` for what
    another one would have given."""
    min_residency_s: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """A block stays in memory for at least this time: writers hear FULL rather than that others lose what they have
    just been told is kept. Long enough to hear of a block and to fetch it. Memory takes `memory_bytes` in this time at
    most, so large refuses bursts; 0 forgets them. Does not count above a disk with `write_through` while that takes
    blocks and is no smaller than memory: it keeps what memory evicts."""
    record_trace: Path | None = None
    """Writes down which blocks are looked up, read and written, hashed once more and without any token, for `kvtier
    simulate`. A file of an earlier run is kept with `.old` behind its name. Without: nothing is recorded."""
    record_trace_bytes: Bytes = ByteSize(256 * 2**20)
    """Size of that file, 8 bytes for each time that a block is asked for; when it is full, recording ends. Small: a
    few minutes, from which nothing follows. Large: a disk that others need."""
    disk_dir: Path | None = None
    """Folder of the disk tier, for this process alone; without it nothing survives a restart."""
    disk_bytes: TierBytes = ByteSize(10 * 2**30)
    """Disk tier, 1 MiB or more; never exceeded."""
    disk_reserve_bytes: Bytes = ByteSize(2**30)
    """Free space left to others on the file system; below it the disk tier shrinks."""
    disk_write_policy: WritePolicyName = "write_through"
    """When blocks in memory are copied to disk. With `write_back`, a killed pool forgets more."""
    disk_admission: AdmissionText | None = None
    """Which blocks get to disk at all, e.g. `second-use` or `frequency:3,bytes-per-day:2TiB`: see `docs/policies.md`,
    and `kvtier simulate --admission` for what each would have given. What is kept out stays in memory, which forgets it
    when it needs the room, though it was acknowledged, and is offered again at its next use. Without: all blocks."""
    disk_codec: CodecName = "raw"
    """`lz4` saves about a fifth of bf16 KV, `planes-zstd` three tenths; both cost more time than a fast drive does
    (`kvtier bench codec`)."""
    disk_segment_bytes: SegmentBytes = ByteSize(64 * 2**20)
    """Size of a file, at most a sixteenth of `disk_bytes`. Small: more files. Large: eviction takes more at once. With
    several tenants, files are smaller by themselves."""
    disk_sync: SyncName = "none"
    """What outlives a loss of power, `none`, `sealed` or `batch`: see `sync` in `[disk]`."""
    disk_direct_io: DirectIoName = "auto"
    """Whether blocks go past the page cache, `auto`, `on` or `off`: see `direct_io` in `[disk]`."""
    disk_timeout_s: Annotated[float, Field(gt=0, le=60)] = 5.0
    """How long one operation of the disk may take: see `timeout_s` in `[disk]`."""
    redis_url: RedisUrl | None = None
    """Redis or Valkey below memory and disk, shared by all pools of a site: `redis://host:port/0`, `rediss://`,
    `unix://`, `redis+sentinel://host:port,host:port/service`, `redis+cluster://host:port`. Without: no such tier."""
    redis_username: str | None = None
    """The user of its ACLs; without, the server's default user."""
    redis_password: SecretReference | None = None
    """`env:NAME` or `file:PATH`, never the password itself. A file is read again for each new connection."""
    redis_ttl_s: Annotated[int, Field(ge=0, le=2**31)] = 86_400
    """A block that nobody uses for so long is forgotten by Redis; 0 leaves that to its `maxmemory-policy`."""
    redis_timeout_s: Annotated[float, Field(gt=0, le=30)] = 1.0
    """Deadline of one call."""
    redis_lookup_timeout_s: Annotated[float, Field(gt=0, le=30)] = 0.2
    """Deadline of one lookup. An engine's lookup waits for it when Redis hangs, until the breaker opens: keep it well
    below the engines' `lookup_deadline_s`, or they miss what the pool has itself."""
    redis_write_policy: WritePolicyName = "write_through"
    """When blocks in memory are copied to Redis. With the other two, pools share later, or less."""
    redis_admission: AdmissionText | None = None
    """Which blocks get to Redis at all: see `disk_admission`. Each pool goes by what it was offered itself. Not
    `tenant-share`, since a Redis does not say what each tenant has."""
    redis_codec: CodecName = "raw"
    """`lz4` saves about a fifth of bf16 KV: worth it where the network gives less than 0.4 GB/s, or 0.9 when blocks
    are mostly read (`kvtier bench codec`). `planes-zstd` saves three tenths, at a fourth of the speed. Pools of
    a release that does not know a codec find no such block, and remove it."""
    selective_uses: Annotated[int, Field(ge=1, le=1000)] = 2
    """The use at which `write_through_selective` copies a block; writing it is the first. 1 is `write_through`."""
    max_pin_s: Annotated[float, Field(ge=0, le=31_536_000)] = 86_400.0
    """The longest time for which a tenant may pin blocks in memory; more is cut to it. Small makes those who pin ask
    again and again, large keeps what everybody has forgotten about, until a restart. 0: there are no pins."""
    pin_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    """How much of memory pins may hold; of several tenants, each half of it at most. It counts whole slabs, of up to
    64 MiB or an eighth of memory: with several tenants and less than 512 MiB, less than 0.25 may leave no room for a
    single one. Large leaves little for what is not pinned: writers hear FULL. 0: there are no pins."""
    num_threads: Annotated[int, Field(ge=5, le=1024)] = 16
    """gRPC calls served at a time; three times as many wait, up to 10 s, and more are refused. Divided among tenants as
    `max_connections` are, with at least two for each. Streams of events do not count: there are four, at least one for
    each tenant. More than 16 gain nothing below 10 Gbit/s."""
    shutdown_grace_s: Seconds = 30.0
    """How long a stop may take to write to disk what is queued. Keep the container's grace period above it."""
