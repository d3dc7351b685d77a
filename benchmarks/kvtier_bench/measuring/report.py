"""How benchmarks report. No figure without the hardware, the commit and something beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvtier.cli.options import print_json
from kvtier.cli.plot import Bar, write_bars
from kvtier.system.machine import commit, hardware
from kvtier_bench.measuring.rounds import NUM_ROUNDS, Samples, Spread, interleave, percentile, ratios

__all__ = ["NUM_ROUNDS", "Case", "Spread", "held_against", "interleave", "ratios", "report"]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """A row of a report. None where a figure has no meaning."""

    name: str
    op: str
    payload_bytes: int | None = None
    """The payload bytes of one block."""
    batch: int | None = None
    """Blocks or keys in one call."""
    gb_per_s: float | None = None
    """Bytes of a round over the median time of one, in 10^9 bytes."""
    p50_us: float | None = None
    """Median time of one call; what a call is says `unit`."""
    p99_us: float | None = None
    """Nearest rank: of fewer than 100 calls, the slowest."""
    cpu_s_per_gib: float | None = None
    """User and system time of all processes that take part, by 2^30 bytes."""
    floor: str | None = None
    """What it is held against, in the same run."""
    ratio_to_floor: float | None = None
    """Median of the floor's time / ours, round by round: above 1 is faster than the floor."""
    ratio_spread: tuple[float, float] | None = None
    """Lowest and highest of that ratio."""
    beside: Mapping[str, Spread] = field(default_factory=dict)
    """The time ratios to other floors and to peers, by their names."""
    rounds: int | None = None
    unit: str = "call"
    detail: str = ""
    """Which of a peer's calls it was, and the like."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What else was measured, by names with units in them."""

    @classmethod
    def of(
        cls,
        name: str,
        op: str,
        samples: Samples,
        *,
        floor: tuple[str, Samples] | None = None,
        beside: Mapping[str, Samples] | None = None,
        round_bytes: int = 0,
        **fields: Any,
    ) -> "Case":
        """
        :param samples: of the case itself.
        :param floor: its name, and what it took in the same rounds.
        :param beside: names and samples of whatever else it is compared with.
        :param round_bytes: payload moved in a round; 0 where nothing is.
        :param fields: the others, as they stand.
        """
        to_floor = {} if floor is None else held_against(floor[0], ratios(floor[1].rounds_s, samples.rounds_s))
        return cls(
            name,
            op,
            gb_per_s=round_bytes / Spread.of(samples.rounds_s).median_s / 1e9 if round_bytes else None,
            p50_us=percentile(samples.calls_s, 50) * 1e6,
            p99_us=percentile(samples.calls_s, 99) * 1e6,
            cpu_s_per_gib=samples.cpu_s / (round_bytes * len(samples.rounds_s) / _GIB) if round_bytes else None,
            beside={other: ratios(of.rounds_s, samples.rounds_s) for other, of in (beside or {}).items()},
            rounds=len(samples.rounds_s),
            **to_floor,
            **fields,
        )

    @classmethod
    def of_rounds(
        cls, name: str, op: str, rounds_s: Sequence[float], *, floor: tuple[str, Sequence[float]], **fields: Any
    ) -> "Case":
        """
        :param rounds_s: the seconds of each round, whose median is `p50_us`.
        :param floor: its name, and its seconds in the same rounds.
        :param fields: the others, as they stand.
        """
        to_floor = held_against(floor[0], ratios(floor[1], rounds_s))
        return cls(name, op, p50_us=Spread.of(rounds_s).median_s * 1e6, rounds=len(rounds_s), **to_floor, **fields)


def held_against(floor: str, to_floor: Spread) -> dict[str, Any]:
    """The fields of a `Case` that say so.

    :param to_floor: the floor's time by the case's.
    """
    return {
        "floor": floor,
        "ratio_to_floor": to_floor.median_s,
        "ratio_spread": (to_floor.min_s, to_floor.max_s),
    }


