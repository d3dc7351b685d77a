"""Frames over a connected stream: few system calls, no copy of payloads in Python, a deadline on each call."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtier.clock import MONOTONIC
from kvtier.errors import InvalidInputError
from kvtier.net.gather import MAX_VECTORS, skip
from kvtier.net.stream import Stream
from kvtier.net.wrong_protocol import PRELUDE_BYTES
from kvtier.protocol.block import MAX_HEADER_BYTES, Fields, HeadEncoder, decode_header, decode_prelude

_Buffer = bytes | bytearray | memoryview
_HEADER_STEP_BYTES = 64 << 10
"""Memory for a header is taken as its bytes arrive, not as its length claims."""
_AHEAD_BYTES = 16 << 10
"""What one call may receive beyond the bytes asked for: a small frame, or several, costs one system call."""
_SPIN_S = 50e-6
"""How long a thread looks for the next frame before it goes to sleep: what waking up costs on a virtual machine."""


class FrameSocket:
    """One end of a connection. One thread at a time, but for `shut_down`.

    Deadlines are monotonic seconds. `TimeoutError`: not done by then. Other `OSError`: the connection is gone.
    `InvalidInputError`: the peer does not keep to the protocol. After any of them only `close` makes sense.
    """

    def __init__(self, stream: Stream, *, spins: bool = False) -> None:
        """
        :param stream: owned from now on.
        :param spins: look for the next frame for a moment before going to sleep, as long as frames come that soon.
            For peers on this machine that answer at once, and processes whose threads do not fight for the GIL.
        """
        self._stream = stream
        self._heads = HeadEncoder()
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._start = self._stop = 0
        """The bytes of `_ahead` that were received and not asked for yet."""
        self._asked_at = 0.0
        """The monotonic time at which the last bytes were asked for."""
        self._may_spin = self._spins = spins
        """Whether the last frame came so soon that looking for the next one is worth while."""
        self._makes_few_calls = False

    def send_frame(
        self,
        header: Mapping[str, object],
        payload: Sequence[_Buffer] = (),
        *,
        deadline: float,
        descriptors: Sequence[int] = (),
        then: Mapping[str, object] | None = None,
    ) -> None:
        """Sends header and payload; the buffers are the caller's again on return.

        :param payload: one-dimensional bytes, sent one after the other.
        :param descriptors: duplicated for the peer; Unix sockets only.
        :param then: the header of another frame, without payload, that goes out in the last system call of this one.
        """
        if payload or descriptors or then is not None:
            parts = [self._heads.encode(header, sum(map(len, payload))), *payload]
            if then is not None:
                parts.append(self._heads.encode(then))
            self._send([memoryview(part) for part in parts], deadline, descriptors)
        else:
            self._send_message(self._heads.encode(header), deadline)

    def send_streamed(
        self, header: Mapping[str, object], payload: Iterable[_Buffer], payload_bytes: int, *, deadline: float
    ) -> None:
        """Sends a header, and a payload of so many bytes that is made while it is sent: each buffer is the caller's
        again when the next one is asked for."""
        self._send_message(self._heads.encode(header, payload_bytes), deadline)
        for buffer in payload:
            self._send([memoryview(buffer)], deadline)
            if MONOTONIC() >= deadline:
                raise TimeoutError("the peer did not receive in time")

    def send_bytes(self, data: bytes, *, deadline: float) -> None:
        """Sends bytes that are no frame: for peers that speak another protocol."""
        self._send_message(data, deadline)

    def make_few_calls(self, is_on: bool) -> None:
        """Sends and receives by few system calls from now on, or by those that are fastest. Each call gives the
        interpreter up, and where threads fight for it, waits to have it back."""
        self._makes_few_calls = is_on
        self._stream.make_few_calls(is_on)

    def wait(self) -> bool:
        """Blocks, however long, until a frame begins. False when the connection has ended instead."""
        if self._start == self._stop and not self._look():
            self._start, self._stop = 0, self._stream.wait(self._ahead)
            self._note_delay()
        return self._start < self._stop

    def has_head(self, *, looks: bool = True) -> bool:
        """Whether the whole header of the next frame has come. Receives what is there, without waiting.

        :param looks: False: only what has been received with the frame before counts, which takes no system call.

        Raises `ConnectionResetError` when the peer has closed the connection, and `InvalidInputError` for a header
        above 16 KiB, which would not be received before it is asked for.
        """
        if (is_ahead := self._is_head_ahead()) or not looks:
            return is_ahead
        if self._start:
            rest = self._take(self._stop - self._start)
            self._ahead[: len(rest)] = rest
            self._start, self._stop = 0, len(rest)
        count = self._stream.poll(self._ahead[self._stop :])
        if count == 0:
            raise ConnectionResetError("the peer closed the connection")
        self._stop += count or 0
        return self._is_head_ahead()

    def _is_head_ahead(self) -> bool:
        num_ahead = self._stop - self._start
        if num_ahead < PRELUDE_BYTES:
            return False
        prelude = self._ahead[self._start : self._start + PRELUDE_BYTES]
        header_bytes, _ = decode_prelude(prelude, _AHEAD_BYTES - PRELUDE_BYTES)
        return num_ahead >= PRELUDE_BYTES + header_bytes

    def receive_head(
        self,
        *,
        deadline: float,
        max_header_bytes: int = MAX_HEADER_BYTES,
        on_large: Callable[[int], object] = lambda header_bytes: None,
    ) -> tuple[Fields, int]:
        """The header of the next frame, and how many bytes of payload follow it: the caller's to receive.

        :param on_large: called before memory is taken for a header above 16 KiB, with its length.
        """
        if self._start == self._stop and not self._look():
            self._need(PRELUDE_BYTES, deadline)
            self._note_delay()
        if self._stop - self._start < PRELUDE_BYTES:
            self._need(PRELUDE_BYTES, deadline)
        header_bytes, payload_bytes = decode_prelude(self._take(PRELUDE_BYTES), max_header_bytes)
        if header_bytes <= _AHEAD_BYTES:
            if self._stop - self._start < header_bytes:
                self._need(header_bytes, deadline)
            return decode_header(self._take(header_bytes)), payload_bytes
        on_large(header_bytes)
        packed = bytearray()
        while len(packed) < header_bytes:
            part = bytearray(min(_HEADER_STEP_BYTES, header_bytes - len(packed)))
            self.receive_into([memoryview(part)], deadline=deadline)
            packed += part
        return decode_header(packed), payload_bytes

    def receive_into(self, into: Iterable[memoryview], *, deadline: float) -> None:
        """Fills these buffers one after the other. The same one may stand in several places."""
        views = [view for view in into if len(view)]
        start = 0
        while start < len(views):
            if self._start < self._stop:
                part = self._take(min(len(views[start]), self._stop - self._start))
                views[start][: len(part)] = part
                count = len(part)
            else:
                count = self._stream.receive(views[start : start + MAX_VECTORS], fill=True, deadline=deadline)
                if not count:
                    raise ConnectionResetError("the peer closed the connection")
            start = skip(views, start, count)

    def linger(self, *, deadline: float) -> None:
        """Says that nothing more will come, and reads past what the peer still sends, until it closes as well.

        Closing with bytes unread would reset the connection, and the last frame might be lost with it.
        """
        self._stream.end_sending()
        while self._stream.receive([self._ahead], fill=False, deadline=deadline):
            pass

    def shut_down(self) -> None:
        """Ends the connection under a thread that is using it. Any thread."""
        self._stream.shut_down()

    def close(self) -> None:
        """Idempotent."""
        self._stream.close()

    def _look(self) -> bool:
        """Whether a frame begins within the time that going to sleep and waking up would take."""
        self._asked_at = now = MONOTONIC()
        while self._spins and not self._makes_few_calls and now - self._asked_at < _SPIN_S:
            count = self._stream.poll(self._ahead)
            if count is not None:
                self._start, self._stop = 0, count
                return count > 0
            os.sched_yield()  # the peer may be waiting for this very core
            now = MONOTONIC()
        return False

    def _note_delay(self) -> None:
        self._spins = self._may_spin and MONOTONIC() - self._asked_at < 2 * _SPIN_S

    def _need(self, nbytes: int, deadline: float) -> None:
        """Receives until so many bytes are ahead."""
        if len(self._ahead) - self._start < nbytes:
            rest = self._take(self._stop - self._start)
            self._ahead[: len(rest)] = rest
            self._start, self._stop = 0, len(rest)
        while self._stop - self._start < nbytes:
            count = self._stream.receive([self._ahead[self._stop :]], fill=False, deadline=deadline)
            if not count:
                raise ConnectionResetError("the peer closed the connection")
            self._stop += count

    def _take(self, nbytes: int) -> memoryview:
        """The next bytes of what was received ahead; until more is received."""
        start = self._start
        stop = self._start = start + nbytes
        if stop == self._stop:
            self._start = self._stop = 0
        return self._ahead[start:stop]

    def _send_message(self, message: bytes, deadline: float) -> None:
        """Sends a message in one system call, as most go, or in several."""
        view = memoryview(message)
        sent = self._stream.send([view], 0)
        if sent < len(view):
            self._send([view[sent:]], deadline)

    def _send(self, views: list[memoryview], deadline: float, descriptors: Sequence[int] = ()) -> None:
        views = [view for view in views if len(view)]
        start = 0
        while start < len(views):
            count = self._stream.send(views, start, descriptors)
            if count:
                descriptors = ()
            start = skip(views, start, count)
            if start < len(views) and MONOTONIC() >= deadline:
                raise TimeoutError("the peer did not receive in time")


def require_no_payload(payload_bytes: int) -> None:
    """Raises `InvalidInputError` for a payload where none belongs."""
    if payload_bytes:
        raise InvalidInputError(f"a payload of {payload_bytes} bytes where none belongs")
