"""Short answers of a Redis: parsed by hiredis, which believes whatever length an array announces, once they are vetted.

hiredis makes room for an array when it reads its head: 16 GB for two thousand million elements, with everybody else
waiting for the interpreter. So nothing gets that far that announces more than can come.
"""

import re
from collections.abc import Callable

import hiredis

from kvtier.errors import InvalidInputError, KvtierError, UnauthenticatedError, UnavailableError

NOTHING = object()
"""Not enough has come for an answer yet."""
_MAX_ANSWER_BYTES = 64
"""For one answer, on average; all that are outstanding get 1 MiB besides."""
_TOO_LONG_BYTES = 1 << 20
_MIN_ANSWER_BYTES = 4
_LINES = re.compile(rb"(?:[:+-][^\r\n]*+\r\n)*+")
"""As many as there are that are whole."""
_HEAD = re.compile(rb"([$*])(-1|[0-9]{1,12})\r\n")
"""Of a string or an array."""
_CUT_OFF = re.compile(rb"[:+-][^\r\n]*\r?|[$*](?:-?|-1\r?|[0-9]{1,12}\r?)")
"""What either may look like before it is whole."""
_TOO_MANY = "the Redis answers more than it was asked"
_REFUSED = ("NOAUTH", "WRONGPASS", "NOPERM")


class ReplyError(Exception):
    """The server's refusal of one command: a value among the answers, not raised by this module."""

    @property
    def code(self) -> str:
        """The first word: OOM, MOVED, READONLY, ..."""
        return str(self).partition(" ")[0]

    def translated(self) -> KvtierError:
        """As the exception that says what to do."""
        if self.code in _REFUSED:
            return UnauthenticatedError(f"the Redis refuses: {self}; check username and password and their rights")
        return UnavailableError(f"the Redis refuses: {self}")


class AnswerParser:
    """Of one connection. One thread at a time. `InvalidInputError`: what came is no answer of a Redis."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader(protocolError=InvalidInputError, replyError=ReplyError, notEnoughData=NOTHING)
        self.next: Callable[[], object] = self._reader.gets
        """int, bytes, None, list or `ReplyError`; or `NOTHING`. Not one of our methods: answers come in thousands."""
        self._outstanding = 0
        """Answers that are to come, and elements of arrays that have begun."""
        self._room_bytes = 0
        """How much may come for them."""
        self._in_string = 0
        """Bytes that are to come of a string, its end included."""
        self._cut_off = b""
        """A line whose end has not come."""

    def expect(self, count: int) -> None:
        """So many answers are outstanding."""
        self._room_bytes = _TOO_LONG_BYTES + count * _MAX_ANSWER_BYTES
        self._outstanding = count

    def feed(self, received: memoryview) -> None:
        """The next bytes, wherever they are cut."""
        self._room_bytes -= len(received)
        if self._room_bytes < 0:
            raise InvalidInputError("the answer of the Redis is longer than any that was asked for")
        data = self._cut_off + received
        at = self._vetted(data)
        if at < len(data) and not _CUT_OFF.fullmatch(data, at):
            raise InvalidInputError(f"the Redis answers {data[at : at + 40]!r}")
        self._cut_off = data[at:]
        self._reader.feed(data[:at])

    def require_end(self) -> None:
        """Raises `InvalidInputError` when more has come than was given out."""
        if self._cut_off:
            raise InvalidInputError(_TOO_MANY)

    def _vetted(self, data: bytes) -> int:
        """How much of it hiredis may see."""
        at = min(self._in_string, len(data))
        self._in_string -= at
        while at < len(data):
            lines = _LINES.match(data, at)
            assert lines is not None, "matches none as well"
            self._count(-data.count(b"\r\n", at, lines.end()))
            at = lines.end()
            head = _HEAD.match(data, at)
            if head is None:
                break
            at, length = head.end(), int(head[2])
            self._count(-1)
            if head[1] == b"*":
                self._count(max(length, 0))
            else:
                end = at + length + 2 if length >= 0 else at
                self._in_string = max(0, end - len(data))
                at = min(end, len(data))
        return at

    def _count(self, change: int) -> None:
        self._outstanding += change
        if self._outstanding < 0:
            raise InvalidInputError(_TOO_MANY)
        if self._outstanding * _MIN_ANSWER_BYTES > self._room_bytes:
            raise InvalidInputError(f"the Redis announces {self._outstanding} answers, more than there can be")
