"""Starting and stopping services as processes of their own, for demos, benchmarks and tests."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType

from kvtier.errors import KvtierError

START_TIMEOUT_S = 300.0
"""Most of it is for machines that are busy otherwise: an engine on the CPU takes some ten seconds."""
STOP_TIMEOUT_S = 60.0


class Service:
    """A `kvtier ...` process that prints a line starting with `ready` when it serves.

    A context manager: leaving it asks the process to stop (SIGTERM) and waits.
    """

    def __init__(self, arguments: Sequence[str], *, log: Path, environ: Mapping[str, str]) -> None:
        """Starts the process; `ready` waits for it. Its standard error goes to `log`."""
        self._name = " ".join(arguments[:2])
        self._log = log
        self._lines: Queue[str | None] = Queue()
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvtier.cli.main", *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environ},
                text=True,
            )
        # A reader of its own: a pipe that nobody empties would stop the process one day.
        threading.Thread(target=self._read, name="kvtier-reader", daemon=True).start()

    def ready(self) -> dict[str, str]:
        """Waits for the ready line and returns its `name=value` words."""
        while True:
            try:
                line = self._lines.get(timeout=START_TIMEOUT_S)
            except Empty:
                raise KvtierError(
                    f"{self._name} was not ready within {START_TIMEOUT_S:.0f} s; is the machine busy with something "
                    f"else? Its log ends with:\n{self._end_of_log()}"
                ) from None
            if line is None:
                raise KvtierError(f"{self._name} ended at start with code {self.process.wait()}:\n{self._end_of_log()}")
            if line.startswith("ready "):
                return dict(re.findall(r"(\w+)=(\S+)", line))

    def _end_of_log(self) -> str:
        """What is told of a log whose folder may be gone soon."""
        return self._log.read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        """SIGKILL, as a crash would be."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGTERM and wait. Raises `KvtierError` when the process does not end well."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise KvtierError(f"{self._name} did not stop within {STOP_TIMEOUT_S:.0f} s; see {self._log}") from None
        if code not in (0, -signal.SIGKILL):
            raise KvtierError(f"{self._name} ended with code {code}; see {self._log}")

    def __enter__(self) -> "Service":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        elif self.process.poll() is None:
            with contextlib.suppress(KvtierError):
                self.stop()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)
