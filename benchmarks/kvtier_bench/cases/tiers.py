"""`kvtier bench tiers`: the same blocks into and out of every tier below the device."""

import os
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.options import Json, Plot
from kvtier.errors import KvtierError
from kvtier.memory.malloc import keep_freed_memory
from kvtier.metrics import Metrics
from kvtier.system.redis_process import redis_binary, redis_process
from kvtier.system.working_folder import working_folder
from kvtier.tiers.base import Status, Tier
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.redis import RedisSettings, RedisTier
from kvtier_bench.measuring.blocks import NUM_SLOTS, Rotation, keys_of
from kvtier_bench.measuring.options import PayloadBytes, Rounds
from kvtier_bench.measuring.report import Case, report
from kvtier_bench.measuring.rounds import NUM_ROUNDS, Subject, in_turn
from kvtier_bench.processes.peers import CHECKOUT, DISK_KINDS, Peer, start_peers
from kvtier_bench.processes.plain_redis import PlainRedis
from kvtier_bench.processes.pool_process import CALL_TIMEOUT_S, pool_process
from kvtier_bench.processes.raw_disk import RawDisk

_ROOM = 4
"""Capacity of each tier, in rounds; the Redis has room for redis-py's blocks as well."""
_DISK_ROUNDS = 4
"""What a disk is filled with before a round reads some of it, at random."""
_RAW_DISK = "raw disk"
_PLAIN_REDIS = "redis-py"
_DEPTH = 4
"""Reads and writes on their way to a disk at once."""


def bench_tiers(
    json: Json = False,
    plot: Plot = None,
    payload_bytes: PayloadBytes = 2 << 20,
    batch: Annotated[int, typer.Option(min=1, help="Blocks per call.")] = NUM_SLOTS,
    rounds: Rounds = NUM_ROUNDS,
    redis: Annotated[
        str | None,
        typer.Option(help="URL of a Redis with room for four rounds; default: its own, if installed."),
    ] = None,
    disk_dir: Annotated[
        Path | None, typer.Option(help="Where the disk tier makes its folder; default: the system's temporary folder.")
    ] = None,
    peers: Annotated[
        Path | None, typer.Option(help="Where `make peers` has prepared LMCache to run beside; default: .venv/peers.")
    ] = None,
) -> None:
    """Read and write 64 blocks in turn in host memory, on disk, in a Redis and in a pool process, all verified.

    The disk's floor is a bare loop over one preallocated file, past the page cache, with as many blocks at a time: it
    is filled in order and read at random, and so is LMCache's disk backend, where it is prepared. The floor's file is
    made anew before each round of writes; the tier uses files of earlier rounds again. The Redis tier is held against
    a pipeline of plain redis-py for each call, on the same server, nothing verified. CPU time is this process's and
    that of the servers it started. What the kernel does for a disk afterwards is not in it, nor is a drive's own cache
    switched off, nor is anything synced.
    """
    keep_freed_memory()
    rotation = Rotation(payload_bytes, max(NUM_SLOTS, batch))
    room = max(64 << 20, _ROOM * rotation.nbytes)
    notes: list[str] = []
    with ExitStack() as stack:
        folder = stack.enter_context(working_folder())
        tiers: dict[str, tuple[Tier, tuple[int, ...]]] = {"host": (HostTier(room), (os.getpid(),))}
        disk_folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=disk_dir))
        disk_room = max(256 << 20, 2 * (_DISK_ROUNDS + 1) * rotation.nbytes)  # nothing is to be evicted
        disk = DiskTier.open(Path(disk_folder) / "tier", disk_room, reserve_bytes=0, num_threads=_DEPTH)
        tiers["disk"] = (disk, (os.getpid(),))
        num_slots = _DISK_ROUNDS * len(rotation.sources)
        raw = stack.enter_context(RawDisk(Path(disk_folder), payload_bytes, num_slots, _DEPTH))
        if not raw.direct:
            notes.append("The disk goes through the page cache: no O_DIRECT here, or blocks that are not whole pages.")
        redis_pids: tuple[int, ...] = (os.getpid(),)
        plain: PlainRedis | None = None
        if redis is None and (binary := redis_binary()) is not None:
            redis, redis_pid = stack.enter_context(redis_process(binary, folder, 2 * room))
            redis_pids = (os.getpid(), redis_pid)
        if redis is None:
            notes.append("Without redis: no redis-server is installed; name one with --redis.")
        else:
            settings, breaker = RedisSettings(call_timeout_s=CALL_TIMEOUT_S), CircuitBreaker(3, 1.0)
            tier = RedisTier(redis, settings, metrics=Metrics(), breaker=breaker)
            tiers["redis"] = (tier, redis_pids)
            if redis.startswith(("redis://", "unix://")):
                plain = PlainRedis(redis)
                stack.callback(plain.close)
        pool = stack.enter_context(pool_process(folder, room))
        path = pool.paths()[0]
        tiers["pool"] = (pool.tier(path, stack), (os.getpid(), pool.pid))
        notes.append(f"The pool is reached over {path}.")
        for own in ("host", "disk", "redis"):
            if own in tiers:
                stack.callback(tiers[own][0].close)
        others, peer_notes = start_peers(
            [payload_bytes, len(rotation.sources), tempfile.mkdtemp(prefix="peer-", dir=disk_folder)],
            environments=peers or CHECKOUT / ".venv" / "peers",
            logs=folder,
            stack=stack,
            kinds=DISK_KINDS,
        )
        notes += peer_notes + ["Peers do not verify what they read."] * bool(others)
        cases = [
            case for op in ("read", "write") for case in _moves(op, rotation, tiers, raw, plain, others, batch, rounds)
        ]
    report("Tiers", cases, as_json=json, plot=plot, notes=notes)


