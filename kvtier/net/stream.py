"""A connected byte stream with deadlines that the kernel keeps: what frames travel over.

The socket blocks in the kernel, with SO_RCVTIMEO and SO_SNDTIMEO: one call moves a whole batch of blocks and
takes the GIL back once. Python's own timeouts would make the socket non-blocking, and a busy interpreter
would then be asked for the GIL at every few hundred KiB.
"""

import array
import select
import socket
import sys
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvtier.clock import MONOTONIC
from kvtier.net.gather import SEND_PIECE_BYTES, SEND_SLICE_S, TCP_LARGE_PIECE_BYTES, TCP_PIECE_BYTES, piece, timeval

MAX_DESCRIPTORS = 16
"""File descriptors that one frame may carry."""
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
_DONT_WAIT, _WAIT_ALL, _CLOSE_ON_EXEC = map(int, (socket.MSG_DONTWAIT, socket.MSG_WAITALL, socket.MSG_CMSG_CLOEXEC))
"""Flags as plain integers: to join two flags of an enum takes as long as a small message."""
_RECEIVE_SLICE_S = 0.05
"""Seconds between two looks at the clock. A constant, so that most calls set no socket option."""
_UNIX_BUFFER_BYTES = 1 << 20


class Stream(Protocol):
    """One end of a connection. One thread at a time, but for `shut_down`.

    Deadlines are monotonic seconds. `TimeoutError`: nothing moved by then. Other `OSError`: the connection is
    gone. After any of them only `close` makes sense.
    """

    def wait(self, into: memoryview) -> int:
        """Blocks, however long, until bytes come; returns how many are in `into` now, 0 at the end."""

    def poll(self, into: memoryview) -> int | None:
        """Receives what is there, without blocking; None when nothing is there yet, 0 at the end."""

    def receive(self, into: Sequence[memoryview], *, fill: bool, deadline: float) -> int:
        """Receives into at most `MAX_VECTORS` buffers, none of them empty, one after the other.

        Returns the number of bytes, 0 at the end.

        :param fill: wait until all is full, as far as one system call may; else return what is there.
        """

    def send(self, views: list[memoryview], start: int, descriptors: Sequence[int] = ()) -> int:
        """Sends some of what begins at `views[start]`; 0 when the peer took nothing for a while.

        :param descriptors: go with the first byte. Unix sockets only.
        """

    def make_few_calls(self, is_on: bool) -> None:
        """Sends as much in a system call as it may, or what is fastest where the interpreter is nobody else's."""

    def end_sending(self) -> None:
        """Says that nothing more will come."""

    def shut_down(self) -> None:
        """Ends the connection under a thread that is using it. Any thread."""

    def close(self) -> None:
        """Idempotent."""


