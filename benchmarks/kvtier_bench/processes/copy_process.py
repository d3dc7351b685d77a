"""A process that copies memory and does nothing else: what any neighbour costs who moves as many bytes.

`python -m kvtier_bench.processes.copy_process PAYLOAD_BYTES NUM_SLOTS` copies for a while for each byte on its standard
input,
and answers with one.
"""

import os
import select
import subprocess
import sys
import time

from kvtier_bench.measuring.blocks import Rotation

COPIES_S = 0.3


class CopyProcess:
    """A context manager: leaving it ends the process. One thread."""

    def __init__(self, payload_bytes: int, num_slots: int) -> None:
        """Starts the process and waits until its memory has been touched."""
        command = [sys.executable, "-m", __name__, str(payload_bytes), str(num_slots)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._answers.read(1)

    def begin(self) -> None:
        """Has it copy for `COPIES_S`."""
        self._requests.write(b".")

    def has_ended(self) -> bool:
        """Whether those copies are over. Does not block."""
        if not select.select([self._answers], [], [], 0)[0]:
            return False
        self._answers.read(1)
        return True

    def __enter__(self) -> "CopyProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.close()  # which it takes for the end
        self._answers.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _serve(payload_bytes: int, num_slots: int) -> None:
    rotation = Rotation(payload_bytes, num_slots)
    os.write(1, b".")
    while os.read(0, 1):
        end = time.perf_counter() + COPIES_S
        while time.perf_counter() < end:
            rotation.copies()
        os.write(1, b".")


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
