"""One connection of the block protocol, from the engine's side."""

import contextlib
from collections.abc import Mapping, Sequence

from kvtier.errors import InvalidInputError, UnauthenticatedError
from kvtier.keys import TenantId
from kvtier.tiers.base import ReadableBuffer
from kvtier.wire.address import Address, open_connection
from kvtier.wire.block import VERSIONS, Fields, Result, Verb, error_for
from kvtier.wire.block_socket import FrameSocket
from kvtier.wire.stream import PlainStream

_CLIENT = "kvtier"


class PoolConnection:
    """A connection that the pool has greeted. One thread at a time.

    `OSError`: the connection failed or was late. `KvtierError`: the pool answered that it will not, or what it
    said makes no sense. After either, only `close` makes sense.
    """

    def __init__(self, socket: FrameSocket) -> None:
        """For `open`."""
        self._socket = socket
        self._deadline = 0.0
        """Of the call under way, monotonic."""
        self._request_id = 0
        self._unread_bytes = 0
        """Payload of the last answer that nobody has received."""

    @classmethod
    def open(cls, address: Address, token: str, tenant: TenantId, deadline: float) -> "PoolConnection":
        """Connects and exchanges HELLO. The token must be that tenant's."""
        connection = cls(FrameSocket(PlainStream(open_connection(address, deadline))))
        try:
            hello = {"versions": list(VERSIONS), "token": token, "client": _CLIENT}
            greeting = connection.ask(Verb.HELLO, hello, (), deadline)
            if greeting.number("version") not in VERSIONS:
                raise InvalidInputError(f"the pool chose version {greeting.number('version')}, which was not offered")
            if greeting.data("tenant") != tenant:
                raise UnauthenticatedError(
                    "the pool takes the token for another tenant's: check `tenant` and its `token` in the engine's "
                    "configuration, and `token_sha256` in the pool's"
                )
        except TimeoutError:
            connection.close()
            raise TimeoutError("connected, but no greeting in time; is this what the pool calls `listen`?") from None
        except BaseException:
            connection.close()
            raise
        return connection

    def ask(
        self, verb: Verb, fields: Mapping[str, object], payload: Sequence[ReadableBuffer], deadline: float
    ) -> Fields:
        """Sends one request and waits for its first answer; all of the call keeps to `deadline`."""
        self._deadline = deadline
        self._request_id += 1
        request = {"id": self._request_id, "verb": verb, **fields}
        # A pool that refuses closes while we may still be sending: its reason is there to be read nevertheless.
        with contextlib.suppress(ConnectionError):
            self._socket.send_frame(request, payload, deadline=deadline)
        return self.receive_answer()

    def receive_answer(self) -> Fields:
        """The next answer to the request."""
        self.require_end()
        answer, self._unread_bytes = self._socket.receive_head(deadline=self._deadline)
        result = answer.text("result")
        if result != Result.OK:
            raise error_for(result, answer.text("message"))
        if answer.number("id") != self._request_id:
            raise InvalidInputError(f"answer {answer.number('id')} to request {self._request_id}")
        return answer

    def receive_payload(self, into: Sequence[memoryview]) -> None:
        """Fills `into` with all of the last answer's payload; nothing is written when its length is another."""
        expected = sum(map(len, into))
        if self._unread_bytes != expected:
            raise InvalidInputError(f"a payload of {self._unread_bytes} bytes for blocks of {expected}")
        self._socket.receive_into(into, deadline=self._deadline)
        self._unread_bytes = 0

    def require_end(self) -> None:
        """Raises `InvalidInputError` when the last answer has a payload that was not received."""
        if self._unread_bytes:
            raise InvalidInputError(f"a payload of {self._unread_bytes} bytes where none belongs")

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
