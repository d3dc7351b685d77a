"""A network that is slow, silent, cut or wrong for as long as it is told to be: a proxy in front of one TCP server."""

import contextlib
import enum
import random
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

_CONNECT_S = 2.0
_POLL_S = 0.02
_LARGE_BYTES = 16 * 1024
"""What has so many bytes is not all header."""
_PIECE_BYTES = 1 << 18
_RESETTING = struct.pack("ii", 1, 0)
"""SO_LINGER: what is closed is reset."""


class LinkFault(enum.StrEnum):
    """The ways in which a link fails."""

    LATENCY = "latency"
    """Each piece comes `delay_s` later."""
    BLACK_HOLE = "black_hole"
    """Nothing comes through, and nobody is told. Afterwards all of it comes, as TCP sends again what was lost."""
    RESET = "reset"
    """Connections are reset with their next piece, and new ones at once."""
    TRUNCATION = "truncation"
    """The first half of a large piece comes, and then the end of the connection."""
    BIT_FLIPS = "bit_flips"
    """One bit of each large piece is another one."""
    GARBAGE = "garbage"
    """Each piece is as many random bytes."""


@dataclass(frozen=True, slots=True)
class _State:
    kind: LinkFault | None = None
    delay_s: float = 0.0


class FaultyLink:
    """The way to one server. Any thread may set faults; each connection has two threads."""

    def __init__(self, target: tuple[str, int], seed: int) -> None:
        """:param seed: says which bits are flipped, and what garbage is."""
        self.target = target
        """The server that new connections lead to. Written by `lead_to` alone."""
        self.num_hurt = 0
        """Pieces that a fault has met, about: threads may lose counts. For reports."""
        self._random = random.Random(seed)
        self._state = _State()
        """Replaced as a whole."""
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        """Guarded by _lock."""

    def fail(self, kind: LinkFault, delay_s: float = 0.0) -> None:
        """Fails in this way from now on, instead of the fault before."""
        self._state = _State(kind, delay_s)

    def heal(self) -> None:
        """Lets everything through from now on."""
        self._state = _State()

    def lead_to(self, target: tuple[str, int]) -> None:
        """New connections lead there, and all others end."""
        self.target = target
        with self._lock:
            for end in self._open:
                _end(end)

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Its address."""
        link = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                link._serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 64

        with Server(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="kvtier-test-link")
            thread.start()
            try:
                yield "{}:{}".format(*server.server_address)
            finally:
                self.heal()
                server.shutdown()
                self.lead_to(self.target)
                thread.join()

    def _serve(self, client: socket.socket) -> None:
        if self._state.kind is LinkFault.RESET:
            self.num_hurt += 1
            _reset(client)
            return
        try:
            server = socket.create_connection(self.target, _CONNECT_S)
        except OSError:  # nobody is there: the client hears so, as without a link
            _reset(client)
            return
        with server:
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, server}
            thread = threading.Thread(target=self._pump, args=(client, server), name="kvtier-test-pump", daemon=True)
            thread.start()
            self._pump(server, client)
            thread.join()
            with self._lock:
                self._open -= {client, server}

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        """Passes on what comes until one side ends; then it ends the other one, too."""
        with contextlib.suppress(OSError):
            while (piece := source.recv(_PIECE_BYTES)) and self._passes(piece, source, sink):
                continue
        for end in (source, sink):
            _end(end)

    def _passes(self, piece: bytes, source: socket.socket, sink: socket.socket) -> bool:
        """Sends a piece, or what the fault leaves of it; whether the connection goes on."""
        state = self._state
        self.num_hurt += state.kind is not None
        while self._state.kind is LinkFault.BLACK_HOLE:
            time.sleep(_POLL_S)
        is_large = len(piece) >= _LARGE_BYTES
        if state.kind is LinkFault.RESET:
            for end in (source, sink):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETTING)
            return False
        if state.kind is LinkFault.TRUNCATION and is_large:
            sink.sendall(piece[: len(piece) // 2])
            return False
        if state.kind is LinkFault.BIT_FLIPS and is_large:
            piece = self._with_a_flipped_bit(piece)
        if state.kind is LinkFault.GARBAGE:
            piece = self._random.randbytes(len(piece))
        if state.kind is LinkFault.LATENCY:
            time.sleep(state.delay_s)
        sink.sendall(piece)
        return True

    def _with_a_flipped_bit(self, piece: bytes) -> bytes:
        place = self._random.randrange(len(piece))
        return piece[:place] + bytes([piece[place] ^ (1 << self._random.randrange(8))]) + piece[place + 1 :]


def _end(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def _reset(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETTING)
    end.close()
