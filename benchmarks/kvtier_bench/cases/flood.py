"""`kvtier bench flood`: what a tenant that floods a pool costs another one, beside neighbours that never call it."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.options import Json
from kvtier.errors import KvtierError
from kvtier.system.redis_process import redis_binary, redis_process
from kvtier.system.working_folder import working_folder
from kvtier_bench.cases.flood_rig import BLUE, RED, Aftermath, Flooding, FloodRig
from kvtier_bench.measuring.report import Case, Spread, held_against, ratios, report
from kvtier_bench.measuring.rounds import percentile, progress
from kvtier_bench.processes.flood_means import BLOCK_BYTES, MEANS
from kvtier_bench.processes.pool_process import PoolProcess, pool_of_tenants

_PROCESS_BYTES = 256 << 20
"""What operators are told to leave a pool's process beside its memory (docs/deployment.md)."""
_MOST_POINTS, _MOST_P99_RATIO = 2.0, 2.0
"""The bar: how many points of its hits blue may lose, and its 99th percentile beside the burners'."""
BURNERS = "burners"


def bench_flood(
    json: Json = False,
    rounds: Annotated[int, typer.Option(min=1, help="Counted pairs of rounds.")] = 7,
    seconds: Annotated[float, typer.Option(min=0.2, help="Seconds of each round.")] = 8.0,
    memory_mib: Annotated[int, typer.Option(min=32, help="The pool's memory.")] = 192,
    processes: Annotated[int, typer.Option(min=1, help="Processes of the tenant that floods.")] = 4,
    means: Annotated[list[str] | None, typer.Option(help="Only these means; may be repeated.")] = None,
    pause_ms: Annotated[float, typer.Option(min=0, help="Between two reads of a client of the steady tenant.")] = 10.0,
    apart: Annotated[
        bool, typer.Option("--apart", help="The tenant that floods has a pool of its own on this machine.")
    ] = False,
) -> None:
    """Read a working set that its tenant is owed, beside another tenant that floods the pool by every means at once.

    The pool has memory, a disk, and a Redis where a server is installed. Blue is owed half of memory and a third of the
    disk; its working set is three quarters of that half, read over shared memory and over TCP, a prompt of 1 MiB every
    few milliseconds, and what it misses it writes again. Red floods. In turn with that, burners that never call the
    pool take as much processor, at the same priority, as red's clients and the pool have taken for red: one burner for
    each of red's processes, and two for the pool. So what differs is what blue waits for inside of the pool. With
    --apart, red floods a pool of its own with the same tiers, whose memory and sockets are then reported.
    """
    chosen = list(means or MEANS)
    if unknown := set(chosen) - set(MEANS):
        raise KvtierError(f"no means {', '.join(sorted(unknown))}: there are {', '.join(MEANS)}")
    how = Flooding(memory_mib << 20, chosen, min(processes, len(chosen)), pause_ms / 1000)
    with working_folder() as folder, ExitStack() as stack:
        redis_pid, notes, pools = _pools(folder, how, stack)
        if apart:
            (others := folder / RED).mkdir()
            redis_pid, notes, apart_pools = _pools(others, how, stack)
            pools = {**pools, RED: apart_pools[RED]}
        rig = FloodRig(pools, redis_pid, how, stack)
        with progress("pairs of rounds", 1 + rounds) as advance:
            rig.measure_quiet(seconds)
            advance()
            for _ in range(rounds):
                rig.measure_burners(seconds)
                rig.measure_red(seconds)
                advance()
        aftermath = rig.aftermath()
    cases = [_case(rig, path, aftermath) for path in rig.blue]
    report(
        f"A flood beside a steady tenant{' of another pool' if apart else ''}",
        cases,
        as_json=json,
        notes=[*notes, *_notes(rig, cases, aftermath)],
    )


def _pools(folder: Path, how: Flooding, stack: ExitStack) -> tuple[int | None, list[str], Mapping[str, PoolProcess]]:
    """The process of its Redis, if one is installed, what is to be said of its tiers, and one pool as each tenant
    reaches it."""
    settings = [f'disk_dir = "{folder}/disk"', f"disk_bytes = {4 * how.memory_bytes}", "disk_reserve_bytes = 0"]
    settings += [f"disk_segment_bytes = {max(1 << 20, how.memory_bytes // 64)}"]
    redis_pid, notes = None, []
    if (binary := redis_binary()) is None:
        notes = ["Without redis: no redis-server is installed."]
    else:
        url, redis_pid = stack.enter_context(redis_process(binary, folder, 2 * how.memory_bytes))
        settings += [f'redis_url = "{url}"']
    pools = stack.enter_context(pool_of_tenants(folder, how.memory_bytes, settings, how.tenants()))
    return redis_pid, notes, pools


