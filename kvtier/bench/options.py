"""Options that benchmarks have in common."""

from pathlib import Path
from typing import Annotated

import typer

from kvtier.bench.plot import require_drawable
from kvtier.bench.rounds import NUM_ROUNDS


def _drawable(path: Path | None) -> Path | None:
    if path is not None:
        require_drawable(path)
    return path


Json = Annotated[Path | None, typer.Option(help="Write JSON to this file; - for standard output.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the figures to this .svg or .png file.", callback=_drawable)]
Rounds = Annotated[int, typer.Option(min=NUM_ROUNDS, help="Counted rounds.")]
PayloadBytes = Annotated[int, typer.Option(min=64, help="Bytes per block.")]
