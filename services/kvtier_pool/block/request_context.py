"""One request of the block protocol on its way through the pool: what was asked, and where the answers go."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from kvtier.clock import MONOTONIC
from kvtier.identity.keys import StoreKey
from kvtier.protocol.block import Fields, Result
from kvtier.protocol.block_socket import FrameSocket
from kvtier.system.interpreter_time import note_spent


class RequestContext:
    """A request and its answers. The connection's thread only. Errors are those of `FrameSocket`."""

    __slots__ = ("_connection", "_deadline", "_id", "_max_stall_s", "moved_bytes", "parts", "payload_bytes", "request")

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
        self.parts: Callable[[Sequence[StoreKey]], Iterable[Sequence[StoreKey]]] = lambda keys: (keys,)
        """Cuts the keys of a large request into parts, between which requests of other tenants are handled."""

    def answer(
        self,
        fields: Mapping[str, object],
        payload: Sequence[memoryview] = (),
        *,
        descriptors: Sequence[int] = (),
        then: Mapping[str, object] | None = None,
    ) -> None:
        """Sends one answer; the buffers and descriptors are the caller's again on return.

        :param then: the fields of another answer, without payload, that goes out together with this one.
        """
        if payload:
            self.moved_bytes += sum(map(len, payload))
        began_s = time.thread_time()
        self._connection.send_frame(
            self._header(fields),
            payload,
            deadline=self._piece_deadline(),
            descriptors=descriptors,
            then=None if then is None else self._header(then),
        )
        if payload:  # which the kernel has copied
            note_spent(began_s - time.thread_time())

    def next_piece(self) -> Callable[[Sequence[memoryview]], None]:
        """What fills buffers with the next bytes of the payload, all of them in the time of one piece."""
        return partial(self._receive, deadline=self._piece_deadline())

    def _receive(self, into: Sequence[memoryview], *, deadline: float) -> None:
        began_s = time.thread_time()
        self._connection.receive_into(into, deadline=deadline)
        note_spent(began_s - time.thread_time())

    def _header(self, fields: Mapping[str, object]) -> dict[str, object]:
        return {"id": self._id, "result": Result.OK, **fields}

    def _piece_deadline(self) -> float:
        return min(self._deadline, MONOTONIC() + self._max_stall_s)
