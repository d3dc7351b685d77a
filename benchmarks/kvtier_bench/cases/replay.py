"""`kvtier bench replay`: a trace through a pool process by client processes, beside what the simulator says."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from kvtier.cli.options import Json
from kvtier.errors import ConfigError, KvtierError
from kvtier.policies.registry import by_name
from kvtier.simulate.replay import DEFINITIONS, HitCounts, ReplayOptions, replay
from kvtier.simulate.tier import SimulatedTier
from kvtier.system.working_folder import working_folder
from kvtier.tiers.disk.log.format import ENTRY, PAGE, pages_of
from kvtier.tiers.host.slab import SLOT_ALIGN_BYTES
from kvtier.tiers.host.tier import BLOCK_OVERHEAD_BYTES
from kvtier.traces.form import Request, Trace
from kvtier.traces.read import read_trace
from kvtier_bench.measuring.report import Case, report
from kvtier_bench.measuring.rounds import percentile, progress
from kvtier_bench.processes.pool_process import SHM, PoolProcess, pool_process
from kvtier_bench.processes.replay_process import ReplayClient, Served, size_of

_SIZE = TypeAdapter(ByteSize)
_PATHS = (SHM, "tcp", SHM, "unix")
"""The ways of clients to the pool, one after the other: half of them map its memory."""
_SEGMENTS, _SMALLEST_SEGMENT_BYTES = 160, 1 << 20
"""Segments on the disk, as many as 10 GiB have by default, and the smallest that may be configured."""


def bench_replay(
    trace: Annotated[Path, typer.Argument(help="Recorded by a pool, or Mooncake's JSON lines, plain or .gz.")],
    memory: Annotated[str, typer.Option(help="The pool's memory.")] = "16MiB",
    disk: Annotated[str | None, typer.Option(help="Its disk, e.g. 64MiB; without: memory only.")] = None,
    policy: Annotated[str, typer.Option(help="memory_policy of the pool.")] = "lru",
    sizes: Annotated[str, typer.Option(help="Lengths that blocks have, with commas.")] = "1KiB,2KiB,4KiB,8KiB",
    clients: Annotated[int, typer.Option(min=1, help="Client processes; each serves a request in its turn.")] = 4,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first requests of the trace.")] = None,
    warm_up: Annotated[float, typer.Option(min=0, max=0.99, help="Share of requests that do not count.")] = 0.0,
    json: Json = False,
) -> None:
    """Hit rates of a real pool, beside those of the simulator for the same policy and as many bytes.

    Requests come one after the other, each by another client. It looks up all its blocks, loads those from the first
    one on that are there, holds them against what they have to be, and stores the rest. Blocks are small, so that a
    pool of some MiB has as many of them as a large one. The simulator charges each block what it takes of the pool:
    memory with its books, pages of the disk.
    """
    lengths = [_bytes("--sizes", text) for text in sizes.split(",")]
    whole = read_trace(trace)
    shortened = with_fields(whole, requests=[r for r in whole.requests if not r.is_write][:requests])
    memory_bytes, disk_bytes = _bytes("--memory", memory), _bytes("--disk", disk) if disk is not None else 0
    simulated = _simulate(shortened, policy, lengths, {"memory": memory_bytes, "disk": disk_bytes}, warm_up)
    with working_folder() as folder, ExitStack() as stack:
        settings = [f'memory_policy = "{policy}"', "min_residency_s = 0"]
        if disk_bytes:
            segment_bytes = max(_SMALLEST_SEGMENT_BYTES, disk_bytes // _SEGMENTS)
            settings += [f'disk_dir = "{folder}/disk"', f"disk_bytes = {disk_bytes}"]
            settings += [f"disk_segment_bytes = {segment_bytes}", "disk_reserve_bytes = 0"]
        pool = stack.enter_context(pool_process(folder, memory_bytes, settings))
        running = _start(pool, clients, lengths, stack)
        served = _replay(shortened, running)
    name = f"{policy}, {memory}" + (f" and {disk} of disk" if disk else "")
    case, notes = _compared(name, shortened, served, simulated, warm_up)
    report("A trace through a pool", [case], as_json=json, notes=notes)


def _bytes(option: str, text: str) -> int:
    try:
        nbytes = int(_SIZE.validate_python(text))
    except ValidationError as error:
        raise ConfigError(f"{option} {text}: name a size, e.g. 16MiB") from error
    if nbytes < 1:
        raise ConfigError(f"{option} {text}: name a size above 0, e.g. 16MiB")
    return nbytes


def _start(pool: PoolProcess, num_clients: int, sizes: Sequence[int], stack: ExitStack) -> list[ReplayClient]:
    paths = itertools.cycle(_PATHS if pool.shared_memory else [path for path in _PATHS if path != SHM])
    return [ReplayClient(pool, path, sizes, stack) for path in itertools.islice(paths, num_clients)]


def _simulate(
    trace: Trace, policy: str, sizes: Sequence[int], capacities: Mapping[str, int], warm_up: float
) -> HitCounts:
    """What the simulator says of tiers of so many bytes, by name; of those that have any."""
    lengths = [size_of(key, sizes) for key in range(trace.num_keys)]
    costs = {
        "memory": [-(-size // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES + BLOCK_OVERHEAD_BYTES for size in lengths],
        "disk": [pages_of(size) * PAGE + ENTRY.itemsize for size in lengths],
    }
    tiers = []
    for name, nbytes in capacities.items():
        if nbytes:
            num_blocks = max(1, nbytes * len(lengths) // sum(costs[name]))
            eviction = by_name(policy if name == "memory" else "lru", num_blocks=num_blocks)
            tiers.append(SimulatedTier(name, nbytes, eviction, costs=costs[name]))
    return replay(trace, tiers, ReplayOptions(warm_up))


def _replay(trace: Trace, clients: Sequence[ReplayClient]) -> list[Served]:
    served = []
    with progress("replaying", len(trace.requests)) as advance:
        for request, client in zip(trace.requests, itertools.cycle(clients)):
            served.append(client.serve(request.keys))
            advance()
    return served


def _compared(
    name: str, trace: Trace, served: Sequence[Served], simulated: HitCounts, warm_up: float
) -> tuple[Case, list[str]]:
    """The row of the report, and what is said of it."""
    first = int(len(served) * warm_up)
    counts = _counted(trace.requests[first:], served[first:], trace.tokens_per_block or 0)
    if not counts.num_blocks:
        raise KvtierError("no request of the trace counts: --warm-up is too large, or --requests too small")
    figures: dict[str, float] = {"num_requests": len(served), "num_refused": sum(one.refused for one in served)}
    notes = [f"{len(served):,} requests, {counts.num_blocks:,} blocks counted, {figures['num_refused']:,.0f} refused"]
    expected = simulated.rates()
    for rate, value in counts.rates().items():
        if value is None or (said := expected[rate]) is None:
            continue
        figures |= {rate: value, f"simulated_{rate}": said}
        notes.append(
            f"{rate.removesuffix('_rate').replace('_', ' ')}s: pool {value:.2%}, simulator {said:.2%}, difference "
            f"{100 * (value - said):+.2f} points ({DEFINITIONS[rate]})"
        )
    times = [one.seconds for one in served[first:]]
    p50_us, p99_us = percentile(times, 50) * 1e6, percentile(times, 99) * 1e6
    return Case(name, "replay", p50_us=p50_us, p99_us=p99_us, unit="request", figures=figures), notes


def _counted(requests: Sequence[Request], served: Sequence[Served], tokens_per_block: int) -> HitCounts:
    counts = HitCounts([])
    for request, one in zip(requests, served, strict=True):
        counts.num_blocks += len(request.keys)
        counts.block_hits += one.found
        counts.prefix_hits += one.loaded
        counts.num_tokens += request.num_tokens
        counts.token_hits += min(request.num_tokens, one.loaded * tokens_per_block)
    return counts
