"""SIGSTOP that has arrived."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_WAIT_S = 20.0
_POLL_S = 0.001
_AT_REST = "TtZX"
"""States of a thread that runs no more: stopped, traced, ended."""


def suspend(pid: int) -> None:
    """Stops a process, ours or not, and waits until none of its threads runs.

    `kill` comes back before: threads on other cores go on for a while, and may answer what is asked of them next.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _WAIT_S
    while not _is_at_rest(pid):
        assert time.monotonic() < deadline, f"process {pid} runs on after SIGSTOP"
        time.sleep(_POLL_S)


def resume(pid: int) -> None:
    """Undoes `suspend`."""
    os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def suspended(pid: int) -> Iterator[None]:
    """For as long as the context lasts."""
    suspend(pid)
    try:
        yield
    finally:
        resume(pid)


def _is_at_rest(pid: int) -> bool:
    return all(_state(thread) in _AT_REST for thread in Path(f"/proc/{pid}/task").glob("*"))


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
