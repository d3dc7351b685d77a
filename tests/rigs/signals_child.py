"""Runs a pool's main thread in which a SIGHUP comes between any two lines, and SIGTERM after some. Prints `ended`."""

import signal
import sys
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

from prometheus_client import CollectorRegistry

from kvtier.config import Config, parse_config
from kvtier_pool import cli
from kvtier_pool.audit import AuditLog
from kvtier_pool.metrics import PoolMetrics
from kvtier_pool.service import Addresses

_NUM_READ = 3
"""The configuration is read so many times; with one signal per line, that is after dozens of signals."""


class _Service:
    """Stands in for a pool, and counts how often it is given shares."""

    name, what = "pool", "tokens"
    num_given = 0
    audit = AuditLog(None, PoolMetrics(CollectorRegistry()))
    """Not started: what is noted waits."""
    recording = None
    """Nobody asks for a recording."""

    def __init__(self, config: Config) -> None:
        pass

    def start(self) -> Addresses:
        sys.settrace(_trace)  # what is called from now on, and the caller, which has been called already
        sys._getframe(1).f_trace = _trace
        return Addresses(("",), ("",), "")

    def files(self, config: Config) -> list[Path]:
        return []

    def take(self, config: Config) -> None:
        type(self).num_given += 1

    def note(self, event: str, **fields: str) -> None:
        self.audit.note(event, **fields)

    def end_stale(self) -> int:
        return 0

    def stop(self) -> None:
        sys.settrace(None)
        print("ended", flush=True)


def _trace(frame: FrameType, event: str, argument: Any) -> Any:
    """Raises a signal before each line of the pool's loop, and of what it calls for it."""
    if frame.f_globals["__name__"] not in ("kvtier_pool.cli", "threading") or _is_of_handler(frame):
        return None
    enough = _Service.num_given >= _NUM_READ
    if not enough or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        signal.raise_signal(signal.SIGTERM if enough else signal.SIGHUP)
    return _trace


def _is_of_handler(frame: FrameType | None) -> bool:
    """Whether it is a handler of signals that runs, or what it has called: it need not stand signals without end."""
    handler = signal.getsignal(signal.SIGHUP)
    while frame is not None and isinstance(handler, FunctionType):
        if frame.f_code is handler.__code__:
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    cli.PoolService = _Service  # type: ignore[misc,assignment]
    config = parse_config({}, source="a test", environ={})
    cli.run(config, lambda: config)
