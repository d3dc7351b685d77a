"""One request of the block protocol on its way through the pool: what was asked, and where the answers go."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvtier.clock import MONOTONIC
from kvtier.protocol.block import Fields, Result
from kvtier.protocol.block_socket import FrameSocket


class RequestContext:
    """A request and its answers. The connection's thread only. Errors are those of `FrameSocket`."""

    __slots__ = ("_connection", "_deadline", "_id", "_max_stall_s", "moved_bytes", "payload_bytes", "request")

    def __init__(
        self, connection: FrameSocket, request: Fields, payload_bytes: int, *, deadline: float, max_stall_s: float
    ) -> None:
        """
        :param payload_bytes: that follow the request and must be received before it is answered.
        :param deadline: of it all, monotonic.
        :param max_stall_s: how long the peer may take for one answer, or for one piece of the payload.
        """
        self._connection = connection
        self._id = request.number("id")
        self._deadline = deadline
        self._max_stall_s = max_stall_s
        self.request = request
        self.payload_bytes = payload_bytes
        self.moved_bytes = 0
        """Payload bytes that the request has moved so far: those that were sent, and what handlers add."""

    def answer(
        self, fields: Mapping[str, object], payload: Sequence[memoryview] = (), *, descriptors: Sequence[int] = ()
    ) -> None:
        """Sends one answer; the buffers and descriptors are the caller's again on return."""
        if payload:
            self.moved_bytes += sum(map(len, payload))
        header = {"id": self._id, "result": Result.OK, **fields}
        self._connection.send_frame(header, payload, deadline=self._piece_deadline(), descriptors=descriptors)

    def next_piece(self) -> Callable[[Sequence[memoryview]], None]:
        """What fills buffers with the next bytes of the payload, all of them in the time of one piece."""
        return partial(self._connection.receive_into, deadline=self._piece_deadline())

    def _piece_deadline(self) -> float:
        return min(self._deadline, MONOTONIC() + self._max_stall_s)
