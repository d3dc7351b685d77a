"""TCP sockets of this process that a library has opened: which there are, and how to end one of them. Linux only."""

import contextlib
import errno
import os
import socket
import struct
from typing import NamedTuple

_DESCRIPTORS = "/proc/self/fd"
_RECEIVED = struct.Struct("128xQ")
"""What begins `struct tcp_info` of Linux, up to `tcpi_bytes_received`."""
_MAPPED = "::ffff:"
"""What an IPv4 address begins with on a socket that takes both."""
Ends = tuple[str, int]
"""Address and port."""


class OwnSocket(NamedTuple):
    """One that listens, or a connection."""

    here: Ends
    there: Ends | None
    """The peer; None: it listens."""


class OwnSockets:
    """Looks at the descriptors of this process. One thread at a time."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], OwnSocket | None] = {}
        """What the last look found, by descriptor and the kernel's name of the socket."""

    def look(self) -> dict[OwnSocket, int]:
        """All TCP sockets, with their descriptors. 2 us for each descriptor of the process, 10 us for a new socket.

        Raises `OSError` when there is no descriptor for the look itself.
        """
        known = {}
        for name in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(FileNotFoundError):  # closed since
                target = os.readlink(f"{_DESCRIPTORS}/{name}")
                if target.startswith("socket:"):
                    key = int(name), target
                    known[key] = self._known[key] if key in self._known else _described(int(name))
        self._known = known
        return {found: descriptor for (descriptor, _), found in known.items() if found is not None}

    def received_bytes(self, connection: OwnSocket, descriptor: int) -> int | None:
        """How many bytes have come over this connection so far, whoever has read them; None: it is not there any more,
        or the kernel does not tell. 5 us."""
        with contextlib.suppress(OSError), _duplicate(descriptor) as found:
            info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
            if len(info) == _RECEIVED.size and _ends_of(found) == connection:
                return int(_RECEIVED.unpack(info)[0])
        return None

    def end(self, connection: OwnSocket, descriptor: int) -> None:
        """Ends this connection if the descriptor is still its own; whoever uses it reads the end."""
        with contextlib.suppress(OSError), _duplicate(descriptor) as found:
            if _ends_of(found) == connection:
                found.shutdown(socket.SHUT_RDWR)


def _duplicate(descriptor: int) -> socket.socket:
    """Returns the same socket, which stays what it is whatever becomes of the descriptor. The caller closes it. Raises
    `OSError` where it is none any more."""
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _described(descriptor: int) -> OwnSocket | None:
    """None: no TCP socket, or one that has ended."""
    try:
        with _duplicate(descriptor) as found:
            return _ends_of(found)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None


def _ends_of(found: socket.socket) -> OwnSocket | None:
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
        return None
    here = _plain(found.getsockname())
    if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return OwnSocket(here, None)
    return OwnSocket(here, _plain(found.getpeername()))


def _plain(address: tuple[str, int]) -> Ends:
    """Takes away what says that an IPv4 address is used as an IPv6 one, and the zone."""
    return address[0].removeprefix(_MAPPED).partition("%")[0], address[1]
