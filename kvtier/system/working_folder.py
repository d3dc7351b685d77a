"""A folder for as long as a benchmark or the demo runs, gone afterwards also when SIGTERM ends it."""

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_ENDED_BY_SIGTERM = 128 + signal.SIGTERM
"""The exit code that shells give for it."""


@contextmanager
def working_folder(prefix: str = "kvtier-bench-") -> Iterator[Path]:
    """Meanwhile SIGTERM raises `SystemExit` here, so that every context within ends too, and its processes with it.

    Enter it first, and in the main thread: Python sets signal handlers nowhere else.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        # `timeout` and service managers may send a second one, which must not stop the clearing up.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(_ENDED_BY_SIGTERM)

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield Path(folder)
    finally:
        signal.signal(signal.SIGTERM, before)
