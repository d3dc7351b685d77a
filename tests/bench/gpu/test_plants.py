"""Each part of `make gpu` that moves blocks finds the fault that is planted in what it measures."""

from pathlib import Path

import pytest

from kvtier_bench.gpu import __main__ as command
from kvtier_bench.gpu.plants import faults
from kvtier_bench.gpu.run.journal import Journal
from kvtier_bench.gpu.run.parts import ALL
from plants_rig import COMPUTING, require_found, sought_in


def test_every_part_has_a_fault() -> None:
    assert faults() == {part.name for part in ALL}


@pytest.mark.parametrize("part", sought_in(part.name for part in ALL if part.name not in COMPUTING))
def test_a_planted_fault_is_found(part: str, tmp_path: Path) -> None:
    require_found(part, tmp_path)


def test_a_fault_that_is_found_is_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "machine_facts", lambda: {"device": None})
    options = ["--tiny", "--json", str(tmp_path / "gpu.json"), "--seconds", "100"]
    assert command.main([*options, "--plant", "copies", "copies", "spill"]) == 1
    copies, spill = Journal(tmp_path / "gpu.jsonl").outcomes()
    assert copies.failed
    assert not spill.failed, "only what is named"
