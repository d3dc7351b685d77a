"""`kvtier bench tiers`: the same blocks into and out of every tier below the device."""

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from kvtier.bench.blocks import NUM_SLOTS, Rotation
from kvtier.bench.folder import working_folder
from kvtier.bench.options import Json, PayloadBytes, Plot, Rounds
from kvtier.bench.pool_process import CALL_TIMEOUT_S, pool_process
from kvtier.bench.redis_process import redis_binary, redis_process
from kvtier.bench.report import Case, report
from kvtier.bench.rounds import NUM_ROUNDS, Subject, in_turn
from kvtier.malloc import keep_freed_memory
from kvtier.metrics import Metrics
from kvtier.tiers.base import Tier
from kvtier.tiers.breaker import CircuitBreaker
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.host import HostTier
from kvtier.tiers.redis import RedisTier

_ROOM = 4
"""Capacity of each tier, in rounds."""


def bench_tiers(
    json: Json = None,
    plot: Plot = None,
    payload_bytes: PayloadBytes = 2 << 20,
    batch: Annotated[int, typer.Option(min=1, help="Blocks per call.")] = NUM_SLOTS,
    rounds: Rounds = NUM_ROUNDS,
    redis: Annotated[
        str | None,
        typer.Option(help="URL of a Redis with room for two batches; default: its own, if installed."),
    ] = None,
    disk_dir: Annotated[
        Path | None, typer.Option(help="Where the disk tier makes its folder; default: the system's temporary folder.")
    ] = None,
) -> None:
    """Read and write 64 blocks in turn in host memory, on disk, in a Redis and in a pool process, all verified.

    CPU time is this process's and that of the servers it started. What the kernel does for a disk afterwards is not
    in it, nor is a drive's own cache switched off: writes are acknowledged when the file is complete.
    """
    keep_freed_memory()
    rotation = Rotation(payload_bytes, max(NUM_SLOTS, batch))
    room = max(64 << 20, _ROOM * rotation.nbytes)
    notes: list[str] = []
    with ExitStack() as stack:
        folder = stack.enter_context(working_folder())
        tiers: dict[str, tuple[Tier, tuple[int, ...]]] = {"host": (HostTier(room), (os.getpid(),))}
        disk_folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=disk_dir))
        tiers["disk"] = (DiskTier.open(disk_folder, room, reserve_bytes=0), (os.getpid(),))
        redis_pids: tuple[int, ...] = (os.getpid(),)
        if redis is None and (binary := redis_binary()) is not None:
            redis, redis_pid = stack.enter_context(redis_process(binary, folder, room))
            redis_pids = (os.getpid(), redis_pid)
        if redis is None:
            notes.append("Without redis: no redis-server is installed; name one with --redis.")
        else:
            breaker = CircuitBreaker(3, 1.0)
            tier = RedisTier(redis, metrics=Metrics(), breaker=breaker, call_timeout_s=CALL_TIMEOUT_S)
            tiers["redis"] = (tier, redis_pids)
        pool = stack.enter_context(pool_process(folder, room))
        path = pool.paths()[0]
        tiers["pool"] = (pool.tier(path, stack), (os.getpid(), pool.pid))
        notes.append(f"The pool is reached over {path}.")
        for own in ("host", "disk", "redis"):
            if own in tiers:
                stack.callback(tiers[own][0].close)
        cases = [case for op in ("read", "write") for case in _moves(op, rotation, tiers, batch, rounds)]
    report("Tiers", cases, as_json=json, plot=plot, notes=notes)


def _moves(
    op: str, rotation: Rotation, tiers: dict[str, tuple[Tier, tuple[int, ...]]], batch: int, rounds: int
) -> list[Case]:
    subjects = {"memcpy": Subject(rotation.copies)}
    for name, (tier, pids) in tiers.items():
        if op == "read":
            rotation.fill(tier, "read")
            subjects[name] = rotation.reads(tier, "read", batch, pids)
        else:
            subjects[name] = rotation.writes(tier, "write", batch, pids)
    samples = in_turn(subjects, rounds=rounds, label=op)
    return [
        Case.of(
            name,
            op,
            samples[name],
            floor=("memcpy", samples["memcpy"]),
            round_bytes=rotation.nbytes,
            payload_bytes=rotation.payload_bytes,
            batch=batch,
        )
        for name in tiers
    ]
