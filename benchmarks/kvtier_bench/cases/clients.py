"""`kvtier bench clients`: many client processes at one pool, started together, beside a single one."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from kvtier.cli.options import Json, Plot
from kvtier.errors import KvtierError
from kvtier.system.working_folder import working_folder
from kvtier_bench.measuring.blocks import NUM_SLOTS
from kvtier_bench.measuring.options import PayloadBytes
from kvtier_bench.measuring.report import Case, held_against, report
from kvtier_bench.measuring.rounds import NUM_ROUNDS, Spread, process_clock, progress
from kvtier_bench.processes.client_process import ClientProcess, ClientSettings
from kvtier_bench.processes.pool_process import PoolProcess, pool_process

_GIB = 1 << 30
ONE = "one client"


def bench_clients(
    json: Json = False,
    plot: Plot = None,
    payload_bytes: PayloadBytes = 2 << 20,
    batch: Annotated[int, typer.Option(min=1, help="Blocks per call.")] = NUM_SLOTS,
    clients: Annotated[int, typer.Option(min=2, help="Client processes.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.1, help="For each path and op: so long all, and so long one.")] = 30.0,
    path: Annotated[list[str] | None, typer.Option(help="Only this path; may be repeated.")] = None,
) -> None:
    """Read and write with 8 processes at a time, each its own 64 blocks, in turn with one process alone.

    The time is cut into pieces, one after the other: all from a barrier, then one alone, and so on. A ratio compares
    the aggregate of all with the one of the same piece. Also: how the slowest client fared beside the mean of all,
    and the pool's memory before and after.
    """
    num_slots = max(NUM_SLOTS, batch)
    room = max(64 << 20, 3 * clients * num_slots * payload_bytes)
    cases = []
    with working_folder() as folder, ExitStack() as stack:
        pool = stack.enter_context(pool_process(folder, room))
        names = pool.paths()
        if unknown := set(path or ()) - set(names):
            raise KvtierError(f"no path {', '.join(sorted(unknown))}: there are {', '.join(names)}")
        running = [
            stack.enter_context(ClientProcess(pool, ClientSettings(f"client-{i}", payload_bytes, num_slots, batch)))
            for i in range(clients)
        ]
        for name in path or names:
            for op in ("read", "write"):
                cases.append(_case(pool, running, name, op, seconds, payload_bytes, batch))
    report(f"{clients} clients at a time", cases, as_json=json, plot=plot, notes=[_note(case) for case in cases])


def _note(case: Case) -> str:
    mib = [int(case.figures[f"pool_rss_{when}_bytes"]) >> 20 for when in ("before", "after")]
    return (
        f"{case.name}, {case.op}: the slowest client has {case.figures['slowest_to_mean']:.2f} of the mean; "
        f"the pool's memory went from {mib[0]:,} to {mib[1]:,} MiB."
    )


@dataclass(slots=True)
class _Totals:
    """The sums over all pieces of a measurement. One thread."""

    all_bytes_per_s: list[float] = field(default_factory=list)
    one_bytes_per_s: list[float] = field(default_factory=list)
    of_client: list[list[float]] = field(default_factory=list)
    """Bytes per second of each client, by piece."""
    nbytes: int = 0
    """The bytes that all clients moved."""
    cpu_s: float = 0.0
    """CPU seconds of all clients and of the pool while the clients ran together."""


def _case(
    pool: PoolProcess,
    clients: Sequence[ClientProcess],
    path: str,
    op: str,
    seconds: float,
    payload_bytes: int,
    batch: int,
) -> Case:
    piece_s = seconds / NUM_ROUNDS
    _run(clients, path, op, piece_s)  # connects, fills, touches: not counted
    rss_before = _rss_bytes(pool.pid)
    totals = _Totals()
    clocks = [process_clock(pid) for pid in (pool.pid, *(client.pid for client in clients))]
    with progress(f"{path}, {op}", NUM_ROUNDS) as advance:
        for _ in range(NUM_ROUNDS):
            before = sum(clock() for clock in clocks)
            moved = _run(clients, path, op, piece_s)
            totals.cpu_s += sum(clock() for clock in clocks) - before
            totals.nbytes += sum(nbytes for nbytes, _ in moved)
            totals.of_client.append([nbytes / elapsed_s for nbytes, elapsed_s in moved])
            totals.all_bytes_per_s.append(sum(totals.of_client[-1]))
            ((nbytes, elapsed_s),) = _run(clients[:1], path, op, piece_s)
            totals.one_bytes_per_s.append(nbytes / elapsed_s)
            advance()
    pairs = zip(totals.all_bytes_per_s, totals.one_bytes_per_s, strict=True)
    ratio = Spread.of([of_all / of_one for of_all, of_one in pairs])
    means = [fmean(pieces) for pieces in zip(*totals.of_client, strict=True)]
    rss_after = _rss_bytes(pool.pid)
    return Case(
        path,
        op,
        payload_bytes,
        batch,
        gb_per_s=Spread.of(totals.all_bytes_per_s).median_s / 1e9,
        cpu_s_per_gib=totals.cpu_s / (totals.nbytes / _GIB),
        rounds=NUM_ROUNDS,
        figures={
            "one_client_gb_per_s": Spread.of(totals.one_bytes_per_s).median_s / 1e9,
            "slowest_to_mean": min(means) / fmean(means),
            "pool_rss_before_bytes": rss_before,
            "pool_rss_after_bytes": rss_after,
        },
        **held_against(ONE, ratio),
    )


def _run(clients: Sequence[ClientProcess], path: str, op: str, seconds: float) -> list[tuple[int, float]]:
    """All of them from a barrier: bytes and seconds of each."""
    for client in clients:
        client.prepare(path, op, seconds)
    for client in clients:
        client.ready()
    for client in clients:
        client.go()
    return [client.result() for client in clients]


def _rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise KvtierError(f"process {pid} has no memory")
