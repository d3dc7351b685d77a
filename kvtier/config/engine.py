"""The tables of an engine, and those of tenants."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AwareDatetime,
    BeforeValidator,
    ByteSize,
    Field,
    model_validator,
)

from kvtier.config.credentials import Tokens
from kvtier.config.fields import (
    AdmissionText,
    Bytes,
    CodecName,
    Count,
    DirectIoName,
    PolicyName,
    PoolAddress,
    Seconds,
    Section,
    SegmentBytes,
    SyncName,
    TierBytes,
    WritePolicyName,
    as_list,
)
from kvtier.net.address import GRPC_PREFIX, Address


def default_load_threads(num_processes: int = 1) -> int:
    """`cache.load_threads` where it is left out, of each of so many processes on this host."""
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    share = num_cores // num_processes
    return 1 if share <= 2 else max(2, min(4, share // 4))


class ShareConfig(Section):
    """What one tenant is owed of a tier of the pool. What it does not use is lent to others until it asks for it."""

    guaranteed_bytes: Bytes = ByteSize(0)
    """Others cannot keep so much from the tenant. All guarantees together fit into the tier."""
    cap_bytes: Bytes | None = None
    """The most that the tenant may have, though there is room. Left out: no such bound."""
    weight: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """How large its part is of what is not guaranteed, beside the weights of others. 0: it gives way to everybody."""

    @model_validator(mode="after")
    def _cap_above_guarantee(self) -> Self:
        if self.cap_bytes is not None and self.cap_bytes < max(1, self.guaranteed_bytes):
            raise ValueError("cap_bytes is below guaranteed_bytes, or 0; raise it or leave it out")
        return self


class RedisShareConfig(Section):
    """What one tenant may have of the Redis below the pools of a site. There are no guarantees there, but caps of all
    tenants that are three quarters of its `maxmemory` together are as good."""

    cap_bytes: TierBytes | None = None
    """The most that the tenant may have in all servers together, 1 MiB or more: its oldest blocks go first. Bytes of
    payloads before a codec, each rounded up to 4 KiB with its head. An eighth of it should hold many blocks, and more
    than the tenant writes in two seconds. All pools of the Redis need the same. Left out: no such bound."""


class PreviousSecretConfig(Section):
    """A secret that keyed the prefix chain before."""

    secret: str
    """`env:NAME` or `file:PATH` of it."""
    retire_at: AwareDatetime
    """It is not used from then on; with an offset, such as `2027-01-31T00:00:00Z`. Early: what has not been asked for
    since the rotation is lost. Late: whoever stole the secret may guess at names of blocks for so long, as before."""


class RateConfig(Section):
    """What one tenant may ask of a pool a second, over all its connections and calls. A request beyond that
    waits for a tenth of a second at most, and is answered with misses or THROTTLED then."""

    max_requests_per_s: Annotated[float, Field(ge=1, le=1e9)] | None = None
    """Requests of the block protocol, in shared memory as well, and calls of gRPC. As many may come at once after a
    quiet second. One that names more than about 500 blocks counts as several. Small: engines miss what is there; they
    ask some ten times for each request of their own. Left out: no such bound."""
    max_bytes_per_s: TierBytes | None = None
    """Payload bytes that are read and written, in shared memory as well, 1 MiB or more. A request is served as a
    whole, of up to 256 MiB, and what comes after it waits: well below an engine's batches (`batch_blocks`), most of
    what it asks for after one is a miss. Left out: no such bound."""


class TenantConfig(Section):
    """One tenant. Values of secrets are `env:NAME` or `file:PATH`, never the secret itself."""

    secret: str | None = None
    """The secret that keys the prefix chain, of 16 random bytes or more. Engines only: the pool must not have it."""
    previous_secrets: list[PreviousSecretConfig] = Field(default=[], max_length=4)
    """Secrets that `secret` has replaced, the newest first, 4 at the most. Blocks that no tier has under `secret` are
    looked for under these, loaded, and saved under `secret`: so a rotation loses nothing. Each costs a prompt that is
    not found whole one more lookup of a block. Without: a new secret forgets everything. Engines only."""
    salt: str = ""
    """Separates caches under one secret. Changing it forgets everything."""
    token: str | None = None
    """Bearer token for the cache pool. Engines only."""
    storage_keys: str | None = None
    """Keys that this tenant's blocks are sealed with on disk and in Redis: `env:NAME` or `file:PATH` of one or more
    `ID:KEY`, 64 hex digits a key. The largest id seals, all open. Pools, for their disk and Redis, and engines, for
    their own disk. Without: blocks are stored as they are. Needs `kvtier[seal]`. Pools read them again as tokens
    are, but for a tenant's first ones; engines do at their start."""
    storage_reads_plain: bool = False
    """Whether a tenant with `storage_keys` reads blocks that are not sealed, too. Set it for as long as blocks of
    before are worth more than being safe from somebody who can write to the disk or the Redis."""
    sealing_keys: str | None = None
    """Keys that engines seal this tenant's blocks with before they go to the pool, which must not have them: in the
    form of `storage_keys`. Engines only. Blocks that are not sealed are not read from the pool then. Change `salt` when
    you set it or take it out: until they are evicted, blocks of before keep the names that new ones need."""
    token_sha256: Tokens = Field(default=[])
    """Pool only: lower-case hex SHA-256 of each token that is accepted, as text or as `env:` / `file:`, or tables of
    `sha256` and `expires_at`. Read again when the file changes, and on SIGHUP."""
    certificate_names: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """Pool only: DNS names and URIs, compared as they are. A client whose certificate has one of them among its subject
    alternative names needs no token. Needs `pool_service.tls_client_ca`. Read again as tokens are."""
    memory: ShareConfig = ShareConfig()
    """Pool only: what the tenant is owed of its memory. Read again as tokens are."""
    disk: ShareConfig = ShareConfig()
    """Pool only: what the tenant is owed of its disk. Read again as tokens are."""
    redis: RedisShareConfig = RedisShareConfig()
    """Pool only: what the tenant may have of its Redis. Read again as tokens are."""
    rate: RateConfig = RateConfig()
    """Pool only: what the tenant may ask for in a second. Read again as tokens are."""