def _case(rig: FloodRig, path: str, aftermath: Aftermath) -> Case:
    """Times are those beside red; the ratio is that of the 99th percentiles, pair by pair."""
    red, burners = rig.beside_red, rig.beside_burners
    to_burners = ratios(burners.percentiles_s(path, 99), red.percentiles_s(path, 99))
    medians = ratios(red.percentiles_s(path, 50), burners.percentiles_s(path, 50))
    figures = {
        "p99_ratio": ratios(red.percentiles_s(path, 99), burners.percentiles_s(path, 99)).median_s,
        "p50_ratio": medians.median_s,
        "burners_p50_us": percentile(burners.reads_s(path), 50) * 1e6,
        "burners_p99_us": percentile(burners.reads_s(path), 99) * 1e6,
        "hit_rate": red.hit_rate(path),
        "burners_hit_rate": burners.hit_rate(path),
        "num_reads": len(red.reads_s(path)),
        "burners_num_reads": len(burners.reads_s(path)),
        "num_refused": red.num_refused(),
        "blue_memory_bytes": min(rig.blue_bytes),
        "working_set_bytes": rig.how.working_set_bytes,
        "pool_peak_rss_bytes": aftermath.after.peak_rss_bytes,
        "cpu_share": Spread.of(red.cpu_shares).median_s,
        "burners_cpu_share": Spread.of(burners.cpu_shares).median_s,
    }
    return Case(
        f"{BLUE}, {path}",
        "read",
        BLOCK_BYTES,
        4,
        p50_us=percentile(red.reads_s(path), 50) * 1e6,
        p99_us=percentile(red.reads_s(path), 99) * 1e6,
        rounds=len(red.cpu_shares),
        figures=figures | {f"red_{name}": num for name, num in sorted(rig.done.items())},
        **held_against(BURNERS, to_burners),
    )


def _notes(rig: FloodRig, cases: Sequence[Case], aftermath: Aftermath) -> list[str]:
    """What the figures say about the bars."""
    how, notes = rig.how, []
    for case in cases:
        points = 100 * (case.figures["burners_hit_rate"] - case.figures["hit_rate"])
        notes += [
            _held(
                points <= _MOST_POINTS, f"{case.name}: {points:.2f} points of hits lost (at most {_MOST_POINTS:.0f})"
            ),
            _held(
                (ratio := case.figures["p99_ratio"]) <= _MOST_P99_RATIO,
                f"{case.name}: p99 {ratio:.2f} times that beside burners (at most {_MOST_P99_RATIO:.0f}), "
                f"{case.figures['burners_p99_us'] / 1e3:.1f} to {(case.p99_us or 0) / 1e3:.1f} ms over all rounds",
            ),
        ]
    before, after = aftermath.before, aftermath.after
    written = rig.done["written_bytes"]
    kept, working_set = min(rig.blue_bytes), how.working_set_bytes
    most_bytes = how.memory_bytes + _PROCESS_BYTES
    num_red = aftermath.num_red_connections
    return [
        *notes,
        _held(kept >= working_set, f"blue has {kept >> 20} MiB of memory; its working set is {working_set >> 20}"),
        _held(
            after.peak_rss_bytes <= most_bytes,
            f"the pool's process took {after.peak_rss_bytes >> 20} MiB at most (budget {most_bytes >> 20})",
        ),
        _held(
            (after.num_sockets or 0) <= (before.num_sockets or 0) and num_red[1] >= num_red[0],
            f"from after one flood to after all: sockets that lead to no Redis {before.num_sockets} to "
            f"{after.num_sockets}, threads {before.num_threads} to {after.num_threads} (some of gRPC stay), "
            f"places for red's connections {num_red[0]} to {num_red[1]}",
        ),
        _held(all(aftermath.served.values()), f"new clients are served: {dict(aftermath.served)}"),
        f"red wrote {written >> 20:,} MiB, {written / how.red_bytes:.1f} times what it is owed of memory; "
        f"in all: {dict(sorted(rig.done.items()))}",
        f"processor seconds per second, clients and pool: {cases[0].figures['cpu_share']:.2f} beside red, "
        f"{cases[0].figures['burners_cpu_share']:.2f} beside burners",
    ]


def _held(is_held: bool, text: str) -> str:
    return f"{'held' if is_held else 'MISSED'}: {text}"
