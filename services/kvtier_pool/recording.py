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
from kvtier.errors import ConfigError, InvalidInputError, KvtierError
from kvtier.traces.recorder import TraceRecorder
from kvtier_pool.operator_socket import Lines, address_of, peer_of, require_operator, send

_log = logging.getLogger(__name__)
_REQUEST_S = 5.0
"""How long an operator may take to ask for something, and to take an answer."""
_PROGRESS_S = 0.5
"""Seconds between two reports of progress."""
_MAX_SECONDS = 30.0 * 86_400
_PAUSE_S = 0.1
"""Seconds to pause after an `accept` that failed, most often for want of descriptors."""
_BACKLOG = 128
_LAST_WAIT_S = 10.0
"""How long a stop waits for a recording: longer than an operator may take for anything, so that what lasts longer is a
disk that does not answer."""
Record = Callable[[Path, int], AbstractContextManager[TraceRecorder]]
"""Records to this file, at most so many bytes, until its context is left. Raises `ConfigError`."""


class RecordingServer:
    """Listens for operators on a thread of its own: one recording at a time, which ends with its connection at the
    latest. A process has one. `start` and `stop` once each."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvtier-operator", daemon=True)
        self._stopping = threading.Event()

    def start(self) -> None:
        """Listens. A pool that cannot is none the worse otherwise: a line in the log says so."""
        try:
            self._listening.bind(address_of(os.getpid()))
            self._listening.listen(_BACKLOG)
        except OSError as error:
            _log.warning("`kvtier trace record` will not find this pool: %s", error)
            self._listening.close()
            return
        self._thread.start()

    def stop(self) -> None:
        """Ends a recording that is under way, with all that it has; waits up to ten seconds for its disk."""
        self._stopping.set()
        if self._thread.ident is None:
            return
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join(_LAST_WAIT_S)
        if self._thread.is_alive():
            _log.warning("a recorded trace is not complete: its disk does not answer")
        else:
            self._listening.close()

    def _run(self) -> None:
        while (connection := self._accept()) is not None:
            with connection:
                try:
                    self._serve(connection)
                except OSError as error:
                    _log.info("an operator's connection ended: %s", error)
                except Exception:
                    _log.exception("an operator's request failed")

    def _accept(self) -> socket.socket | None:
        """The next operator; None when there will be none."""
        while not self._stopping.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if not self._stopping.wait(_PAUSE_S):
                    _log.warning("cannot accept an operator's connection: %s", error)
                continue
            if _is_operators(connection):
                return connection
        return None

    def _serve(self, connection: socket.socket) -> None:
        try:
            request = Lines(connection).receive(MONOTONIC() + _REQUEST_S)
            connection.settimeout(_REQUEST_S)
            if request is None:
                return
            path, max_bytes, seconds = _parsed(request)
            with self._record(path, max_bytes) as recorder:
                _log.info("an operator records a trace to %s", path)
                start_s = MONOTONIC()
                send(connection, {"recording": str(path)})
                reason = self._follow(connection, recorder, start_s, seconds)
            send(connection, {**_progress(recorder, start_s), "ended": recorder.problem or reason})
        except KvtierError as error:
            send(connection, {"error": str(error)})

    def _follow(self, connection: socket.socket, recorder: TraceRecorder, start_s: float, seconds: float) -> str:
        """Tells how the recording gets on until it is to end; why it does."""
        while recorder.problem is None:
            left_s = start_s + seconds - MONOTONIC()
            if self._stopping.is_set():
                return "the pool ends"
            if left_s <= 0:
                return "the time is over"
            connection.settimeout(min(_PROGRESS_S, left_s))
            with contextlib.suppress(TimeoutError):
                connection.recv(1)  # nothing is said any more but that this was all
                return "the operator ended it"
            connection.settimeout(_REQUEST_S)
            self._refuse_others()
            send(connection, _progress(recorder, start_s))
        return ""

    def _refuse_others(self) -> None:
        """Tells those who wait by now that the pool is busy. Does not block."""
        self._listening.setblocking(False)
        with contextlib.suppress(OSError):  # nobody waits, or there is no descriptor: later, then
            for _ in range(_BACKLOG):
                connection, _ = self._listening.accept()
                if _is_operators(connection):
                    _refuse(connection, "this pool records a trace for somebody else: try later")
        self._listening.setblocking(True)


def _is_operators(connection: socket.socket) -> bool:
    """Whether the peer may operate the pool; else it is told so, and the connection closed."""
    connection.settimeout(_REQUEST_S)
    try:
        require_operator(peer_of(connection))
    except (KvtierError, OSError) as error:
        _refuse(connection, str(error))
        return False
    return True


def _refuse(connection: socket.socket, reason: str) -> None:
    with connection, contextlib.suppress(OSError):
        send(connection, {"error": reason})


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