class AdapterConfig(Section):
    """A LoRA adapter of `kvtier engine`."""

    path: Path
    """The folder that PEFT has saved. Blocks are known by what is in it, whatever the adapter is called, which is what
    requests give as `model`. Each adapter takes memory for the weights that it changes, and the sequences of a step are
    computed adapter by adapter: many in one step cost time."""


class EngineConfig(Section):
    """The engine of `kvtier engine serve`."""

    model: Path | None = None
    """Hugging Face folder with safetensors, or a GGUF file."""
    model_cache_dir: Path | None = None
    """The folder in which a GGUF is dequantised, once. Default: `~/.cache/kvtier/models`."""
    listen: str = "127.0.0.1:8000"
    """`host:port` of the OpenAI API; port 0 takes a free one."""
    allowed_hosts: list[str] = Field(default=[])
    """The names without a port by which clients call an engine that listens on a loopback address, and the hosts of
    web pages that may use it, beside `localhost` and loopback addresses: those of a proxy on this machine that hands on
    the `Host` it was asked for. Who calls it by another name is refused, so that no web page reaches it."""
    tls_certificate: Path | None = None
    """Certificate chain, in PEM, of `listen`. Without, API keys, prompts and answers travel in the clear. Renewed files
    count from the next connection on."""
    tls_key: Path | None = None
    """The private key of `tls_certificate`, in PEM and not encrypted."""
    adapters: dict[str, AdapterConfig] = Field(default={})
    """LoRA adapters, each a table by the name that requests give as `model`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device that holds the model and its KV. `auto` takes the first CUDA device where torch and triton can use
    one. Engines on CPU and on CUDA do not share: their KV differs in the last bits."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Computation and KV. float32 takes twice the memory and flips no near ties."""
    batch_invariant: bool | None = None
    """Whether an answer is the same, bit for bit, whatever is found in the cache, in whichever chunks a prompt is
    computed, and whatever is computed beside it. Left out: true in bfloat16 on the CPU, where it costs up to 7 % of the
    speed, and false otherwise. True: in float32 on the CPU, too, where decodes take several times as long; refused on
    CUDA, with `lossy_codec`, and for Gemma, where it is false.
    Engines for which it is true share only with those whose arithmetic gives the same bits."""
    lossy_codec: Literal["none", "int8_per_head", "fp8_e4m3_per_head"] = "none"
    """The form in which blocks leave the device: half as many bytes in host memory, on disk and in the pool, and half
    as many to move. Needs bfloat16. What comes back is rounded, so answers are not quite those of an engine without a
    cache; int8 changes them the least. Engines with different codecs do not share."""
    num_threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Threads of a forward pass; 0 takes one per core."""
    kv_bytes: Bytes = ByteSize(2**30)
    """Device memory for paged KV. Too small: prefixes are evicted before they are hit, requests wait."""
    max_batch_tokens: Count = 4096
    """Tokens per step. Small: prefill in many chunks. Large: decoding requests wait longer for a prefill."""
    max_running: Count = 16
    """Requests in one batch. One that asks for several answers (`n`, `best_of`) counts as so many, and may ask for no
    more than this."""
    order: Literal["cache_aware", "fcfs"] = "cache_aware"
    """Which waiting request begins next. `cache_aware`: the one with the longest cached prefix, where each cached token
    counts as much as waiting for the time that computing one takes; and a request waits for blocks that another one is
    just computing, so that equal prompts and prefixes that arrive together are computed once. `fcfs`: the first one
    that came; what arrives together is computed for each."""
    partial_reuse: bool = True
    """Whether the leading tokens of a block are reused where a prompt differs from it only later: up to
    `cache.tokens_per_block` - 1 tokens more of each hit. Pays with large blocks and with prompts that differ at their
    ends, such as questions on one document. Costs about 500 bytes and 2 us for each block that becomes full, and the
    copy of a part of a block for each request that gains by it."""
    layerwise_loads: bool = True
    """Whether, on CUDA, a request that is alone, and whose prefix is in host memory, begins to compute when the first
    layer of that prefix has been copied to the device, instead of all of it. Saves most of the shorter of copying and
    computing: a quarter of both together with 16,384 cached tokens of an 8B model on an H200. Without effect on the
    CPU, with `lossy_codec` or `cache.verify_loads = "device"`, and where a layer of a block is smaller than 32 KiB.
    False: requests wait until all has been copied."""
    cuda_graphs: bool = True
    """Whether, on CUDA, steps in which every request has one new token are replayed from graphs, captured at the start
    for 1, 2, 4 ... `max_running` requests. The log names the time that takes, and the device memory beside `kv_bytes`.
    False spares both and launches every operation by itself, for which the device then has to wait; so it is for
    models with sliding windows (Gemma)."""
    cache: bool = True
    """False computes every prompt from scratch: no device hits, no tiers."""

    @property
    def may_be_invariant(self) -> bool:
        """Whether, on the CPU, `batch_invariant` is true where it is left out."""
        return self.dtype == "bfloat16" and self.lossy_codec == "none"

    @model_validator(mode="after")
    def _invariant_means_lossless(self) -> Self:
        if self.batch_invariant and self.lossy_codec != "none":
            raise ValueError(
                f'batch_invariant is true, but lossy_codec = "{self.lossy_codec}" rounds what comes back from the '
                'cache; set lossy_codec to "none", or leave batch_invariant out'
            )
        return self


class CacheConfig(Section):
    """What all tiers of an engine share."""

    tokens_per_block: Annotated[int, Field(ge=1, le=65536)] = 16
    """Unit of hashing, sharing and transfer. Smaller hits more tokens, larger moves faster. Engines that
    differ do not share. `kvtier engine` takes powers of two up to 256. In vLLM, its `--block-size` decides: leave it
    out there."""
    batch_blocks: Count = 32
    """Blocks per transfer, or 128 MiB of them between device and host memory, if that is more. Smaller overlaps reads
    and copies better, larger has fewer round trips."""
    load_threads: Annotated[int, Field(ge=1, le=64)] = Field(default_factory=default_load_threads)
    """Transfers at a time, of each rank. Each has one core, which copies at about 8 GB/s, and verifies 20 of what a
    pool on this host lends, and a device may take 50: the default is a quarter of the cores that a rank has for itself,
    2 to 4 of them, but 1 where it has one or two. (In vLLM, the cores of a host are divided among all ranks there.)
    More help tiers with latency."""
    staging_bytes: Bytes = ByteSize(128 * 2**20)
    """Memory of a CUDA device, of each rank, in which copies between it and host memory are staged, beside the KV: for
    `load_threads` and three more at a time. With 8 MiB or more for each of them the bus is kept busy; with less than a
    block each, fewer copies run at a time. Large takes memory from the KV.
    Nothing is staged on the CPU, nor where all pages have 32 KiB or more and the driver copies in batches."""
    fetch: Literal["if_faster", "always"] = "if_faster"
    """Which hits are fetched. `if_faster`: not where computing was measured to take less than half the time, as it may
    with small models and slow networks. `always` for measurements and tests."""
    verify_loads: Literal["auto", "host", "device"] = "auto"
    """The side that verifies bytes on their way to the device: all of them, by the checksum of whoever wrote them.
    `host`: in host memory, before they are copied. `auto`: blocks that a pool on this host lends, which go from its
    memory straight to a CUDA device, are verified there when they have arrived, many at a time; all others in host
    memory. `device`: as `auto`, and of what comes from host memory, one block in 64, at least one of each load, once
    more where it has arrived. That finds faults of the bus, the driver or a copy, which no checksum in host memory can
    see. What differs is not used. `device` is recommended for a new kind of machine, and where answers are doubted.
    CUDA only, not with `engine.lossy_codec`, and only where the parts of a block, such as its layers, are multiples
    of 8 bytes."""
    load_deadline_s: Seconds = 10.0
    """A fetch that takes longer is computed instead. Below the time of a good fetch, nothing hits."""
    lookup_deadline_s: Seconds = 1.0
    """A lookup that takes longer is a miss. A request waits this long at the most."""
    saving_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of host memory that may wait for lower tiers. Small drops saves in bursts, large crowds out fetches."""
    selective_uses: Annotated[int, Field(ge=1, le=1000)] = 2
    """The use at which `write_through_selective` copies a block; computing it is the first. 1 is `write_through`."""
    save_answers: bool = True
    """Whether vLLM's connector keeps what was generated, for conversations that go on. False saves the writes where no
    prompt begins with an earlier answer. (`kvtier engine` keeps both.)"""
    clean_ahead_blocks: Annotated[int, Field(ge=0)] = 256
    """How many of the coldest device blocks are kept copied. 0 copies nothing but what was saved when full."""
    io_process: bool = sys.platform == "linux"
    """I/O of disk and pool in a process of its own, which costs about 40 MB; Linux only, and the default there. False
    does it in threads of the engine, which an engine busy in Python slows down to a tenth."""

    record_trace: Path | None = None
    """A file for the trace of this engine: which blocks its prompts ask for below the device and which become full, as
    `kvtier simulate` reads it. A file of an earlier run is kept with `.old` behind its name. Without: nothing is
    recorded."""
    record_trace_bytes: Bytes = ByteSize(256 * 2**20)
    """Size of that file, 8 bytes for each time that a block is asked for; when it is full, recording ends. Small: a
    short trace. Large: nothing but disk."""