class PlainStream:
    """`Stream` over a TCP or Unix socket as it is."""

    def __init__(
        self, connected: socket.socket, *, takes_descriptors: bool = False, unix_buffer_bytes: int = _UNIX_BUFFER_BYTES
    ) -> None:
        """
        :param connected: blocking stream socket; owned from now on.
        :param takes_descriptors: keep what comes by SCM_RIGHTS, for `take_descriptor`; else the kernel closes it.
        :param unix_buffer_bytes: what the peer may leave unread before a send blocks, over a Unix socket.
        """
        self._socket = connected
        self._receive_timeout_s = -1.0
        """SO_RCVTIMEO as set last."""
        self._takes_descriptors = takes_descriptors
        self._descriptors: deque[int] = deque()
        """Received and not taken yet."""
        is_unix = connected.family == socket.AF_UNIX
        self._fast_piece_bytes = SEND_PIECE_BYTES if is_unix else TCP_PIECE_BYTES
        self._large_piece_bytes = SEND_PIECE_BYTES if is_unix else TCP_LARGE_PIECE_BYTES
        self._piece_bytes = self._fast_piece_bytes
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(SEND_SLICE_S))
        if is_unix:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, unix_buffer_bytes)
        else:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(connected)

    @property
    def is_local(self) -> bool:
        """Whether the peer is on this machine by way of a Unix socket, so that descriptors can be passed."""
        return self._socket.family == socket.AF_UNIX and sys.platform == "linux"

    def for_event_loop(self) -> int:
        """Makes every call return at once from now on; returns the descriptor to wait at instead."""
        self._socket.setblocking(False)
        return self._socket.fileno()

    def wait(self, into: memoryview) -> int:
        """Blocks, however long, until bytes come, as `Stream.wait` says."""
        self._set_receive_timeout(0.0)
        count = self._receive([into], 0)
        assert count is not None, "a receive without a timeout came back without an answer"
        return count

    def poll(self, into: memoryview) -> int | None:
        """Receives what is there without blocking; None when nothing is there yet."""
        return self._receive([into], _DONT_WAIT)

    def receive(self, into: Sequence[memoryview], *, fill: bool, deadline: float) -> int:
        """Receives into the buffers one after the other, by the deadline; see `Stream.receive`."""
        while True:
            remaining_s = deadline - MONOTONIC()
            if remaining_s <= 0:
                raise TimeoutError("the peer did not send in time")
            self._set_receive_timeout(min(remaining_s, _RECEIVE_SLICE_S))
            count = self._receive(into, _WAIT_ALL if fill else 0)
            if count is not None:
                return count

    def send(self, views: list[memoryview], start: int, descriptors: Sequence[int] = ()) -> int:
        """Sends a piece of what begins at `views[start]` in one system call; 0 when the peer took nothing."""
        try:
            if len(views) - start == 1 and not descriptors:  # a message: nothing to gather
                return self._socket.send(views[start][: self._piece_bytes])
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            return self._socket.sendmsg(piece(views, start, self._piece_bytes), ancillary)
        except BlockingIOError:
            return 0

    def make_few_calls(self, is_on: bool) -> None:
        """Sends large pieces from now on: each call gives the interpreter up, and waits to have it back."""
        self._piece_bytes = self._large_piece_bytes if is_on else self._fast_piece_bytes

    def wait_for_end(self) -> None:
        """Blocks until the peer has closed, or `shut_down` was called. Beside a thread that uses the stream."""
        watched = select.poll()
        watched.register(self._socket, select.POLLRDHUP)
        watched.poll()

    @property
    def num_descriptors(self) -> int:
        """The number of descriptors that have come by SCM_RIGHTS and were not taken."""
        return len(self._descriptors)

    def take_descriptor(self) -> int | None:
        """The oldest that has come by SCM_RIGHTS and was not taken; the caller's to close."""
        return self._descriptors.popleft() if self._descriptors else None

    def end_sending(self) -> None:
        """Closes the sending direction: the peer reads the end."""
        self._socket.shutdown(socket.SHUT_WR)

    def shut_down(self) -> None:
        """Shuts the socket down under a thread that is using it. Any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
        while (descriptor := self.take_descriptor()) is not None:
            socket.close(descriptor)

    def _receive(self, into: Sequence[memoryview], flags: int) -> int | None:
        """None when nothing is there yet."""
        try:
            if not self._takes_descriptors:
                if len(into) == 1:
                    return self._socket.recv_into(into[0], 0, flags)
                return self._socket.recvmsg_into(into, 0, flags)[0]
            count, ancillary, _, _ = self._socket.recvmsg_into(into, _ANCILLARY_BYTES, flags | _CLOSE_ON_EXEC)
        except BlockingIOError:
            return None
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                self._descriptors += descriptors
        return count

    def _set_receive_timeout(self, seconds: float) -> None:
        """0 waits for ever."""
        if seconds != self._receive_timeout_s:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(seconds))
            self._receive_timeout_s = seconds


def keep_alive(connected: socket.socket) -> None:
    """Finds out within a minute that the other machine has vanished without a word."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
