"""A part of `make gpu` in tiny size, as it runs by itself, with its fault planted."""

from collections.abc import Iterable
from pathlib import Path

from kvtier_bench.gpu.run.journal import Journal
from kvtier_bench.gpu.run.parts import Part
from kvtier_bench.gpu.run.runner import Run, run_parts
from sweeps import IN_FULL

COMPUTING = ("smoke", "prefill", "decode", "shared-decode", "decode-step", "layers", "invariant", "checks", "sweep")
"""Parts whose faults are in what computes; of the others, in what moves blocks."""
_LEFT_TO_SOAK = ("switches", "beside", "pages", "host-copies", "ttft", "shared-decode", "layers", "checks", "sweep")
"""Parts that take long, or find their faults as others do."""


def sought_in(parts: Iterable[str]) -> list[str]:
    """Returns the parts whose faults are planted here: all in `make soak-kernels`."""
    return [part for part in parts if IN_FULL or part not in _LEFT_TO_SOAK]


def require_found(part: str, folder: Path) -> None:
    """By a comparison, and not by a crash."""
    run = Run(Journal(folder / "gpu.jsonl"), {}, total_s=200, tiny=True, plant=part)
    (outcome,) = run_parts(run, [Part(part, 100)])
    assert any(case.detail.startswith("FAILED") for case in outcome.cases), outcome.said
    assert outcome.failed
    assert "Traceback" not in outcome.said
