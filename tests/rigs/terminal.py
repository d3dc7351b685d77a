"""Commands on terminals of their own, as somebody who types meets them."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvtier.clock import MONOTONIC

PATIENCE_S = 60.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None = None, *, columns: int = 80) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(columns)
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**(os.environ if environ is None else environ), "TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C and changes of size come by signals
        )
        self.shown = ""

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def wait_for(self, pattern: str) -> "re.Match[str]":
        """Reads on until this is there; what was read up to its end is forgotten."""
        until_s = MONOTONIC() + PATIENCE_S
        while (found := re.search(pattern, ESCAPES.sub("", self.shown))) is None:
            assert MONOTONIC() < until_s, f"no {pattern!r} in {self.shown!r}"
            self._read()
        self.shown = ""
        return found

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def end(self) -> tuple[int, str]:
        """The exit code, and all that was shown last. The terminal has to be as it was."""
        until_s = MONOTONIC() + PATIENCE_S
        while self.process.poll() is None:
            assert MONOTONIC() < until_s
            self._read()
        self._read()
        assert termios.tcgetattr(self._theirs) == self.before
        return self.process.returncode, self.shown

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def _read(self) -> None:
        if select.select([self._ours], [], [], 0.05)[0]:
            self.shown += os.read(self._ours, 1 << 16).decode(errors="replace")


@contextmanager
def on_terminal(
    command: Sequence[str], environ: Mapping[str, str] | None = None, *, columns: int = 80
) -> Iterator[Terminal]:
    """Runs a command; what still runs at the end is killed. Without `environ` it has that of this process."""
    opened = Terminal(command, environ, columns=columns)
    try:
        yield opened
    finally:
        opened.close()
