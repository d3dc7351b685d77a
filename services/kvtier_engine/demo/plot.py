"""Time to first token per run, as a bar chart."""

from collections.abc import Sequence
from pathlib import Path

from kvtier.cli.plot import Bar, write_bars


def write_plot(path: Path, rows: Sequence[tuple[str, float, int, str]], *, title: str, caption: str) -> None:
    """Writes the chart.

    :param path: ends in `.svg` or `.png`.
    :param rows: per run its name, TTFT in seconds, cached tokens, and the tier most of them came from
        (empty: computed).
    """
    bars = []
    for name, seconds, num_cached, tier in rows:
        source = f"{num_cached:,} tokens from {tier}" if tier else "computed"
        bars.append(Bar(name, seconds, f"{seconds * 1000:,.0f} ms, {source}", group=tier))
    write_bars(path, bars, title=title, caption=caption)
