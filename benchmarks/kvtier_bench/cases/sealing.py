"""`kvtier bench sealing`: what sealed blocks cost, on their way to a pool and in the stored form."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from kvtier.cli.options import Json, Plot
from kvtier.codec.checksums import checksum
from kvtier.codec.sealed_form import open_into, seal
from kvtier.codec.sealing import KEY_BYTES, Purpose, SealingKeys
from kvtier.codec.stored_form import Codec, decode_into, encode, parse_stored_header
from kvtier.identity.keys import tenant_id
from kvtier.memory.malloc import keep_freed_memory
from kvtier.system.working_folder import working_folder
from kvtier_bench.measuring.blocks import TENANT, Rotation, keys_of
from kvtier_bench.measuring.options import PayloadBytes, Rounds
from kvtier_bench.measuring.report import Case, report
from kvtier_bench.measuring.rounds import NUM_ROUNDS, Samples, Subject, in_turn
from kvtier_bench.processes.pool_process import SHM, pool_process

_ROOM = 16
"""Memory of the pool, in rounds: blocks to read and blocks to write, plain and sealed, over every path."""
_BATCH = 64
_KEY = bytes(range(KEY_BYTES))


def bench_sealing(
    json: Json = False, plot: Plot = None, payload_bytes: PayloadBytes = 2 << 20, rounds: Rounds = NUM_ROUNDS
) -> None:
    """Read and write 64 blocks in one call, sealed and plain in turn, through shared memory and over TCP, and make and
    read their stored form. The ratio is of sealed to plain blocks per second.

    CPU time is that of this process and the pool's.
    """
    keep_freed_memory()
    rotation = Rotation(payload_bytes)
    cases: list[Case] = []
    with working_folder() as folder, ExitStack() as stack:
        pool = stack.enter_context(pool_process(folder, _ROOM * max(rotation.nbytes, 4 << 20)))
        pids = (os.getpid(), pool.pid)
        keys = SealingKeys(Purpose.CARRIAGE, tenant_id(TENANT), {1: _KEY})
        for path in [*([SHM] if pool.shared_memory else []), "tcp"]:
            tiers = {"plain": pool.tier(path, stack), "sealed": pool.tier(path, stack, sealing=keys)}
            for name, tier in tiers.items():
                rotation.fill(tier, f"read {name} {path}")
            reads = {n: rotation.reads(tier, f"read {n} {path}", _BATCH, pids) for n, tier in tiers.items()}
            writes = {n: rotation.writes(tier, f"write {n} {path}", _BATCH, pids) for n, tier in tiers.items()}
            for op, subjects in (("read", reads), ("write", writes)):
                samples = in_turn(subjects, rounds=rounds, label=f"{op}, {path}")
                cases += _pair(path, op, samples, rotation)
    for op, subjects in _stored_forms(rotation).items():
        cases += _pair("stored form", op, in_turn(subjects, rounds=rounds, label=op), rotation)
    report("Sealed blocks", cases, as_json=json, plot=plot, notes=[])


def _pair(name: str, op: str, samples: dict[str, Samples], rotation: Rotation) -> list[Case]:
    """Plain blocks, and sealed ones beside them."""
    nbytes, payload_bytes = rotation.nbytes, rotation.payload_bytes
    plain, sealed = samples["plain"], samples["sealed"]
    floor = ("plain", plain)
    return [
        Case.of(f"{name}, plain", op, plain, round_bytes=nbytes, payload_bytes=payload_bytes, batch=_BATCH),
        Case.of(
            f"{name}, sealed", op, sealed, floor=floor, round_bytes=nbytes, payload_bytes=payload_bytes, batch=_BATCH
        ),
    ]


def _stored_forms(rotation: Rotation) -> dict[str, dict[str, Subject]]:
    """Making the stored form of raw blocks, whose writer has summed them, and reading it."""
    keys = SealingKeys(Purpose.STORAGE, tenant_id(TENANT), {1: _KEY})
    blocks = list(zip(keys_of(len(rotation.sources), "form"), rotation.sources, rotation.into, strict=True))
    sums = {key: checksum(key, source) for key, source, _ in blocks}
    plain = {key: encode(key, source, sums[key]) for key, source, _ in blocks}
    sealed = {key: seal(key, source, sums[key], Codec.RAW, keys) for key, source, _ in blocks}
    make: dict[str, list[Callable[[], object]]] = {
        "plain": [partial(encode, key, source, sums[key]) for key, source, _ in blocks],
        "sealed": [partial(seal, key, source, sums[key], Codec.RAW, keys) for key, source, _ in blocks],
    }
    read: dict[str, list[Callable[[], object]]] = {
        "plain": [partial(decode_into, plain[key][0], key, plain[key][1], into) for key, _, into in blocks],
        "sealed": [
            partial(open_into, parse_stored_header(sealed[key][0]), key, sealed[key][1], into, keys)
            for key, _, into in blocks
        ],
    }
    return {
        op: {name: Subject(partial(_timed, calls)) for name, calls in of.items()}
        for op, of in (("write", make), ("read", read))
    }


def _timed(calls: Sequence[Callable[[], object]]) -> list[float]:
    began_s = time.perf_counter()
    for call in calls:
        call()
    return [time.perf_counter() - began_s]
