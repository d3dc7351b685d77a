"""Runs the tests of `tests/interpreted`, a process for each file: Triton's interpreter is chosen before its import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
TIMEOUT_S = 280


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_in_the_interpreter(name: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=3", str(FOLDER / name)]
    run = subprocess.run(
        command, cwd=FOLDER.parent.parent, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    print(run.stdout, run.stderr, sep="\n")
    assert run.returncode == 0
