"""One connection to a Redis: commands out of the buffers they lie in, payloads straight into theirs.

redis-py connects (TCP, Unix socket, TLS); what comes after goes over its socket directly, because its own
packer and parser copy a payload two and four times. Short answers are parsed by `answers`; a bulk string's
length is read here and its bytes are received where they belong.

The socket blocks in the kernel, with SO_RCVTIMEO and SO_SNDTIMEO, so that one system call moves a block
and takes the GIL back once. TLS does not go without Python's own timeouts.
"""

import contextlib
import select
import socket
import ssl
from collections.abc import Sequence
from typing import Protocol, cast

from kvtier.clock import MONOTONIC
from kvtier.errors import InvalidInputError
from kvtier.memory.buffers import ReadableBuffer
from kvtier.net.gather import SEND_PIECE_BYTES, SEND_SLICE_S, piece, skip, timeval
from kvtier.tiers.redis.answers import NOTHING, AnswerParser, ReplyError

_AHEAD_BYTES = 16 << 10
"""Received before it is known what it is; what turns out to be payload is copied from there."""
_SKIP_BYTES = 64 << 10
_MAX_LENGTH_DIGITS = 12


class RedisPyConnection(Protocol):
    """What is needed of a connected `redis.Connection` of any kind."""

    def disconnect(self) -> None:
        """Closes it."""


class RedisConnection:
    """A connection that redis-py has made. One thread at a time.

    `OSError`: it failed or was late. `InvalidInputError`: what came is no answer of a Redis. After either,
    only `close` makes sense: a late answer must never be taken for another's.
    """

    def __init__(self, connection: RedisPyConnection) -> None:
        """:param connection: connected, with nothing unread; owned from now on."""
        self._connection = connection
        # redis-py has no public way to the socket; its parsers take the same one.
        self._socket = cast(socket.socket, connection._sock)  # type: ignore[attr-defined]
        self._deadline = 0.0
        """Of the exchange under way, monotonic."""
        self._parser = AnswerParser()
        self._buffer = bytearray(_AHEAD_BYTES)
        self._ahead = memoryview(self._buffer)
        self._start = self._end = 0
        """What of `_ahead` is received and not used."""
        self._over_tls = isinstance(self._socket, ssl.SSLSocket)
        if not self._over_tls:
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(SEND_SLICE_S))

    def is_quiet(self) -> bool:
        """Whether it may serve another call: the server has neither closed it nor said anything unasked."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def send(self, parts: Sequence[ReadableBuffer], deadline: float) -> None:
        """Sends commands that are packed already. The buffers are the caller's again on return.

        All of the exchange, until the last answer is received, keeps to `deadline`.
        """
        self._deadline = deadline
        views = [memoryview(part) for part in parts if len(part)]
        start = 0
        # A server that refuses and closes while we are still sending: its reason is there to be read.
        with contextlib.suppress(ConnectionError):
            while start < len(views):
                start = skip(views, start, self._send_some(views, start))
                if start < len(views) and MONOTONIC() >= deadline:
                    raise TimeoutError("the Redis did not receive in time")

    def receive_answers(self, count: int) -> list[object]:
        """The next `count` answers, all that are outstanding: int, bytes, None, list or `ReplyError`."""
        answers: list[object] = []
        self._parser.expect(count)
        next_answer = self._parser.next
        while len(answers) < count:
            answer = next_answer()
            if answer is NOTHING:
                received = self._receive_some(self._ahead, wait_for_all=False)
                self._parser.feed(self._ahead[:received])
            else:
                answers.append(answer)
        self._parser.require_end()
        return answers

    def receive_bulk_length(self) -> int | ReplyError | None:
        """How long the bulk string is that comes next; None for nil. Its bytes and `end_bulk` are to follow."""
        line = self._receive_line()
        kind, text = line[:1], line[1:]
        if kind == b"-":
            return ReplyError(text.decode(errors="replace"))
        if kind != b"$" or not text.removeprefix(b"-").isdigit() or len(text) > _MAX_LENGTH_DIGITS:
            raise InvalidInputError(f"the Redis answers {line[:40]!r} where a string belongs")
        length = int(text)
        return length if length >= 0 else None

    def receive_into(self, into: memoryview) -> None:
        """Fills `into` with the next bytes."""
        ahead = min(len(into), self._end - self._start)
        into[:ahead] = self._ahead[self._start : self._start + ahead]
        self._start += ahead
        while ahead < len(into):
            ahead += self._receive_some(into[ahead:], wait_for_all=True)

    def skip(self, nbytes: int) -> None:
        """Receives bytes that nobody wants."""
        room = memoryview(bytearray(min(nbytes, _SKIP_BYTES)))
        while nbytes:
            self.receive_into(room[: min(nbytes, len(room))])
            nbytes -= min(nbytes, len(room))

    def end_bulk(self) -> None:
        """Receives what ends a bulk string."""
        if self._receive_line():
            raise InvalidInputError("the Redis sends a string that is longer than it said")

    def require_end(self) -> None:
        """Raises `InvalidInputError` when something was received that nobody asked for."""
        if self._start != self._end:
            raise InvalidInputError("the Redis answers more than it was asked")

    def close(self) -> None:
        """Idempotent."""
        self._connection.disconnect()

    def _receive_line(self) -> bytes:
        """Up to the next CRLF, which is not part of it."""
        while True:
            end = self._buffer.find(b"\r\n", self._start, self._end)
            if end >= 0:
                line = bytes(self._ahead[self._start : end])
                self._start = end + 2
                return line
            rest = bytes(self._ahead[self._start : self._end])
            if len(rest) == len(self._ahead):
                raise InvalidInputError(f"the Redis answers {rest[:40]!r} and never ends")
            self._ahead[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
            self._end += self._receive_some(self._ahead[self._end :], wait_for_all=False)

    def _send_some(self, views: list[memoryview], start: int) -> int:
        """How many bytes went; 0 when there is no room yet."""
        try:
            if self._over_tls:
                self._socket.settimeout(self._remaining_s())
                return self._socket.send(views[start][:SEND_PIECE_BYTES])
            return self._socket.sendmsg(piece(views, start))
        except BlockingIOError:
            return 0

    def _receive_some(self, into: memoryview, *, wait_for_all: bool) -> int:
        """At least one byte, or an `OSError`."""
        while True:
            try:
                if self._over_tls:
                    self._socket.settimeout(self._remaining_s())
                    count = self._socket.recv_into(into)
                else:
                    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(self._remaining_s()))
                    count = self._socket.recv_into(into, 0, socket.MSG_WAITALL if wait_for_all else 0)
            except BlockingIOError:
                continue
            if not count:
                raise ConnectionResetError("the Redis closed the connection")
            return count

    def _remaining_s(self) -> float:
        remaining_s = self._deadline - MONOTONIC()
        if remaining_s <= 0:
            raise TimeoutError("the Redis did not answer in time")
        return remaining_s
