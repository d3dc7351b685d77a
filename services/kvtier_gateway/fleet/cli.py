"""The command `kvtier simulate-fleet`."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress

from kvtier.cli.options import Json, Plot, print_json, telling_in_json
from kvtier.errors import ConfigError
from kvtier.traces.form import Trace
from kvtier.traces.jsonl import MOONCAKE_TOKENS_PER_BLOCK
from kvtier.traces.read import read_trace
from kvtier_gateway.fleet.cases import NAMES, Case, require_strategies, run_case
from kvtier_gateway.fleet.figures import DEFINITIONS, Summary
from kvtier_gateway.fleet.hardware import PoolSpeed
from kvtier_gateway.fleet.tables import draw, print_results

_T = TypeVar("_T")


@telling_in_json
def simulate_fleet_command(
    trace: Annotated[Path, typer.Argument(help="JSON lines as Mooncake's, plain or .gz.")],
    engines: Annotated[str, typer.Option(help="How many; several numbers with commas.")] = "8",
    strategy: Annotated[
        str, typer.Option(help=f"Of {', '.join(NAMES)}; several with commas.")
    ] = "priced,precise,round_robin",
    load: Annotated[
        str, typer.Option(help="Computing all prompts without a cache, over what engines can; several with commas.")
    ] = "0.7",
    pool: Annotated[
        str, typer.Option(help="none, slow (10 Gbit/s an engine), fast (200); several with commas.")
    ] = "fast",
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of each case, each from another request of the trace on.")
    ] = 1,
    tokens_per_block: Annotated[
        int, typer.Option(min=1, help="Tokens that an id of the trace stands for, which does not say it.")
    ] = MOONCAKE_TOKENS_PER_BLOCK,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """Which engine for which request? Replays a trace through strategies of the gateway and simulated engines.

    Engines are an 8 B model on an H200 each. `oracle` is `priced` by one who knows what is true in the simulation.

    \b
    Examples:
      kvtier simulate-fleet conversation_trace.jsonl --engines 16 --load 0.5,0.9
      kvtier simulate-fleet trace.jsonl.gz --strategy priced,radix,epp --pool none --seeds 3
      kvtier simulate-fleet trace.jsonl --engines 4,64 --pool none,slow,fast --json
    """
    names = [name.strip() for name in strategy.split(",")]
    require_strategies(names)
    numbers = _parsed("--engines", engines, int, "1 or more, e.g. 4,16", lambda number: number >= 1)
    loads = _parsed("--load", load, float, "above 0, e.g. 0.5,0.9", lambda number: 0 < number < float("inf"))
    pools = _parsed("--pool", pool, PoolSpeed, "of none, slow and fast", lambda _: True)
    replayed = read_trace(trace, tokens_per_block=tokens_per_block)
    cases = [Case(name, *rest) for rest in product(numbers, loads, pools) for name in names]
    results = _run(replayed, cases, seeds)
    _report(replayed, results, json, plot)


def _parsed(option: str, text: str, kind: Callable[[str], _T], wanted: str, good: Callable[[_T], bool]) -> list[_T]:
    try:
        values = [kind(part.strip()) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(map(good, values)):
        raise ConfigError(f"{option} {text}: name {wanted}")
    return values


def _run(trace: Trace, cases: Sequence[Case], num_seeds: int) -> list[tuple[Case, Summary]]:
    """All cases, with a bar on standard error while it takes."""
    results = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=len(trace.requests) * len(cases) * num_seeds)
        for number, case in enumerate(cases, 1):
            progress.update(
                task, description=f"{case.strategy}, {case.engines} engines, {case.load:.0%}, {case.pool.value}"
            )
            results.append((case, run_case(trace, case, num_seeds, lambda count: progress.advance(task, count))))
            progress.update(task, completed=len(trace.requests) * number * num_seeds)
    return results


def _report(trace: Trace, results: Sequence[tuple[Case, Summary]], json: bool, plot: Path | None) -> None:
    rows = [case.plain() | summary.plain() for case, summary in results]
    if json:
        print_json({"trace": trace.name, "definitions": DEFINITIONS, "results": rows})
    else:
        print_results(Console(), results)
    if plot is not None:
        draw(plot, trace, results)
