"""`kvtier bench fetch`: what a busy interpreter leaves of an engine's fetch from the pool, and what that costs it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from prometheus_client import CollectorRegistry

from kvtier.build.engine_cache import EngineCache, engine_cache
from kvtier.cli.options import Json
from kvtier.clock import MONOTONIC
from kvtier.config import parse_config
from kvtier.device.kv import HostMemoryKV
from kvtier.errors import KvtierError
from kvtier.identity.keys import BlockHasher, BlockKey, PrefixHasher, tenant_id
from kvtier.memory.malloc import keep_freed_memory
from kvtier.offload import Block
from kvtier.system.working_folder import working_folder
from kvtier.tiers.base import Status
from kvtier_bench.measuring.blocks import NUM_SLOTS, TENANT, namespace_of
from kvtier_bench.measuring.report import Case, report
from kvtier_bench.measuring.rounds import NUM_ROUNDS, Subject, in_turn
from kvtier_bench.processes.copy_process import CopyProcess
from kvtier_bench.processes.pool_process import PoolProcess, pool_process

_STEP_ITERATIONS = 100_000
"""Iterations of a pure Python loop between two polls: a few milliseconds, as a scheduler's step takes."""
_ALONE_S = 0.3
_PATIENCE_S = 60.0


def bench_fetch(
    json: Json = False,
    payload_bytes: Annotated[int, typer.Option(min=4096, help="Bytes per block.")] = 2 << 20,
    batch: Annotated[int, typer.Option(min=1, help="Blocks per transfer (cache.batch_blocks).")] = 32,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks per fetch.")] = 256,
    load_threads: Annotated[
        int | None, typer.Option(min=1, help="Transfers at a time; default: that of cache.load_threads.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds.")] = NUM_ROUNDS,
) -> None:
    """Fetch blocks from the pool to the device, with the engine's thread idle, and in a pure Python loop, in turn.

    From where they lie (`pool.direct_loads`), by way of host memory with the tier process of `cache.io_process`, and
    without that. The device is host memory. The loop's own speed is held
    against the same loop while nothing is fetched, beside that of the loop while another process copies memory.
    """
    keep_freed_memory()
    settings: dict[str, object] = {"batch_blocks": batch, "load_deadline_s": _PATIENCE_S}
    if load_threads is not None:
        settings["load_threads"] = load_threads
    with working_folder() as folder, ExitStack() as stack:
        pool = stack.enter_context(pool_process(folder, 2 * payload_bytes * blocks + (64 << 20)))
        fetches = {
            name: stack.enter_context(
                _fetch(
                    pool, payload_bytes, blocks, {**settings, "io_process": io_process}, direct_loads=name == "direct"
                )
            )
            for name, io_process in (("direct", True), ("process", True), ("threads", False))
        }
        copies = stack.enter_context(CopyProcess(payload_bytes, NUM_SLOTS))
        beside_copies: list[float] = []
        subjects = {}
        for name, fetch in fetches.items():
            subjects[f"{name} idle"] = Subject(fetch.idle, fetch.forget)
            subjects[f"{name} busy"] = Subject(fetch.busy, fetch.forget)
        subjects["copies"] = Subject(lambda: [_beside(copies, beside_copies)])
        samples = in_turn(subjects, rounds=rounds, label="fetch")
    fields: dict[str, Any] = {"payload_bytes": payload_bytes, "batch": batch, "round_bytes": payload_bytes * blocks}
    cases: list[Case] = []
    notes: list[str] = []
    for name, fetch in fetches.items():
        idle, busy = samples[f"{name} idle"], samples[f"{name} busy"]
        cases.append(Case.of(name, "fetch, idle", idle, **fields))
        cases.append(Case.of(name, "fetch, busy", busy, floor=(f"{name} idle", idle), **fields))
        speeds, on_core = fetch.loop_speeds[-rounds:], fetch.speeds_on_core[-rounds:]
        notes.append(
            f"{name}: beside a fetch the loop keeps {median(speeds):.1%} of its speed "
            f"({min(speeds):.1%} .. {max(speeds):.1%}); {median(on_core):.1%} without the time in which it waited "
            "for a core, not for the interpreter."
        )
    notes.append(f"leased: {fetches['direct'].share_leased():.0%} of the blocks of direct, from its first fetch on.")
    kept = beside_copies[-rounds:]
    notes.append(
        f"copies: beside a process that only copies memory the loop keeps {median(kept):.1%} of its speed "
        f"({min(kept):.1%} .. {max(kept):.1%}), which is what this machine takes for any such neighbour."
    )
    report("Fetch from the pool to the device", cases, as_json=json, notes=notes)


