"""Each part of `make gpu` that computes finds the fault that is planted in what it measures."""

from pathlib import Path

import pytest

from plants_rig import COMPUTING, require_found, sought_in


@pytest.mark.parametrize("part", sought_in(COMPUTING))
def test_a_planted_fault_is_found(part: str, tmp_path: Path) -> None:
    require_found(part, tmp_path)