class HostConfig(Section):
    """Host memory of an engine."""

    capacity_bytes: Bytes | None = None
    """The bytes that all ranks of an engine on this host (in vLLM, those of tensor and pipeline parallelism) take
    together: each takes its part. Also the staging area of every transfer: at least a few hundred blocks of each rank.
    Touched at start, and pinned for a device on CUDA. Small holds little, and what is not saved in time is dropped;
    more than the host can spare ends in its out-of-memory killer. Left out, each rank takes 1 GiB, or 512 MiB, for
    staging, where a pool on the same host (a Unix address) keeps the blocks for all its engines: none need be held
    twice. In SGLang, see `docs/sglang.md`."""
    policy: PolicyName = "lru"
    """Which block goes when another one needs room: see `docs/policies.md`, and `kvtier simulate` for what another one
    would have given."""
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
    admission: AdmissionText | None = None
    """Which blocks get to disk at all, e.g. `second-use` or `frequency:3,bytes-per-day:2TiB`: see `docs/policies.md`,
    and `kvtier simulate --admission` for what each would have given. What is kept out is offered again at its next use
    while host memory has it. Without: all blocks."""
    codec: CodecName = "raw"
    """`lz4` saves about a fifth of bf16 KV, `planes-zstd` three tenths; both cost more time than a fast drive does
    (`kvtier bench codec`)."""
    segment_bytes: SegmentBytes = ByteSize(64 * 2**20)
    """Size of a file, at most a sixteenth of the capacity. Small: more files. Large: eviction takes more at once. With
    several tenants, files are smaller by themselves."""
    sync: SyncName = "none"
    """What outlives a loss of power (`docs/disk-format.md`); a killed process loses nothing it acknowledged anyway.
    `sealed` syncs full files in the background, `batch` all that is acknowledged, at most of the drive's speed."""
    direct_io: DirectIoName = "auto"
    """Whether payloads go past the page cache (O_DIRECT), which would keep them a second time. `auto`: where the file
    system can. `on` refuses a file system that cannot; `off` suits network file systems that are slow so, and takes
    memory from everybody else."""
    timeout_s: Annotated[float, Field(gt=0, le=60)] = 5.0
    """How long one operation of the disk may take, such as a read of 4 MiB; then it hangs, and everything misses until
    it answers. Small: a disk that is merely busy is left alone for moments. Large: so long are requests still sent to
    one that hangs. Reads and writes that it hangs in the middle of last until it answers, or until the tier process
    is ended for them."""