def report(
    title: str,
    cases: Sequence[Case],
    *,
    as_json: bool,
    plot: Path | None = None,
    notes: Sequence[str] = (),
    columns: Mapping[str, str] | None = None,
) -> None:
    """Prints a table or, if asked, JSON, with the table on standard error; then writes a picture, if asked.

    :param columns: further ones of the table: headings, and the names of the figures below them.
    """
    data: dict[str, Any] = {
        "hardware": hardware(),
        "commit": commit(),
        "cases": [asdict(case) for case in cases],
        "notes": list(notes),
    }
    table = _table(title, cases, columns or {}, caption=f"{data['hardware']}\ncommit {data['commit']}")
    # The table comes first: when the disk that JSON is redirected to is full by now, the figures are not lost.
    _print(Console(stderr=as_json), table, cases, notes)
    if as_json:
        print_json(data)
    if plot is not None:
        bars = [bar for case in cases if (bar := _bar(case)) is not None]
        write_bars(plot, bars, title=title, caption=f"{data['hardware']}, commit {data['commit']}")


def _print(console: Console, table: Table, cases: Sequence[Case], notes: Sequence[str]) -> None:
    console.print(table)
    if any(case.beside for case in cases):
        console.print(_comparisons(cases))
    for note in notes:
        console.print(note)


def _table(title: str, cases: Sequence[Case], figures: Mapping[str, str], *, caption: str) -> Table:
    """Makes the table of the cases, without the columns that no case has anything for."""
    columns = ("case", "GB/s", "median", "p99", "CPU s/GiB", "beside", "lowest .. highest", *figures)
    rows = [[*_row(case), *(_figure(case.figures.get(name)) for name in figures.values())] for case in cases]
    used = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    table = Table(title=title, caption=caption, caption_justify="left")
    for i in used:
        table.add_column(columns[i], justify="left" if i in (0, 5, 6) else "right")
    heading = ""
    for case, row in zip(cases, rows, strict=True):
        if _heading(case) != heading:
            heading = _heading(case)
            table.add_section()
            table.add_row(f"[bold]{heading}[/bold]")
        table.add_row(*(row[i] for i in used))
    return table


def _comparisons(cases: Sequence[Case]) -> Table:
    """How many times as fast as each of the others."""
    others = list(dict.fromkeys(name for case in cases for name in case.beside))
    table = Table(title="Times as fast as (median of pairs)")
    table.add_column("case")
    for name in others:
        table.add_column(name, justify="right")
    heading = ""
    for case in cases:
        if not case.beside:
            continue
        if _heading(case) != heading:
            heading = _heading(case)
            table.add_section()
            table.add_row(f"[bold]{heading}[/bold]")
        table.add_row(
            case.name, *(f"{case.beside[name].median_s:.2f}" if name in case.beside else "" for name in others)
        )
    return table


def _heading(case: Case) -> str:
    count = "" if case.batch is None else f" {case.batch:,}"
    size = "" if case.payload_bytes is None else f" x {_size(case.payload_bytes)}"
    return f"{case.op}{count}{size}"


def _row(case: Case) -> list[str]:
    spread = case.ratio_spread
    return [
        f"{case.name} ({case.detail})" if case.detail else case.name,
        "" if case.gb_per_s is None else f"{case.gb_per_s:.2f}",
        "" if case.p50_us is None else _duration(case.p50_us) + ("" if case.unit == "call" else f" / {case.unit}"),
        "" if case.p99_us is None else _duration(case.p99_us),
        "" if case.cpu_s_per_gib is None else f"{case.cpu_s_per_gib:.3f}",
        "" if case.ratio_to_floor is None else f"{case.ratio_to_floor:.2f}x {case.floor}",
        "" if spread is None else f"{spread[0]:.2f} .. {spread[1]:.2f}",
    ]


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3g}"


def _bar(case: Case) -> Bar | None:
    """What a picture shows of a case: speed where bytes move, otherwise time."""
    beside = "" if case.ratio_to_floor is None else f", {case.ratio_to_floor:.2f}x {case.floor}"
    if case.gb_per_s is not None:
        text = f"{case.gb_per_s:.2f} GB/s{beside}"
        return Bar(case.name, case.gb_per_s, text, group=case.name, heading=_heading(case))
    if case.p50_us is not None:
        text = f"{_duration(case.p50_us)} / {case.unit}{beside}"
        return Bar(case.name, case.p50_us, text, group=case.name, heading=_heading(case), scale=case.op)
    return None


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes:,} B"


def _duration(microseconds: float) -> str:
    if microseconds < 1:
        return f"{microseconds * 1e3:,.0f} ns"
    return f"{microseconds:,.1f} us" if microseconds < 1e3 else f"{microseconds / 1e3:,.1f} ms"
