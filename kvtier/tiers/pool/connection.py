"""One connection of the block protocol, from the engine's side."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from kvtier.errors import InvalidInputError, UnauthenticatedError
from kvtier.identity.keys import NamespaceId, TenantId
from kvtier.memory.buffers import ReadableBuffer
from kvtier.net.address import Address, open_connection
from kvtier.net.stream import PlainStream
from kvtier.net.tls import ClientTls, TlsStream
from kvtier.protocol.block import VERSIONS, Fields, Result, Verb, error_for, trace_field
from kvtier.protocol.block_socket import FrameSocket

_CLIENT = "kvtier"
_BUFFER_BYTES = 2 << 20
"""Room for a block or so while the pool, which has many writers and not as many cores, takes another's."""


class PoolConnection:
    """A connection that the pool has greeted. One thread sends at a time, and one receives.

    Requests may be sent ahead of the answers to earlier ones: the pool answers them in order.
    `OSError`: the connection failed or was late. `KvtierError`: the pool answered that it will not, or what it
    said makes no sense. After either, only `close` makes sense.
    """

    def __init__(self, stream: PlainStream | TlsStream) -> None:
        """Makes a connection of a stream for `open`; the greeting comes after."""
        self._stream = stream
        self._socket = FrameSocket(stream, spins=isinstance(stream, PlainStream) and stream.is_local)
        self.lease_s = 0.0
        """How long the pool lets us read a block in its memory; 0 when it does not share it here."""
        self.max_held_bytes = 0
        """Payload bytes that we may hold in its memory at a time, to read and to write, as the pool has said last.
        Written by the thread that receives, read by any."""
        self.max_pin_s = 0.0
        """The longest time for which the pool pins blocks; 0 when it has no pins."""
        self._deadline = 0.0
        """The deadline of the answer that is being received, by the monotonic clock."""
        self._request_id = 0
        """The id of the request that was sent last."""
        self._unanswered: deque[int] = deque()
        """Ids of the requests that were sent and not answered yet, in order."""
        self._answered_id = 0
        """The id of the request that was answered last."""
        self._unread_bytes = 0
        """Payload bytes of the last answer that were not received yet."""

    @classmethod
    def open(
        cls,
        address: Address,
        token: str | None,
        tenant: TenantId,
        deadline: float,
        *,
        tls: ClientTls | None = None,
        namespaces: Sequence[NamespaceId] = (),
    ) -> "PoolConnection":
        """Connects and exchanges HELLO. The credentials must be that tenant's.

        :param token: None: the certificate says it all.
        :param tls: not for Unix sockets, which stay as they are.
        :param namespaces: all that will be used; none: any may be.
        """
        connection = cls(_stream(address, tls, deadline))
        try:
            hello: dict[str, object] = {"versions": list(VERSIONS)}
            if token is not None:
                hello["token"] = token
            hello["client"] = _CLIENT
            if namespaces:
                hello["namespaces"] = list(namespaces)
            greeting = connection.ask(Verb.HELLO, hello, (), deadline)
            if greeting.number("version") not in VERSIONS:
                raise InvalidInputError(f"the pool chose version {greeting.number('version')}, which was not offered")
            if greeting.data("tenant") != tenant:
                raise UnauthenticatedError(
                    "the pool takes the credentials for another tenant's: check `tenant` and its `token` in the "
                    "engine's configuration, and `token_sha256` and `certificate_names` in the pool's"
                )
            if greeting.has("lease_ms"):
                connection.lease_s = greeting.number("lease_ms") / 1000
            if greeting.has("max_pin_ms"):
                connection.max_pin_s = greeting.number("max_pin_ms") / 1000
        except TimeoutError:
            connection.close()
            raise TimeoutError(
                "connected, but no greeting in time; is this what the pool calls `listen`, and has it connections left "
                "(max_connections)?"
            ) from None
        except BaseException:
            connection.close()
            raise
        return connection

    def ask(
        self, verb: Verb, fields: Mapping[str, object], payload: Sequence[ReadableBuffer], deadline: float
    ) -> Fields:
        """Sends one request and waits for its first answer."""
        self.send(verb, fields, payload, deadline)
        return self.receive_answer(deadline)

    def send(
        self, verb: Verb, fields: Mapping[str, object], payload: Sequence[ReadableBuffer], deadline: float
    ) -> None:
        """Sends a request, to be answered in its turn."""
        self.send_with(self.header_of(verb, fields), payload, deadline)

    def send_with(self, header: Mapping[str, object], payload: Sequence[ReadableBuffer], deadline: float) -> None:
        """Sends the request whose header `header_of` has made last."""
        try:
            self._socket.send_frame(header, payload, deadline=deadline)
        except ConnectionError:
            return  # a pool that refuses closes while we may still be sending: its reason is there to be read

    def send_streamed(
        self,
        verb: Verb,
        fields: Mapping[str, object],
        payload: Iterable[ReadableBuffer],
        payload_bytes: int,
        deadline: float,
    ) -> None:
        """Sends a request as `send` does, with a payload that is made while it is sent: see `FrameSocket`."""
        header = self.header_of(verb, fields)
        with suppress(ConnectionError):  # as in `send`
            self._socket.send_streamed(header, payload, payload_bytes, deadline=deadline)

    def header_of(self, verb: Verb, fields: Mapping[str, object]) -> dict[str, object]:
        """The header of a request that is sent next. From now on, its answer may be waited for."""
        self._request_id += 1
        self._unanswered.append(self._request_id)
        return {"id": self._request_id, "verb": verb, **fields, **trace_field()}

    def receive_answer(self, deadline: float, *, more: bool = False) -> Fields:
        """The answer to the oldest request that has none yet; its payload comes by the same deadline.

        :param more: another one of several to the request that was answered last.
        """
        self.require_end()
        self._deadline = deadline
        request_id = self._answered_id if more else self._unanswered.popleft()
        self._answered_id = request_id
        answer, self._unread_bytes = self._socket.receive_head(deadline=self._deadline)
        result = answer.text("result")
        if result != Result.OK:
            raise error_for(result, answer.text("message"))
        if answer.number("id") != request_id:
            raise InvalidInputError(f"answer {answer.number('id')} to request {request_id}")
        if answer.has("max_held_bytes"):
            self.max_held_bytes = answer.number("max_held_bytes")
        return answer

    def require_payload(self, expected: int) -> None:
        """Raises `InvalidInputError` unless the last answer has a payload of so many bytes."""
        if self._unread_bytes != expected:
            raise InvalidInputError(f"a payload of {self._unread_bytes} bytes for blocks of {expected}")

    def receive_into(self, into: Sequence[memoryview]) -> None:
        """Fills `into` with the next bytes of the last answer's payload: no more than it has, see `require_payload`."""
        self._socket.receive_into(into, deadline=self._deadline)
        self._unread_bytes -= sum(map(len, into))

    def tell(self, verb: Verb, fields: Mapping[str, object], deadline: float) -> None:
        """Sends a request that is not answered."""
        self._request_id += 1
        self._socket.send_frame({"id": self._request_id, "verb": verb, **fields}, deadline=deadline)

    def require_end(self) -> None:
        """Raises `InvalidInputError` when the last answer has a payload that was not received."""
        if self._unread_bytes:
            raise InvalidInputError(f"a payload of {self._unread_bytes} bytes where none belongs")

    def for_event_loop(self) -> int:
        """Makes the connection one of an event loop's: nothing waits any more. `has_answer` says whether there is an
        answer to receive, and a request that the socket does not take at once is a `TimeoutError`.

        :return: the descriptor to wait at. Not with TLS, which keeps bytes that the descriptor does not tell of.
        """
        assert isinstance(self._stream, PlainStream), "an event loop cannot wait for TLS"
        return self._stream.for_event_loop()

    def has_answer(self, *, looks: bool = True) -> bool:
        """Whether the next answer has come; its payload may not have. Receives what is there, without waiting.

        :param looks: False: only what has been received with the answer before counts.

        Raises `ConnectionResetError` when the pool has ended the connection.
        """
        return self._socket.has_head(looks=looks)

    @property
    def num_descriptors(self) -> int:
        """Number of descriptors that have come and were not taken."""
        return self._stream.num_descriptors if isinstance(self._stream, PlainStream) else 0

    def take_descriptor(self) -> int | None:
        """The oldest that has come and was not taken; the caller's to close. They come in the order of the answers."""
        return self._stream.take_descriptor() if isinstance(self._stream, PlainStream) else None

    def wait_for_end(self) -> None:
        """Blocks until the pool has ended the connection, or `shut_down` has. Any thread, beside one that uses it."""
        assert isinstance(self._stream, PlainStream), "memory is shared over Unix sockets only"
        self._stream.wait_for_end()

    def shut_down(self) -> None:
        """Ends the connection under threads that use it. Any thread."""
        self._socket.shut_down()

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


def _stream(address: Address, tls: ClientTls | None, deadline: float) -> PlainStream | TlsStream:
    connected = open_connection(address, deadline)
    if tls is None or address.path:
        return PlainStream(connected, takes_descriptors=bool(address.path), unix_buffer_bytes=_BUFFER_BYTES)
    return tls.connect(connected, address.host, deadline)