def _moves(
    op: str,
    rotation: Rotation,
    tiers: dict[str, tuple[Tier, tuple[int, ...]]],
    raw: RawDisk,
    plain: PlainRedis | None,
    peers: Sequence[Peer],
    batch: int,
    rounds: int,
) -> list[Case]:
    subjects = {"memcpy": Subject(rotation.copies), _RAW_DISK: _raw(op, rotation, raw)}
    for name, (tier, pids) in tiers.items():
        if op == "read" and name == "disk":
            subjects[name] = _random_reads(rotation, tier, batch)
        elif op == "read":
            rotation.fill(tier, "read")
            subjects[name] = rotation.reads(tier, "read", batch, pids)
        else:
            subjects[name] = rotation.writes(tier, "write", batch, pids)
    if plain is not None:
        if op == "read":
            rotation.fill(plain, op)
        move = rotation.reads if op == "read" else rotation.writes
        subjects[_PLAIN_REDIS] = move(plain, op, batch, tiers["redis"][1])
    of_peers = {row: subject for peer in peers for (row, _), subject in peer.subjects(op, batch).items()}
    samples = in_turn(subjects | of_peers, rounds=rounds, label=op)
    floors = {"disk": _RAW_DISK} | dict.fromkeys(of_peers, _RAW_DISK)
    beside = {"disk": tuple(of_peers), "redis": (_PLAIN_REDIS,)}
    return [
        Case.of(
            name,
            op,
            samples[name],
            floor=(floors.get(name, "memcpy"), samples[floors.get(name, "memcpy")]),
            beside={row: samples[row] for row in beside.get(name, ()) if row in samples},
            round_bytes=rotation.nbytes,
            payload_bytes=rotation.payload_bytes,
            batch=batch,
        )
        for name in (_RAW_DISK, *tiers, *of_peers)
    ]


def _raw(op: str, rotation: Rotation, raw: RawDisk) -> Subject:
    """Fills in order, as the tier does; reads what a seed chooses."""
    num_blocks = len(rotation.sources)
    if op == "write":
        return Subject(lambda: [raw.write(rotation.sources)], prepare=raw.renew)
    for part in range(_DISK_ROUNDS):
        raw.write(rotation.sources, part * num_blocks)
    order = random.Random(0)
    return Subject(lambda: [raw.read(rotation.into, order.sample(range(_DISK_ROUNDS * num_blocks), num_blocks))])


def _random_reads(rotation: Rotation, tier: Tier, batch: int) -> Subject:
    """Some of several times as many blocks as a round reads, `batch` a call."""
    labels = [f"read {part}" for part in range(_DISK_ROUNDS)]
    for label in labels:
        rotation.fill(tier, label)
    num_blocks = len(rotation.sources)
    keys = [key for label in labels for key in keys_of(num_blocks, label)]
    order = random.Random(0)

    def run() -> list[float]:
        seconds = []
        chosen = order.sample(keys, num_blocks)
        for at in range(0, num_blocks, batch):
            start = time.perf_counter()
            statuses = tier.read(chosen[at : at + batch], rotation.into[at : at + batch])
            seconds.append(time.perf_counter() - start)
            if set(statuses) != {Status.HIT}:
                raise KvtierError("a read missed: the figures would mean nothing")
        return seconds

    return Subject(run)
