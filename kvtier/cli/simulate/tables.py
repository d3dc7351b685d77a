"""What `kvtier simulate` prints and draws."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtier.cli.plot import Bar, write_bars
from kvtier.simulate.cases import Result
from kvtier.simulate.replay import DEFINITIONS
from kvtier.traces.form import Trace

_HEADINGS = {"block_hit_rate": "block hits", "prefix_hit_rate": "prefix hits", "token_hit_rate": "token hits"}


def described(trace: Trace) -> dict[str, Any]:
    """The trace, for JSON."""
    recorded = trace.recorded
    return {
        "name": trace.name,
        "requests": sum(not request.is_write for request in trace.requests),
        "references": trace.num_references,
        "distinct_blocks": trace.num_keys,
        "tokens_per_block": trace.tokens_per_block,
        "block_bytes": trace.block_bytes,
        "recorded": recorded and {"policy": recorded.policy, "capacity_blocks": recorded.capacity_blocks},
        "dropped": trace.num_dropped,
        "ideal_block_hit_rate": trace.ideal_hit_rate(),
    }


def print_trace(console: Console, facts: dict[str, Any]) -> None:
    console.print(
        f"[bold]{escape(facts['name'])}[/bold]: {facts['requests']:,} requests, {facts['references']:,} references to "
        f"{facts['distinct_blocks']:,} blocks; an endless cache would have {facts['ideal_block_hit_rate']:.1%} of them"
    )
    if recorded := facts["recorded"]:
        console.print(f"recorded under {recorded['policy']} with {recorded['capacity_blocks']:,} blocks")
    if facts["dropped"]:
        console.print(f"[yellow]{facts['dropped']:,} references are missing: the recorder did not keep up[/yellow]")


def print_results(console: Console, results: Sequence[Result]) -> None:
    """A row for each cache, and a table of their tiers where one has several. Fits into 80 columns."""
    table = Table()
    table.add_column("policy", overflow="fold")
    for heading in ("capacity", *_HEADINGS.values(), "writes"):
        table.add_column(heading, justify="right", overflow="fold")
    for result in results:
        rates = [_percent(result.rates[name]) for name in _HEADINGS]
        table.add_row(result.case.policy, f"{result.case.capacity_blocks:,}", *rates, _count(result.writes))
    console.print(table)
    if any(len(result.case.levels) > 1 for result in results):
        console.print(_tiers(results))
    if admissions := {result.case.admission for result in results} - {None}:
        console.print(f"admission: {', '.join(map(str, admissions))}")
    for name, heading in _HEADINGS.items():
        console.print(f"{heading}: {DEFINITIONS[name]}")
    console.print("capacity and writes: in blocks; writes over the whole trace")


def draw(path: Path, trace: Trace, results: Sequence[Result]) -> None:
    bars = []
    for result in results:
        prefix, blocks = result.rates["prefix_hit_rate"], result.rates["block_hit_rate"]
        value = blocks if prefix is None else prefix
        text = f"{_percent(value)} {'block' if prefix is None else 'prefix'} hits"
        heading = f"{result.case.capacity_blocks:,} blocks"
        bars.append(Bar(result.case.policy, value or 0.0, text, group=result.case.policy, heading=heading))
    write_bars(path, bars, title=f"Hit rates of {trace.name}", caption=f"{trace.num_references:,} references")


def _tiers(results: Sequence[Result]) -> Table:
    table = Table(title="Hits by the first tier that has the block")
    table.add_column("policy", overflow="fold")
    table.add_column("tier", overflow="fold")
    for heading in ("capacity", "hits", "writes", "evicted", "declined"):
        table.add_column(heading, justify="right", overflow="fold")
    for result in results:
        for tier in result.tiers:
            counts = (_count(tier.writes), _count(tier.evictions), _count(tier.declined))
            table.add_row(
                result.case.policy, escape(tier.name), f"{tier.capacity_blocks:,}", _percent(tier.hit_rate), *counts
            )
    return table


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"


def _count(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"
