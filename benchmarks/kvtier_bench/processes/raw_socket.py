"""The floor of sockets: the same bytes over one bare connection, between memory touched before on both ends.

No frames, no keys, no checksums: a request is a byte that says which way, and how many blocks.
`python -m kvtier_bench.processes.raw_socket PAYLOAD_BYTES NUM_SLOTS SOCKET_FD` is the far end.
"""

import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence

from kvtier.memory.pages import map_memory
from kvtier.net.gather import SEND_PIECE_BYTES, TCP_PIECE_BYTES, piece, skip
from kvtier.protocol.arriving import PIECE_BYTES

_REQUEST = struct.Struct("<cHH")
"""Way, first block, number of blocks."""
_READ, _WRITE = b"r", b"w"
_UNIX_BUFFER_BYTES = 1 << 20
"""What the block protocol asks for too: bytes move at the best speed that either has."""


class RawSocket:
    """A process at the other end of one connection. A context manager: leaving it ends the process."""

    def __init__(self, family: socket.AddressFamily, payload_bytes: int, num_slots: int) -> None:
        """:param family: AF_INET for TCP over the loopback, AF_UNIX for a Unix socket."""
        self._near, far = _connected(family)
        with far:
            command = [sys.executable, "-m", __name__, str(payload_bytes), str(num_slots), str(far.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[far.fileno()])
        self.pid = self._process.pid
        self._near.recv_into(bytearray(1), 1, socket.MSG_WAITALL)  # ready, its memory touched

    def read(self, into: Sequence[memoryview], first: int) -> float:
        """Seconds."""
        start = time.perf_counter()
        self._near.sendall(_REQUEST.pack(_READ, first, len(into)))
        receive_all(self._near, into)
        return time.perf_counter() - start

    def write(self, sources: Sequence[memoryview], first: int) -> float:
        """Seconds until the far end has it all."""
        start = time.perf_counter()
        send_all(self._near, [memoryview(_REQUEST.pack(_WRITE, first, len(sources))), *sources])
        self._near.recv_into(bytearray(1), 1, socket.MSG_WAITALL)
        return time.perf_counter() - start

    def __enter__(self) -> "RawSocket":
        return self

    def __exit__(self, *_: object) -> None:
        self._near.close()  # which the far end takes for the end
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def send_all(connection: socket.socket, views: Sequence[memoryview]) -> None:
    """All of them, in the pieces that the block protocol sends: larger ones are slower."""
    room = SEND_PIECE_BYTES if connection.family == socket.AF_UNIX else TCP_PIECE_BYTES
    waiting = list(views)
    start = 0
    while start < len(waiting):
        start = skip(waiting, start, connection.sendmsg(piece(waiting, start, room)))


def receive_all(connection: socket.socket, into: Sequence[memoryview]) -> None:
    """Fills all of these buffers in pieces; raises `ConnectionError` when the peer ends before."""
    waiting = list(into)
    start = 0
    while start < len(waiting):
        received = connection.recvmsg_into(piece(waiting, start, PIECE_BYTES), 0, socket.MSG_WAITALL)[0]
        if not received:
            raise ConnectionError("the peer has ended")
        start = skip(waiting, start, received)


def _connected(family: socket.AddressFamily) -> tuple[socket.socket, socket.socket]:
    if family == socket.AF_UNIX:
        pair = socket.socketpair(family, socket.SOCK_STREAM)
        for end in pair:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        return pair
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def _serve(payload_bytes: int, num_slots: int, descriptor: int) -> None:
    slots = [map_memory(payload_bytes, prefault=True) for _ in range(num_slots)]
    request = memoryview(bytearray(_REQUEST.size))
    with socket.socket(fileno=descriptor) as connection:
        connection.sendall(b".")
        while connection.recv_into(request, 0, socket.MSG_WAITALL) == len(request):
            way, first, count = _REQUEST.unpack(request)
            if way == _READ:
                send_all(connection, slots[first : first + count])
            else:
                receive_all(connection, slots[first : first + count])
                connection.sendall(b".")


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
