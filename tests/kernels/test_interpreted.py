"""Runs `tests/kernels/interpreted` in other processes: Triton's interpreter is chosen before its import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(FOLDER.glob("test_*.py"))
NUM_PROCESSES = 4
"""Few: each spends seconds on importing torch and Triton. `make test-model` has them run side by side."""
TIMEOUT_S = 280


@pytest.mark.parametrize(
    "files",
    [FILES[first::NUM_PROCESSES] for first in range(NUM_PROCESSES)],
    ids=lambda files: " ".join(path.stem.removeprefix("test_") for path in files),
)
def test_in_the_interpreter(files: list[Path]) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=3", *map(str, files)]
    run = subprocess.run(
        command, cwd=FOLDER.parent.parent, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    print(run.stdout, run.stderr, sep="\n")
    assert run.returncode == 0
