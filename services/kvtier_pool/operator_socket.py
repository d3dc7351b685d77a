"""The socket by which an operator on a pool's host talks to it while it runs: its name, who may use it, its messages.

It is an abstract Unix socket of Linux that has the process's number in its name, so it needs no configuration and
leaves no file. The kernel says who is at the other end: tokens and certificates of tenants count for nothing here. A
message is a JSON object in a line.
"""

import json
import os
import re
import socket
import struct
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.clock import MONOTONIC
from kvtier.errors import InvalidInputError, UnauthenticatedError

_NAME = "kvtier-pool-{pid}"
_NAMES = re.compile(r"@kvtier-pool-(\d+)$", re.MULTILINE)
_CREDENTIALS = struct.Struct("<3i")
_ROOT = 0
_NOBODY = 65534
"""What the kernel says of users of other user namespaces."""
_MAX_LINE_BYTES = 1 << 16


class Peer(NamedTuple):
    """A process at the other end of a Unix socket."""

    pid: int
    uid: int


def address_of(pid: int) -> bytes:
    """The address that the pool with this process number listens on."""
    return b"\0" + _NAME.format(pid=pid).encode()


def running_pools() -> list[int]:
    """Process numbers of the pools in this network namespace that can be talked to."""
    names = Path("/proc/net/unix")
    return sorted({int(pid) for pid in _NAMES.findall(names.read_text())}) if names.exists() else []


def peer_of(connection: socket.socket) -> Peer:
    """The process at the other end: of a pool, the one that listens."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return Peer(pid, uid)


def require_operator(peer: Peer) -> None:
    """Raises `UnauthenticatedError` unless it is root or the user of this process."""
    if peer.uid != _ROOT and (peer.uid != os.geteuid() or peer.uid == _NOBODY):
        raise UnauthenticatedError(f"user {peer.uid} may not operate this pool: be root, or the user that it runs as")


def has_gone(connection: socket.socket) -> bool:
    """Whether the peer has closed its end, or says nothing more. Takes nothing of what it has said; does not block."""
    timeout_s = connection.gettimeout()
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(timeout_s)


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends a message. `OSError`: nobody takes it."""
    connection.sendall(json.dumps(message).encode() + b"\n")


class Lines:
    """Receives messages. One thread."""

    def __init__(self, connection: socket.socket) -> None:
        """:param connection: the caller's to close."""
        self._connection = connection
        self._received = b""

    def receive(self, deadline: float | None = None) -> dict[str, Any] | None:
        """The next message; None at the end. `OSError`: the connection failed or was late. `InvalidInputError`: it is
        no message.

        :param deadline: of all of it, monotonic; None: each part may take as long as the socket's timeout says.
        """
        while b"\n" not in self._received:
            if deadline is not None:
                left_s = deadline - MONOTONIC()
                if left_s <= 0:
                    raise TimeoutError("a message did not come in time")
                self._connection.settimeout(left_s)
            data = self._connection.recv(_MAX_LINE_BYTES)
            self._received += data
            if not data:
                return None
            if len(self._received) > _MAX_LINE_BYTES:
                raise InvalidInputError(f"a message of more than {_MAX_LINE_BYTES} bytes")
        line, self._received = self._received.split(b"\n", 1)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"no JSON: {error}") from error
        if not isinstance(message, dict):
            raise InvalidInputError("a message must be a JSON object")
        return message
