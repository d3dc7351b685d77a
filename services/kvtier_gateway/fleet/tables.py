"""What `kvtier simulate-fleet` prints and draws."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvtier.cli.plot import Bar, write_bars
from kvtier.traces.form import Trace
from kvtier_gateway.fleet.cases import Case
from kvtier_gateway.fleet.figures import DEFINITIONS, Summary


def print_results(console: Console, results: Sequence[tuple[Case, Summary]]) -> None:
    """A table for each size, load and pool. Fits into 80 columns."""
    for place in dict.fromkeys(_place(case) for case, _ in results):
        table = Table(title=place)
        table.add_column("strategy", no_wrap=True)
        for heading in ("TTFT p50", "p90", "p99", "max/mean", "fetched", "computed", "regret"):
            table.add_column(heading, justify="right", overflow="fold")
        for case, summary in results:
            if _place(case) == place:
                table.add_row(case.strategy, *_cells(summary))
        console.print(table)
    console.print(f"TTFT in s: {DEFINITIONS['ttft_p50_s']}")
    console.print(f"max/mean: {DEFINITIONS['max_over_mean_load']}")
    console.print(f"fetched: TB from the pool; computed: millions of tokens; regret: {DEFINITIONS['regret']}")


def draw(path: Path, trace: Trace, results: Sequence[tuple[Case, Summary]]) -> None:
    """A bar for each case: its 90th percentile."""
    bars = [
        Bar(
            case.strategy,
            summary.ttft_p90_s,
            f"{summary.ttft_p90_s:.3g} s",
            group=case.strategy,
            scale=_place(case),
            heading=_place(case),
        )
        for case, summary in results
    ]
    caption = f"90th percentile, simulated: {DEFINITIONS['ttft_p50_s']}"
    write_bars(path, bars, title=f"Time to first token, {trace.name}", caption=caption)


def _place(case: Case) -> str:
    pool = "without a pool" if case.pool.value == "none" else f"{case.pool.value} pool"
    return f"{case.engines} engines, load {case.load:.0%}, {pool}"


def _cells(summary: Summary) -> list[str]:
    ttfts = (summary.ttft_p50_s, summary.ttft_p90_s, summary.ttft_p99_s)
    return [
        *(f"{ttft_s:.3g}" for ttft_s in ttfts),
        f"{summary.max_over_mean_load:.2f}",
        f"{summary.fetched_bytes / 1e12:.2f}",
        f"{summary.computed_tokens / 1e6:.0f}",
        "-" if summary.regret is None else f"{summary.regret:.3f}",
    ]
