"""The command `kvtier simulate`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import Progress

from kvtier.cli.options import Json, Plot, print_json, telling_in_json
from kvtier.cli.simulate.capacities import parse_capacities, parse_tiers
from kvtier.cli.simulate.tables import described, draw, print_results, print_trace
from kvtier.errors import ConfigError
from kvtier.policies.registry import POLICIES, by_name
from kvtier.simulate.cases import BELADY, Case, Result, open_tiers, simulate
from kvtier.simulate.replay import DEFINITIONS, ReplayOptions
from kvtier.traces.form import Trace
from kvtier.traces.jsonl import MOONCAKE_TOKENS_PER_BLOCK
from kvtier.traces.read import read_trace

_SIZE = TypeAdapter(ByteSize)
_NAMES = ", ".join((*POLICIES, BELADY))
_REPORT_EVERY = 20_000
"""References between looks at the progress bar, which takes longer than a request."""


@telling_in_json
def simulate_command(
    trace: Annotated[Path, typer.Argument(help="Recorded by a pool, or Mooncake's JSON lines, plain or .gz.")],
    policy: Annotated[str, typer.Option(help=f"Of {_NAMES}; several with commas.")] = f"default,{BELADY}",
    capacity: Annotated[
        str | None,
        typer.Option(help="Blocks (5000), bytes (64GiB) or times what was recorded (2x); several with commas."),
    ] = None,
    tiers: Annotated[
        str | None, typer.Option(help="Instead: tiers of one cache, the fastest first: host=1x,disk=200GiB.")
    ] = None,
    admission: Annotated[
        str | None,
        typer.Option(help="What the cache, or each tier below the first, takes: second-use, frequency:3,min-run:4."),
    ] = None,
    warm_up: Annotated[
        float, typer.Option(min=0, max=0.99, help="Share of the requests that fill the cache and are not counted.")
    ] = 0.0,
    head_first: Annotated[
        bool,
        typer.Option("--head-first", help="Use a request's blocks first to last, not last to first as kvtier does."),
    ] = False,
    block_bytes: Annotated[
        str | None, typer.Option(help="Size of a block, e.g. 2MiB, where the trace does not say it.")
    ] = None,
    tokens_per_block: Annotated[
        int, typer.Option(min=1, help="Tokens of a block of JSON lines, which do not say it.")
    ] = MOONCAKE_TOKENS_PER_BLOCK,
    json: Json = False,
    plot: Plot = None,
) -> None:
    """What would another policy, or more memory, have given? Replays a trace through the policies that kvtier uses.

    After each request all its blocks are in the cache, unless an admission says otherwise. `belady` is no policy but
    the most block hits that any could have.

    \b
    Examples:
      kvtier simulate pool.trace                    # 1x, 2x, 4x what was there
      kvtier simulate pool.trace --capacity 64GiB --policy lru,s3fifo,arc
      kvtier simulate mooncake.jsonl --capacity 1000,10000 --json
      kvtier simulate pool.trace --tiers host=1x,disk=10x --admission second-use
    """
    if tiers is not None and capacity is not None:
        raise ConfigError("--tiers names capacities itself: leave out --capacity")
    replayed = read_trace(trace, tokens_per_block=tokens_per_block)
    nbytes = _block_bytes(block_bytes) or replayed.block_bytes
    caches = (
        [parse_tiers(tiers, replayed, nbytes)]
        if tiers is not None
        else [[level] for level in parse_capacities(capacity, replayed, nbytes)]
    )
    policies = [name.strip() for name in policy.split(",")]
    _require_known(policies)
    cases = [Case(name, levels, None if name == BELADY else admission) for levels in caches for name in policies]
    if admission is not None:
        _require_sizes(admission, nbytes)
        open_tiers(Case("lru", caches[0], admission), nbytes or 1)  # says now what is wrong with the text
    results = _run(replayed, cases, ReplayOptions(warm_up, head_first, nbytes or 1))
    _report(replayed, results, json, plot)


def _block_bytes(text: str | None) -> int | None:
    try:
        nbytes = None if text is None else int(_SIZE.validate_python(text))
    except ValidationError as error:
        raise ConfigError(f"--block-bytes {text}: name a size, e.g. 2MiB") from error
    if nbytes is not None and nbytes < 1:
        raise ConfigError(f"--block-bytes {text}: name a size above 0, e.g. 2MiB")
    return nbytes


def _require_known(policies: Sequence[str]) -> None:
    for name in policies:
        if name != BELADY:
            by_name(name)


def _require_sizes(admission: str, block_bytes: int | None) -> None:
    if "bytes-per-day" in admission and block_bytes is None:
        raise ConfigError(
            "--admission bytes-per-day: the trace does not say how large a block is; add --block-bytes 2MiB"
        )


def _run(trace: Trace, cases: Sequence[Case], options: ReplayOptions) -> list[Result]:
    """All cases, with a bar on standard error while it takes."""
    per_case = sum(len(request.keys) for request in trace.requests)
    results = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replaying", total=per_case * len(cases))
        pending = 0

        def on_progress(count: int) -> None:
            nonlocal pending
            pending += count
            if pending >= _REPORT_EVERY:
                progress.advance(task, pending)
                pending = 0

        told = ReplayOptions(options.warm_up, options.head_first, options.block_bytes, on_progress)
        for case in cases:
            progress.update(task, description=f"{case.policy} {case.capacity_blocks:,}")
            results.append(simulate(trace, case, told))
    return results


def _report(trace: Trace, results: Sequence[Result], json: bool, plot: Path | None) -> None:
    facts = described(trace)
    data = {"trace": facts, "definitions": DEFINITIONS, "results": [result.plain() for result in results]}
    if json:
        print_json(data)
    else:
        console = Console()
        print_trace(console, facts)
        print_results(console, results)
    if plot is not None:
        draw(plot, trace, results)