@dataclass
class _Fetch:
    """An engine's cache, and blocks that only the pool has."""

    cache: EngineCache
    blocks: list[Block]
    registry: CollectorRegistry
    loop_speeds: list[float] = field(default_factory=list)
    """Steps of the loop per second in each busy round, as a share of those while nothing is fetched."""
    speeds_on_core: list[float] = field(default_factory=list)
    """Values of `loop_speeds`, without the seconds in which the loop could run and had no core."""

    def forget(self) -> None:
        """Leaves the blocks to the pool alone."""
        self.cache.hierarchy.reset()

    def share_leased(self) -> float:
        """The share of the blocks from the pool that were copied from where they lie."""
        leased, read = (
            self.registry.get_sample_value(
                "kvtier_tier_blocks_total", {"tier": "pool", "op": op, "status": Status.HIT.name.lower()}
            )
            or 0.0
            for op in ("lease", "read")
        )
        return leased / read

    def idle(self) -> list[float]:
        """Fetches while this thread waits."""
        return [self._fetch(lambda: self.cache.hierarchy.wait(1.0))]

    def busy(self) -> list[float]:
        """Fetches while this thread computes."""
        num_steps = 0

        def step() -> None:
            nonlocal num_steps
            _compute()
            num_steps += 1

        waited_s = _waited_for_core_s()
        seconds = self._fetch(step)
        waited_s = _waited_for_core_s() - waited_s
        alone, alone_on_core = self._alone()
        self.loop_speeds.append(num_steps / seconds / alone)
        self.speeds_on_core.append(num_steps / (seconds - waited_s) / alone_on_core)
        return [seconds]

    def _fetch(self, between: Callable[[], None]) -> float:
        start = time.perf_counter()
        job_id = self.cache.hierarchy.start_load(self.blocks)
        deadline = MONOTONIC() + _PATIENCE_S
        while MONOTONIC() < deadline:
            between()
            for result in self.cache.hierarchy.poll():
                if result.job_id == job_id:
                    if set(result.tiers) != {"pool"}:
                        raise KvtierError(f"{result}")
                    return time.perf_counter() - start
        raise KvtierError("not all blocks came from the pool: the figures would mean nothing")

    def _alone(self) -> tuple[float, float]:
        """Steps per second, and per second without waiting for a core."""
        waited_s = _waited_for_core_s()
        start, num_steps = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - start) < _ALONE_S:
            _compute()
            self.cache.hierarchy.poll()
            num_steps += 1
        waited_s = _waited_for_core_s() - waited_s
        return num_steps / elapsed, num_steps / (elapsed - waited_s)


def _beside(copies: CopyProcess, speeds: list[float]) -> float:
    """Seconds. Adds to `speeds` the loop's speed while another process copies, as a share of that before it did."""
    alone = _steps_per_s(lambda elapsed_s: elapsed_s >= _ALONE_S)
    start = time.perf_counter()
    copies.begin()
    speeds.append(_steps_per_s(lambda _: copies.has_ended()) / alone)
    return time.perf_counter() - start


def _steps_per_s(is_over: Callable[[float], bool]) -> float:
    start, num_steps, elapsed_s = time.perf_counter(), 0, 0.0
    while not is_over(elapsed_s):
        _compute()
        num_steps += 1
        elapsed_s = time.perf_counter() - start
    return num_steps / elapsed_s


def _compute() -> int:
    total = 0
    for i in range(_STEP_ITERATIONS):
        total += i
    return total


def _waited_for_core_s() -> float:
    """Seconds in which this thread was runnable and did not run."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


@contextmanager
def _fetch(
    pool: PoolProcess, payload_bytes: int, num_blocks: int, cache: dict[str, object], *, direct_loads: bool
) -> Iterator[_Fetch]:
    config = parse_config(
        {
            "tenant": TENANT,
            "tenants": {TENANT: {"secret": "env:SECRET", "token": "env:TOKEN"}},
            "cache": cache,
            "host": {"capacity_bytes": 2 * num_blocks * payload_bytes},
            "pool": {"address": pool.unix, "direct_loads": direct_loads},
        },
        source="kvtier bench fetch",
        environ={"SECRET": "of a benchmark, shared with nobody", "TOKEN": pool.token},
    )
    namespace = namespace_of(payload_bytes)
    kv = np.random.default_rng(0).integers(0, 256, (num_blocks, payload_bytes), dtype=np.uint8)
    hasher = BlockHasher(tenant_id(TENANT), PrefixHasher(bytes(32), "", 1))
    keys = hasher.hash_blocks(np.arange(num_blocks, dtype=np.int32))
    # As in an engine that has been running for a while: a prefix is spread over the device.
    blocks = list(zip(keys, np.random.default_rng(1).permutation(num_blocks).tolist(), strict=True))
    registry = CollectorRegistry()
    with engine_cache(config, device=HostMemoryKV(kv), namespace=namespace, registry=registry) as built:
        built.hierarchy.start_save(blocks)
        _wait_for_pool(built, keys)
        expected = kv.copy()
        kv[:] = 0
        yield _Fetch(built, blocks, registry)
        if not np.array_equal(kv, expected):
            raise KvtierError("a fetched block is not what was saved")


def _wait_for_pool(cache: EngineCache, keys: Sequence[BlockKey]) -> None:
    deadline = MONOTONIC() + _PATIENCE_S
    while MONOTONIC() < deadline:
        cache.hierarchy.wait(0.05)
        cache.hierarchy.poll()
        cache.hierarchy.reset()
        ticket = cache.hierarchy.start_lookup(keys)
        while (statuses := cache.hierarchy.poll_lookup(ticket)) is None:
            cache.hierarchy.wait(0.05)
        if all(status.tier == "pool" for status in statuses):
            return
    raise KvtierError("the pool did not take the blocks")
