"""Frames over a connected stream socket: few system calls, no copy in Python, a deadline on each.

The socket blocks in the kernel, with SO_RCVTIMEO and SO_SNDTIMEO: one call moves a whole batch of blocks and
takes the GIL back once. Python's own timeouts would make the socket non-blocking, and a busy interpreter
would then be asked for the GIL at every few hundred KiB.
"""

import socket
import sys
from collections.abc import Iterable, Mapping, Sequence

from kvtier.clock import MONOTONIC
from kvtier.errors import InvalidInputError
from kvtier.wire.block import (
    MAX_HEADER_BYTES,
    PRELUDE_BYTES,
    Fields,
    decode_header,
    decode_prelude,
    encode_head,
)
from kvtier.wire.gather import MAX_VECTORS, SEND_SLICE_S, piece, skip, timeval

_Buffer = bytes | bytearray | memoryview
_HEADER_STEP_BYTES = 64 << 10
"""Memory for a header is taken as its bytes arrive, not as its length claims."""
_UNIX_BUFFER_BYTES = 1 << 20


class FrameSocket:
    """One end of a connection. One thread at a time, but for `shut_down`.

    Deadlines are monotonic seconds. `TimeoutError`: not done by then. Other `OSError`: the connection is gone.
    `InvalidInputError`: the peer does not keep to the protocol. After any of them only `close` makes sense.
    """

    def __init__(self, connected: socket.socket) -> None:
        """:param connected: blocking stream socket, TCP or Unix; owned from now on."""
        self._socket = connected
        self._prelude = bytearray(PRELUDE_BYTES)
        self._num_ahead = 0
        """Bytes of the next prelude that `wait` has received already."""
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(SEND_SLICE_S))
        if connected.family == socket.AF_UNIX:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        else:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_alive(connected)

    def send_frame(self, header: Mapping[str, object], payload: Sequence[_Buffer] = (), *, deadline: float) -> None:
        """Sends header and payload; the buffers are the caller's again on return.

        :param payload: one-dimensional bytes, sent one after the other.
        """
        payload_bytes = sum(map(len, payload))
        self._send([encode_head(header, payload_bytes), *payload], deadline)

    def send_bytes(self, data: bytes, *, deadline: float) -> None:
        """Sends bytes that are no frame: for peers who speak another protocol."""
        self._send([data], deadline)

    def wait(self) -> bool:
        """Blocks, however long, until a frame begins. False when the connection has ended instead."""
        self._set_receive_timeout(0.0)
        self._num_ahead = self._socket.recv_into(self._prelude)
        return self._num_ahead > 0

    def receive_head(self, *, deadline: float, max_header_bytes: int = MAX_HEADER_BYTES) -> tuple[Fields, int]:
        """The header of the next frame, and how many bytes of payload follow it: the caller's to receive."""
        self.receive_into([memoryview(self._prelude)[self._num_ahead :]], deadline=deadline)
        self._num_ahead = 0
        header_bytes, payload_bytes = decode_prelude(self._prelude, max_header_bytes)
        packed = bytearray()
        while len(packed) < header_bytes:
            piece = bytearray(min(_HEADER_STEP_BYTES, header_bytes - len(packed)))
            self.receive_into([memoryview(piece)], deadline=deadline)
            packed += piece
        return decode_header(packed), payload_bytes

    def receive_into(self, into: Iterable[memoryview], *, deadline: float) -> None:
        """Fills these buffers one after the other. The same one may stand in several places."""
        views = [view for view in into if len(view)]
        start = 0
        while start < len(views):
            remaining_s = deadline - MONOTONIC()
            if remaining_s <= 0:
                raise TimeoutError("the peer did not send in time")
            self._set_receive_timeout(remaining_s)
            try:
                count, _, _, _ = self._socket.recvmsg_into(views[start : start + MAX_VECTORS], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            if not count:
                raise ConnectionResetError("the peer closed the connection")
            start = skip(views, start, count)

    def linger(self, *, deadline: float) -> None:
        """Says that nothing more will come, and reads past what the peer still sends, until it closes as well.

        Closing with bytes unread would reset the connection, and the last frame might be lost with it.
        """
        self._socket.shutdown(socket.SHUT_WR)
        waste = bytearray(_HEADER_STEP_BYTES)
        while (remaining_s := deadline - MONOTONIC()) > 0:
            self._set_receive_timeout(remaining_s)
            if not self._socket.recv_into(waste):
                return

    def shut_down(self) -> None:
        """Ends the connection under a thread that is using it. Any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def _send(self, parts: Sequence[_Buffer], deadline: float) -> None:
        views = [memoryview(part) for part in parts if len(part)]
        start = 0
        while start < len(views):
            try:
                count = self._socket.sendmsg(piece(views, start))
            except BlockingIOError:
                count = 0
            start = skip(views, start, count)
            if start < len(views) and MONOTONIC() >= deadline:
                raise TimeoutError("the peer did not receive in time")

    def _set_receive_timeout(self, seconds: float) -> None:
        """0 waits for ever."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(seconds))


def require_no_payload(payload_bytes: int) -> None:
    """Raises `InvalidInputError` for a payload where none belongs."""
    if payload_bytes:
        raise InvalidInputError(f"a payload of {payload_bytes} bytes where none belongs")


def _keep_alive(connected: socket.socket) -> None:
    """Finds out within a minute that the other machine has vanished without a word."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
