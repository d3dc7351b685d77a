"""A network that flips a bit."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator

WAIT_S = 20.0
_LARGE_BYTES = 16 * 1024
"""What has so many bytes is not all header."""


class GarblingProxy:
    """Between an engine and a pool over TCP. As long as `garbles` is set, the first large piece of an answer that
    passes has a flipped bit."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.garbles = threading.Event()
        self.num_garbled = 0
        """Written by the one thread that garbles."""

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Its address."""
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection(proxy._target, WAIT_S) as pool:
                    thread = threading.Thread(target=_pump, args=(self.request, pool, bytes), name="kvtier-test-pump")
                    thread.start()
                    _pump(pool, self.request, proxy._garbled)
                    thread.join(WAIT_S)

        with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="kvtier-test-proxy")
            thread.start()
            yield "{}:{}".format(*server.server_address)
            server.shutdown()
            thread.join(WAIT_S)

    def _garbled(self, piece: bytes) -> bytes:
        if len(piece) < _LARGE_BYTES or not self.garbles.is_set():
            return piece
        self.garbles.clear()
        self.num_garbled += 1
        middle = len(piece) // 2
        return piece[:middle] + bytes([piece[middle] ^ 1]) + piece[middle + 1 :]


def _pump(source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
    """Until one side ends; then the other is ended too."""
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 20):
            target.sendall(change(piece))
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
