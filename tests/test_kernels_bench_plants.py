"""Each part of `make gpu` finds the fault that is planted in what it measures: in tiny size, as it runs by itself."""

from pathlib import Path

import pytest

from kvtier_kernels_bench import __main__ as command
from kvtier_kernels_bench.journal import Journal
from kvtier_kernels_bench.parts import ALL, Part
from kvtier_kernels_bench.plants import faults
from kvtier_kernels_bench.runner import Run, run_parts


def test_every_part_has_a_fault() -> None:
    assert faults() == {part.name for part in ALL}


@pytest.mark.parametrize("part", ALL, ids=[part.name for part in ALL])
def test_a_planted_fault_is_found(part: Part, tmp_path: Path) -> None:
    run = Run(Journal(tmp_path / "gpu.jsonl"), {}, total_s=200, tiny=True, plant=part.name)
    (outcome,) = run_parts(run, [Part(part.name, 100)])
    failures = [case.detail for case in outcome.cases if case.detail.startswith("FAILED")]
    assert failures, outcome.said
    assert outcome.failed
    assert "Traceback" not in outcome.said, "it is found by a comparison"


def test_a_fault_that_is_found_is_the_exit_status(tmp_path: Path) -> None:
    options = ["--tiny", "--json", str(tmp_path / "gpu.json"), "--seconds", "100"]
    assert command.main([*options, "--plant", "copies", "copies", "spill"]) == 1
    copies, spill = Journal(tmp_path / "gpu.jsonl").outcomes()
    assert copies.failed
    assert not spill.failed, "only what is named"
