"""Serves operators on the pool's host: those who may use its Unix socket, one request for a connection."""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from kvtier.clock import MONOTONIC
from kvtier.errors import InvalidInputError, KvtierError
from kvtier_pool.operator_socket import Lines, address_of, peer_of, require_operator, send

_log = logging.getLogger(__name__)
_REQUEST_S = 5.0
"""How long an operator may take to ask for something, and to take an answer."""
_MOST_AT_ONCE = 8
_BACKLOG = 128
_PAUSE_S = 0.1
"""Seconds to pause after an `accept` that failed, most often for want of descriptors."""
_LAST_WAIT_S = 10.0
"""Seconds that a stop waits for what is served: longer than an operator may take for anything, so that what lasts
longer is a disk that does not answer."""
RECORD = "record"
"""The verb of a request that names none."""
Serve = Callable[[socket.socket, dict[str, Any]], None]
"""Answers a request; what it raises as `KvtierError` is the answer."""


class OperatorServer:
    """Listens on a thread of its own, and serves each operator on another one. A process has one. `start` and `stop`
    once each."""

    def __init__(self, verbs: Mapping[str, Serve]) -> None:
        self._verbs = verbs
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvtier-operator", daemon=True)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        """Connections that are served. Guarded by _lock."""

    def start(self) -> None:
        """Listens. A pool that cannot is none the worse otherwise: a line in the log says so."""
        try:
            self._listening.bind(address_of(os.getpid()))
            self._listening.listen(_BACKLOG)
        except OSError as error:
            _log.warning("`kvtier trace record` and `kvtier tenants` will not find this pool: %s", error)
            self._listening.close()
            return
        self._thread.start()

    def stop(self) -> None:
        """Tells who is served that nothing more will be read from them, and waits until they are."""
        self._stopping.set()
        if self._thread.ident is None:
            return
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()
        with self._lock:
            served = dict(self._open)
        for connection in served:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
        deadline = MONOTONIC() + _LAST_WAIT_S
        for thread in served.values():
            thread.join(max(0.0, deadline - MONOTONIC()))
        if any(thread.is_alive() for thread in served.values()):
            _log.warning("a recorded trace is not complete, or a purge: a disk does not answer")

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if not self._stopping.wait(_PAUSE_S):
                    _log.warning("cannot accept an operator's connection: %s", error)
                continue
            self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        """Serves an operator. A peer that may not operate the pool is told so."""
        connection.settimeout(_REQUEST_S)
        try:
            require_operator(peer_of(connection))
        except (KvtierError, OSError) as error:
            _refuse(connection, str(error))
            return
        thread = threading.Thread(target=self._serve, args=(connection,), name="kvtier-operator-call", daemon=True)
        with self._lock:
            has_room = len(self._open) < _MOST_AT_ONCE
            if has_room:
                self._open[connection] = thread
        if not has_room:
            _refuse(connection, "this pool serves enough operators at the moment: try later")
            return
        try:
            thread.start()
        except RuntimeError as error:  # no thread is to be had
            with self._lock:
                del self._open[connection]
            _log.warning("cannot accept an operator's connection: %s", error)
            _refuse(connection, "this pool can have no more threads at the moment: try later")

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                self._answer(connection)
            except OSError as error:
                _log.info("an operator's connection ended: %s", error)
            except Exception:
                _log.exception("an operator's request failed")
            finally:
                with self._lock:
                    self._open.pop(connection, None)

    def _answer(self, connection: socket.socket) -> None:
        try:
            request = Lines(connection).receive(MONOTONIC() + _REQUEST_S)
            connection.settimeout(_REQUEST_S)
            if request is None:
                return
            verb = request.get("verb", RECORD)
            serve = self._verbs.get(verb) if isinstance(verb, str) else None
            if serve is None:
                raise InvalidInputError(f"verb {str(verb)[:100]!r} is not known here; it may be a newer pool's")
            serve(connection, request)
        except KvtierError as error:
            send(connection, {"error": str(error)})


def _refuse(connection: socket.socket, reason: str) -> None:
    with connection, contextlib.suppress(OSError):
        send(connection, {"error": reason})
