"""The soak of weights that change, made short; and that it finds what it is there for."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cache_pool import WAIT_S

PROGRAM = Path(__file__).with_name("soak_weights.py")


def _soak(report: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Its exit status, and what it has found."""
    command = [sys.executable, str(PROGRAM), "--seed", "1", "--json", str(report), *arguments]
    code = subprocess.run(command, timeout=4 * WAIT_S, check=False).returncode
    found: dict[str, Any] = json.loads(report.read_text())
    return code, found


def test_what_is_stored_is_what_its_key_says(tmp_path: Path) -> None:
    code, found = _soak(tmp_path / "report")
    assert (code, found["wrong_blocks"], found["unexplained_blocks"], found["wrong_answers"]) == (0, 0, 0, 0)
    assert found["changes"] == 4
    assert min(found["loaded_blocks"], found["lent"], found["lent_with_garbage"], *found["blocks_read"].values()) > 0
    assert found["answers_compared"] > found["requests"] // 2


@pytest.mark.parametrize("part", ["weights", "sight"])
def test_it_would_find_a_wrong_block(tmp_path: Path, part: str) -> None:
    code, found = _soak(tmp_path / "report", "--without", part)
    assert code == 1
    assert found["wrong_blocks"] > 0
