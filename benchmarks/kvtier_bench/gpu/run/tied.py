"""Runs a command that ends with process PARENT: `python -m kvtier_bench.gpu.run.tied PARENT COMMAND...`.

A part of a run must not go on using the GPU when the run itself was killed, not even by SIGKILL. This process starts
the command and waits. When the process PARENT is gone, it kills its whole process group: the command, and all that
this one has started, a pool say. Start it as the leader of a session of its own. Linux only.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

_SET_PARENT_DEATH_SIGNAL = 1
"""prctl's PR_SET_PDEATHSIG."""


def command_tied_to(parent: int, command: Sequence[str]) -> list[str]:
    """The command line that runs `command` until the process `parent`, which has to start it, is gone."""
    return [sys.executable, "-m", "kvtier_bench.gpu.run.tied", str(parent), *command]


def main(parent: int, command: Sequence[str]) -> int:
    """The command's exit status; 128 and its signal when it was killed."""
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    _signal_when_parent_ends(signal.SIGTERM)
    if os.getppid() != parent:  # it was gone before the kernel knew
        return 128 + signal.SIGTERM
    # Nothing else runs in this process, so that code between fork and exec is safe. It ends with this process too.
    code = subprocess.Popen(command, preexec_fn=lambda: _signal_when_parent_ends(signal.SIGKILL)).wait()
    return code if code >= 0 else 128 - code


def _signal_when_parent_ends(number: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(number))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
