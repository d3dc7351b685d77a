"""What the log says of peers that speak another protocol than a port does: who, and what, but not too often."""

import logging
import socket
import sys
import threading

from kvtier.clock import MONOTONIC, Clock
from kvtier_pool.operator_socket import peer_of

_log = logging.getLogger(__name__)
_EVERY_S = 5.0
"""Seconds from one line to the next."""


class StrangerLog:
    """Writes one line of the log for many peers. A pool has one for all of its ports. Any thread.

    A peer that speaks another protocol, or cannot agree on TLS, has shown no credentials and may come back thousands
    of times a second: a line for each would fill the disk that the log is on.
    """

    def __init__(self, clock: Clock = MONOTONIC) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._quiet_until_s = 0.0
        """When the next line may be written. Guarded by _lock."""
        self._num_left_out = 0
        """Peers that got no line since the last one. Guarded by _lock."""

    def note(self, peer: str, error: Exception) -> None:
        """Logs at INFO that the connection of `peer` was refused for this error, or counts it for the next line."""
        with self._lock:
            now_s = self._clock()
            if now_s < self._quiet_until_s:
                self._num_left_out += 1
                return
            num_left_out, self._num_left_out = self._num_left_out, 0
            self._quiet_until_s = now_s + _EVERY_S
        others = f"; {num_left_out} others since the last such line" if num_left_out else ""
        _log.info("connection from %s refused: %s%s", peer, error, others, extra={"peer": peer})


def name_of(connection: socket.socket) -> str:
    """What the log calls the peer: `host:port`, or which user came over a Unix socket, or that it is gone."""
    if connection.family == socket.AF_UNIX:
        return f"a Unix socket, user {peer_of(connection).uid}" if sys.platform == "linux" else "a Unix socket"
    try:
        host, port = connection.getpeername()[:2]
    except OSError:
        return "a peer that is gone"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
