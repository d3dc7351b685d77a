"""The clock of all processes that a rig starts, turned by hand while they run; needs a C compiler.

Only the time of day jumps, as it does when somebody sets it: the monotonic clock goes on. (libfaketime breaks waits
until a time of the monotonic clock, which is how Python sleeps.)
"""

import contextlib
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")


class TurnedClock:
    """Says how far the clock is off."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_bytes(bytes(8))

    def turn(self, seconds: int) -> None:
        """So far from the true time, at once."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", seconds * 1_000_000))


@contextlib.contextmanager
def turned_clock(folder: Path) -> Iterator[TurnedClock | None]:
    """For all processes that are started meanwhile with this one's environment; None without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        yield None
        return
    library, file = folder / "turned_clock.so", folder / "clock"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE)], check=True)
    settings = {"LD_PRELOAD": str(library), "TURNED_CLOCK": str(file)}
    before = {name: os.environ.get(name) for name in settings}
    clock = TurnedClock(file)
    os.environ.update(settings)
    try:
        yield clock
    finally:
        for name, text in before.items():
            os.environ.pop(name, None)
            if text is not None:
                os.environ[name] = text
