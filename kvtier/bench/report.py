"""How benchmarks measure and report. No figure without the hardware, the commit and something beside it."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

NUM_ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds over several rounds."""

    median_s: float
    min_s: float
    max_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        return cls(median(seconds), min(seconds), max(seconds))


def hardware() -> str:
    """Processor, cores and operating system, in a line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return (
        f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    )


def commit() -> str:
    """Short commit of the checkout, with `+changes` when it differs; `unknown` outside of one."""
    here = Path(__file__).parent
    try:
        args = {"cwd": here, "capture_output": True, "text": True, "check": True}
        revision = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **args).stdout.strip()  # type: ignore[call-overload]
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], **args).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{revision}+changes" if changed else str(revision)


def interleave(cases: dict[str, Callable[[], None]], *, rounds: int = NUM_ROUNDS, label: str) -> dict[str, list[float]]:
    """Runs the cases in turn, A B A B ..., after one round that is not counted. Seconds per case and round.

    Interleaving keeps a ratio honest on a machine whose speed drifts: pair by pair, both saw the same.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for counted in track([False] + [True] * rounds, description=label, console=Console(stderr=True)):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            if counted:
                seconds[name].append(elapsed)
    return seconds


def ratios(slower: Sequence[float], faster: Sequence[float]) -> Spread:
    """`slower / faster`, pair by pair."""
    return Spread.of([a / b for a, b in zip(slower, faster, strict=True)])


@dataclass(frozen=True, slots=True)
class Case:
    """A row of a report."""

    name: str
    op: str
    p50_us: float
    """Median over the rounds, of one `unit`."""
    unit: str
    floor: str = ""
    """What it is held against, in the same run."""
    ratio_to_floor: float | None = None
    """Median of the floor's time / ours, pair by pair: above 1 is faster than the floor."""
    spread: str = ""
    """Lowest and highest of that ratio."""


def report(title: str, cases: Sequence[Case], *, as_json: Path | None, notes: Sequence[str] = ()) -> None:
    """Prints a table and, if asked, writes JSON (`-` for standard output, and then no table)."""
    data: dict[str, Any] = {"hardware": hardware(), "commit": commit(), "cases": [asdict(case) for case in cases]}
    if as_json is not None:
        text = json.dumps(data, indent=2) + "\n"
        if str(as_json) == "-":
            print(text, end="")
            return
        as_json.write_text(text)
    console = Console()
    table = Table(title=title, caption=f"{data['hardware']}\ncommit {data['commit']}", caption_justify="left")
    compared = any(case.floor for case in cases)
    for column in ("case", "what", "median"):
        table.add_column(column, justify="right" if column == "median" else "left")
    for column in ("speed beside", "lowest .. highest") if compared else ():
        table.add_column(column)
    for case in cases:
        row = [case.name, case.op, f"{_duration(case.p50_us)} / {case.unit}"]
        if compared:
            ratio = "" if case.ratio_to_floor is None else f"{case.ratio_to_floor:.2f}x {case.floor}"
            row += [ratio, case.spread]
        table.add_row(*row)
    console.print(table)
    for note in notes:
        console.print(note)


def _duration(microseconds: float) -> str:
    if microseconds < 1:
        return f"{microseconds * 1e3:,.0f} ns"
    return f"{microseconds:,.1f} us" if microseconds < 1e3 else f"{microseconds / 1e3:,.1f} ms"
