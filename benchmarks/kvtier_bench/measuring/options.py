"""Options that only benchmarks have in common."""

from typing import Annotated

import typer

from kvtier_bench.measuring.rounds import NUM_ROUNDS

Rounds = Annotated[int, typer.Option(min=NUM_ROUNDS, help="Counted rounds.")]
PayloadBytes = Annotated[int, typer.Option(min=64, help="Bytes per block.")]
