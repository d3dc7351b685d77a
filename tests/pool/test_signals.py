"""Signals of a pool's process: when they come, and what they cannot do to it."""

import subprocess
import sys
from pathlib import Path

import signals_child
from pool_rig import WAIT_S


def test_a_signal_may_come_at_any_time() -> None:
    """Also while the main thread looks whether one has come."""
    child = subprocess.run(
        [sys.executable, str(Path(signals_child.__file__))], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (child.returncode, child.stdout.splitlines()[-1:]) == (0, ["ended"]), child.stderr
