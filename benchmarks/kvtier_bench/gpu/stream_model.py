"""Loads and saves beside a busy engine, by when their fence is made: `python -m kvtier_bench.gpu.stream_model`.

A model, on any machine: the real directory, mover and copies on a simulated GPU, in virtual time. Nothing is measured.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvtier_bench.gpu.streams.cases import (
    LLAMA_8B,
    LLAMA_70B_RANK,
    LoadTime,
    SaveRate,
    load_from_host,
    load_from_pool,
    save_prefill,
    spill,
)
from kvtier_bench.gpu.streams.devices import Fences

_GIB = 1 << 30
_PREFILL_TOKENS_PER_S = 30_000
_LONG_TOKENS = 131_072
_NUM_STEPS = 20


@dataclass(frozen=True, slots=True)
class Row:
    """The result of a case with one kind of fence."""

    case: str
    step_ms: float
    fences: str
    result: LoadTime | SaveRate


def rows() -> Iterator[Row]:
    """The results, case by case, with each kind of fence that makes a difference to the case."""
    for name, step_s, load in _loads():
        for fences in Fences:
            yield Row(name, step_s * 1e3, fences.value, load(step_s, fences))
    for name, step_s, save in _saves():
        for fences in (Fences.AT_ITS_TURN, Fences.AT_SUBMIT):
            yield Row(name, step_s * 1e3, fences.value, save(step_s, fences))


def _loads() -> Iterator[tuple[str, float, Callable[[float, Fences], LoadTime]]]:
    for step_s in (0.015, 0.06, 0.25):
        yield "load 8B, 16k tokens (2 GiB), host", step_s, _host_load(16_384)
    yield "load 70B TP8, 16k tokens (640 MiB), pool", 0.25, _pool_load
    for step_s in (0.06, 0.25):
        yield "load 8B, 128k tokens (16 GiB), host", step_s, _host_load(_LONG_TOKENS)


def _host_load(num_tokens: int) -> Callable[[float, Fences], LoadTime]:
    return lambda step_s, fences: load_from_host(LLAMA_8B, num_tokens=num_tokens, step_s=step_s, fences=fences)


def _pool_load(step_s: float, fences: Fences) -> LoadTime:
    return load_from_pool(LLAMA_70B_RANK, num_tokens=16_384, step_s=step_s, fences=fences)


def _saves() -> Iterator[tuple[str, float, Callable[[float, Fences], SaveRate]]]:
    for model in (LLAMA_8B, LLAMA_70B_RANK):
        yield (
            f"save {model.name}, prefill at 30k tokens/s",
            0.25,
            lambda step_s, fences, model=model: save_prefill(  # type: ignore[misc]
                model, tokens_per_s=_PREFILL_TOKENS_PER_S, step_s=step_s, num_steps=_NUM_STEPS, fences=fences
            ),
        )
        yield (
            f"save {model.name}, 4 GiB at once",
            0.25,
            lambda step_s, fences, model=model: spill(model, num_bytes=4 * _GIB, step_s=step_s, fences=fences),  # type: ignore[misc]
        )


def _shown(result: LoadTime | SaveRate) -> str:
    if isinstance(result, LoadTime):
        return f"{result.seconds:.2f} s, {result.gb_per_s:.1f} GB/s"
    behind = "" if result.steps_behind is None else f", {result.steps_behind:.1f} steps behind"
    return f"{result.gb_per_s:.1f} GB/s{behind}"


def main(arguments: list[str] | None = None) -> int:
    """Prints the table. Gives the exit status."""
    parser = argparse.ArgumentParser(description="Loads and saves beside a busy engine, in virtual time.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the rows as well")
    options = parser.parse_args(arguments)
    all_rows = list(rows())
    table = Table("case", "step", *(f"fence made {fences.value}" for fences in Fences))
    for case, step_ms in dict.fromkeys((row.case, row.step_ms) for row in all_rows):
        by_fences = {row.fences: _shown(row.result) for row in all_rows if (row.case, row.step_ms) == (case, step_ms)}
        table.add_row(case, f"{step_ms:.0f} ms", *(by_fences.get(fences.value, "") for fences in Fences))
    Console(width=150).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in all_rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