class PoolConfig(Section):
    """Access to the shared cache pool; off unless `address` is set."""

    address: Annotated[list[PoolAddress], BeforeValidator(as_list)] = Field(default=[])
    """`unix:/path` or `host:port` of the pool's `listen`, `grpc:host:port` of its `grpc_listen`, or a list of several
    of these: of the ways that work, the fastest is taken, which is the order here. Over a Unix socket, the pool shares
    its memory."""
    shared_memory: bool = True
    """Map the pool's memory where it is shared. Off to compare, or where descriptors cannot be passed."""
    direct_loads: bool = True
    """Copy blocks to the device from where they lie in memory that the pool shares, not by way of host memory. Needs
    `shared_memory` and `cache.io_process`. A device on CUDA has that memory pinned as its blocks are first asked for.
    Off to compare, or where it must not be pinned."""
    pinned_bytes: Bytes = ByteSize(64 * 2**30)
    """The most of the pool's memory that each rank maps for direct loads, and pins for a device on CUDA: as much as its
    users come back to within minutes. Slabs that nobody has read from for a minute make room for others. With less,
    blocks come by way of host memory, at 8 to 12 GB/s per thread. Large takes time: to pin a GiB takes 0.2 s or more,
    in which other processes on the host wait for NVIDIA's driver, too; and what an engine has mapped stays taken when
    the pool gives it up, until the engine has noticed. 0 maps nothing."""
    tls_ca: Path | None = None
    """CAs, in PEM, of the pool's certificate. Turns TLS on, for all but Unix sockets."""
    insecure: bool = False
    """Whether token and blocks may travel to other machines in the clear, without TLS. An engine with an address that
    is neither a Unix socket nor a loopback one does not start without `tls_ca` unless this is true: for networks that
    you trust. A pool in a container of the same machine counts as elsewhere, unless its port is published on loopback.
    """
    tls_certificate: Path | None = None
    """This engine's certificate, for a pool with `tls_client_ca`. One in its tenant's `certificate_names` stands for
    the token."""
    tls_key: Path | None = None
    """The private key of that certificate."""
    tls_server_name: str | None = None
    """What the pool's certificate must be for; without, the host in `address`."""
    connect_timeout_s: Seconds = 1.0
    """Deadline of one connection, its TLS handshake included."""
    call_timeout_s: Annotated[float, Field(gt=0, le=30)] = 5.0
    """Deadline of one call; the pool itself ends those that take over a minute. Below the time of a good transfer
    of `batch_blocks`, nothing hits."""
    breaker_failures: Count = 3
    """Failures in a row after which the pool is left alone for `breaker_open_s`."""
    breaker_open_s: Seconds = 2.0
    """Then one call probes it. Short probes a dead pool often, long misses its return."""
    write_policy: WritePolicyName = "write_through"
    """When blocks in host memory are copied to the pool. The other two make engines share later, or less."""

    def addresses_elsewhere(self) -> list[str]:
        """The addresses that may be of another machine, in order."""
        return [text for text in self.address if not Address.parse(text.removeprefix(GRPC_PREFIX)).is_of_this_machine]
