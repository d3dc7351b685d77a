"""Traces of a pool that runs, each for as long as an operator's connection lasts: `kvtier trace record`."""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from kvtier.clock import MONOTONIC
from kvtier.errors import ConfigError, InvalidInputError
from kvtier.traces.recorder import TraceRecorder
from kvtier_pool.operator_socket import send

_log = logging.getLogger(__name__)
_SEND_S = 5.0
"""How long an operator may take to take an answer."""
_PROGRESS_S = 0.5
"""Seconds between two reports of progress."""
_MAX_SECONDS = 30.0 * 86_400
Record = Callable[[Path, int], AbstractContextManager[TraceRecorder]]
"""Records to this file, at most so many bytes, until its context is left. Raises `ConfigError`."""


class Recordings:
    """One recording at a time, which ends with its operator's connection at the latest. Any thread."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._under_way = threading.Lock()
        """Held for as long as a recording lasts."""

    def serve(self, connection: socket.socket, request: dict[str, Any], stopping: Callable[[], bool]) -> None:
        """Records until the operator ends it, or the pool does. Raises `ConfigError`, and what `send` raises.

        :param stopping: whether the pool ends, when nothing more is to be read from the connection.
        """
        path, max_bytes, seconds = _parsed(request)
        if not self._under_way.acquire(blocking=False):
            raise ConfigError("this pool records a trace for somebody else: try later")
        try:
            with self._record(path, max_bytes) as recorder:
                _log.info("an operator records a trace to %s", path)
                start_s = MONOTONIC()
                send(connection, {"recording": str(path)})
                reason = _follow(connection, recorder, start_s + seconds, stopping)
            connection.settimeout(_SEND_S)
            ended = {"ended": recorder.problem or reason, "failed": recorder.has_failed}
            send(connection, {**_progress(recorder, start_s), **ended})
        finally:
            self._under_way.release()


def _follow(connection: socket.socket, recorder: TraceRecorder, end_s: float, stopping: Callable[[], bool]) -> str:
    """Tells how the recording gets on until it is to end; why it does."""
    start_s = MONOTONIC()
    while recorder.problem is None:
        left_s = end_s - MONOTONIC()
        if left_s <= 0:
            return "the time is over"
        connection.settimeout(min(_PROGRESS_S, left_s))
        is_over = False
        with contextlib.suppress(TimeoutError):
            connection.recv(1)  # nothing is said any more but that this was all
            is_over = True
        if stopping():
            return "the pool ends"
        if is_over:
            return "the operator ended it"
        connection.settimeout(_SEND_S)
        send(connection, _progress(recorder, start_s))
    return ""


def _progress(recorder: TraceRecorder, start_s: float) -> dict[str, Any]:
    return {
        "seconds": MONOTONIC() - start_s,
        "bytes": recorder.num_bytes,
        "keys": recorder.num_recorded,
        "dropped": recorder.num_dropped,
    }


def _parsed(request: dict[str, Any]) -> tuple[Path, int, float]:
    """File, bytes and seconds of a request. Raises `ConfigError` and `InvalidInputError`."""
    file, max_bytes, seconds = request.get("file"), request.get("max_bytes"), request.get("seconds")
    if not isinstance(file, str) or not isinstance(max_bytes, int) or not isinstance(seconds, (int, float)):
        raise InvalidInputError("a request has `file`, `max_bytes` and `seconds`")
    if not Path(file).is_absolute() or not _may_be_named(file):
        raise ConfigError(f"trace {file!r}: name an absolute path on the pool's host")
    if max_bytes < 1 or not 0 < seconds <= _MAX_SECONDS:
        raise ConfigError(f"a trace of {max_bytes} bytes and {seconds} s: 1 byte or more, and 30 days at most")
    return Path(file), max_bytes, float(seconds)


def _may_be_named(file: str) -> bool:
    """Whether the system has such names."""
    try:
        return b"\0" not in os.fsencode(file)
    except UnicodeEncodeError:
        return False
