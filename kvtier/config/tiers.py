"""The tables `[cache]`, `[host]` and `[disk]`, of the tiers that an engine has itself."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, Field

from kvtier.config.fields import (
    AdmissionText,
    Bytes,
    CodecName,
    Count,
    DirectIoName,
    PolicyName,
    Seconds,
    Section,
    SegmentBytes,
    SyncName,
    WritePolicyName,
)
from kvtier.system.cores import usable_cores

MIN_HOST_BLOCKS = 16
"""Blocks for which host memory must have room in each rank: every transfer goes through it."""


def default_load_threads(num_processes: int = 1) -> int:
    """`cache.load_threads` where it is left out, of each of so many processes on this host."""
    share = usable_cores() // num_processes
    return 1 if share <= 2 else max(2, min(4, share // 4))


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
