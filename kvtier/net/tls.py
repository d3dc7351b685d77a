"""TLS under the block protocol: `Stream` over an encrypted connection, for both ends.

OpenSSL hands over one record, at most 16 KiB, per call, and each call takes the GIL back: with a busy interpreter
in the same process TLS is far slower than a plain socket. On one machine use a Unix socket.
"""

import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from kvtier.clock import MONOTONIC
from kvtier.errors import ConfigError
from kvtier.net.certificates import Renewed, TlsFiles, client_context, server_context
from kvtier.net.gather import SEND_SLICE_S, piece
from kvtier.net.stream import keep_alive
from kvtier.net.tls_errors import explained
from kvtier.net.wrong_protocol import PRELUDE_BYTES, WrongProtocolError

_ALERT_FULL = bytes.fromhex("15030300020250")
"""`internal_error`, in the clear, as a server may send it instead of a handshake."""
_HANDSHAKE = 0x16
"""The first byte that a peer which speaks TLS sends."""
_RECEIVE_SLICE_S = 0.05
"""Seconds between two looks at the clock. A constant, so that most calls set no timeout."""
_RECORD_BYTES = 16 << 10
_SMALL_BYTES = 2 << 10
"""Buffers below this share records: a copy costs less than a record of their own."""
_LAST_WORDS_S = 1.0
"""How long a peer whose handshake failed may take to read why."""


class ServerTls:
    """The pool's side: TLS for the connections of one listener. Any thread."""

    def __init__(self, files: TlsFiles) -> None:
        """Reads nothing yet: see `check`. With `files.ca`, clients need a certificate."""
        self._contexts = Renewed(files.named, partial(server_context, files))

    def check(self) -> None:
        """Raises `ConfigError` when the files are no good."""
        self._contexts.current()

    def wrap(self, accepted: socket.socket) -> ssl.SSLSocket:
        """The handshake is still to be made. `accepted` is used up."""
        return self._contexts.current().wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)

    def accept(self, accepted: socket.socket) -> "TlsStream":
        """A stream that makes the handshake with the first `receive`, within its deadline. Does not block."""
        return TlsStream(self.wrap(accepted))


class ClientTls:
    """The engine's side: TLS towards one pool. Any thread."""

    def __init__(self, files: TlsFiles, server_name: str | None = None) -> None:
        """Reads nothing yet: see `check`.

        :param files: with the CA of the pool's certificate.
        :param server_name: what the pool's certificate must be for, when that is not the host in its address.
        """
        self.files = files
        self.server_name = server_name
        self._contexts = Renewed(files.named, partial(client_context, files))

    def check(self) -> None:
        """Raises `ConfigError` when the files are no good."""
        self._contexts.current()

    def connect(self, connected: socket.socket, host: str, deadline: float) -> "TlsStream":
        """Makes the handshake; `connected` is used up. Raises as `TlsStream` does."""
        with ExitStack() as used_up:
            used_up.callback(connected.close)
            try:
                wrapped = self._contexts.current().wrap_socket(
                    connected, do_handshake_on_connect=False, server_hostname=self.server_name or host
                )
            except ValueError as error:
                raise ConfigError(f"{self.server_name or host!r} is no name that a certificate could be for") from error
            stream = TlsStream(wrapped)
            used_up.callback(stream.close)
            stream.shake_hands(deadline)
            used_up.pop_all()
            return stream


def client_tls(files: TlsFiles | None, server_name: str | None) -> ClientTls | None:
    """None without files. Raises `ConfigError` when they are no good: now, rather than at the first connection."""
    if files is None:
        return None
    tls = ClientTls(files, server_name)
    tls.check()
    return tls


def server_tls(files: TlsFiles | None) -> ServerTls | None:
    """None without files. Raises `ConfigError` when they are no good."""
    if files is None:
        return None
    tls = ServerTls(files)
    tls.check()
    return tls


def require_credentials(token: str | None, tls: ClientTls | None) -> None:
    """Raises `ConfigError` when a client has nothing that could say who it is, or a token that cannot be one.

    :param tls: None over a Unix socket too, where no certificate is shown.
    """
    if token is None:
        if tls is None or tls.files.certificate is None:
            raise ConfigError("the pool needs the tenant's token; only over TLS can a certificate stand for it")
    elif not token or not all("!" <= c <= "~" for c in token):
        raise ConfigError("the pool's token must be printable ASCII without spaces, and not empty")


class TlsStream:
    """`Stream` over TLS. Besides its errors: `TlsError`, and of a client `UnauthenticatedError`.

    A server's raises `WrongProtocolError` for a peer that does not speak TLS. What is sent and received after that
    goes in the clear: a refusal, in words that the peer understands.

    Timeouts are Python's here: SO_RCVTIMEO would go unnoticed inside OpenSSL. `SSLSocket.shutdown` is left alone:
    it would make the thread that is receiving take ciphertext for data.
    """

    def __init__(self, connected: ssl.SSLSocket) -> None:
        """:param connected: before its handshake; owned from now on."""
        self._socket = connected
        self._shaken = False
        """The handshake is done."""
        self._plain = False
        """The peer does not speak TLS."""
        self._timeout: float | None = -1.0
        """The timeout that the socket was set to last."""
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connected)

    def certificate_names(self) -> frozenset[str]:
        """DNS names and URIs that the peer's verified certificate is for; none without one, or before the handshake."""
        certificate: dict[str, Any] = (self._shaken and self._socket.getpeercert()) or {}
        names = certificate.get("subjectAltName", ())
        return frozenset(name for kind, name in names if kind in ("DNS", "URI"))

    def shake_hands(self, deadline: float) -> None:
        """Makes the handshake, once."""
        if self._socket.server_side:
            self._require_tls(deadline)
        self._set_timeout(_remaining_s(deadline))
        try:
            self._socket.do_handshake()
        except TimeoutError:
            raise TimeoutError("no TLS handshake in time") from None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError) as error:
            raise ConnectionResetError(
                "the peer closed the connection instead of a TLS handshake: does this port speak TLS?"
            ) from error
        except ssl.SSLError as error:
            if self._socket.server_side:
                self._let_read_why(deadline)
            raise explained(error, self._socket) from error
        self._shaken = True

    def turn_away(self) -> None:
        """Tells a client, instead of a handshake and without blocking, that there are too many."""
        socket.socket.send(self._socket, _ALERT_FULL, socket.MSG_DONTWAIT)

    def wait(self, into: memoryview) -> int:
        """Blocks, however long, until bytes come; see `Stream.wait`."""
        self._set_timeout(None)
        return self._receive(into)

    def poll(self, into: memoryview) -> int | None:
        """Receives what is there, without blocking; None when nothing is there yet, or the handshake has not been done,
        which this does not begin."""
        if not (self._shaken or self._plain):
            return None
        self._set_timeout(0.0)
        try:
            return self._receive(into)
        except (ssl.SSLWantReadError, BlockingIOError):
            return None

    def receive(self, into: Sequence[memoryview], *, fill: bool, deadline: float) -> int:
        """Receives into the buffers one after the other, by the deadline, and does the handshake first if it is not
        done."""
        if not (self._shaken or self._plain):
            self.shake_hands(deadline)
        total = 0
        for view in into:
            at = 0
            while at < len(view):
                count = self._receive_by(deadline, view[at:])
                total += count
                at += count
                if not count or not fill:
                    return total
        return total

    def send(self, views: list[memoryview], start: int, descriptors: Sequence[int] = ()) -> int:
        """Sends some of what begins at `views[start]`, record by record; 0 when the peer took nothing for a while."""
        assert not descriptors, "descriptors pass through Unix sockets only"
        total = 0
        until = MONOTONIC() + SEND_SLICE_S
        self._set_timeout(SEND_SLICE_S)
        for record in _records(piece(views, start)):
            at = 0
            while at < len(record):
                if MONOTONIC() > until:
                    return total
                try:
                    count = self._send(record[at:])
                except TimeoutError:  # OpenSSL goes on with this record, whose bytes come again with the next call
                    return total
                total += count
                at += count
        return total

    def make_few_calls(self, is_on: bool) -> None:
        """Changes nothing: pieces are a MiB, whose records OpenSSL encrypts one by one."""

    def end_sending(self) -> None:
        """Closes the sending direction without a close_notify, which nobody misses, since frames have lengths."""
        socket.socket.shutdown(self._socket, socket.SHUT_WR)

    def shut_down(self) -> None:
        """Shuts the socket down under a thread that is using it, without a close_notify. Any thread."""
        try:
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def _receive_by(self, deadline: float, into: memoryview) -> int:
        while True:
            self._set_timeout(min(_remaining_s(deadline), _RECEIVE_SLICE_S))
            try:
                return self._receive(into)
            except TimeoutError:
                continue

    def _receive(self, into: memoryview) -> int:
        if self._plain:
            return socket.socket.recv_into(self._socket, into)
        try:
            return self._socket.recv_into(into)
        except (ssl.SSLWantReadError, TimeoutError):
            raise
        except ssl.SSLError as error:
            raise explained(error, self._socket) from error

    def _send(self, data: memoryview) -> int:
        if self._plain:
            return socket.socket.send(self._socket, data)
        try:
            return self._socket.send(data)
        except TimeoutError:
            raise
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise ConnectionResetError("the peer closed the connection") from error
        except ssl.SSLError as error:
            raise explained(error, self._socket) from error

    def _require_tls(self, deadline: float) -> None:
        """Raises `WrongProtocolError` when the peer's first bytes are no TLS. They can still be received."""
        self._set_timeout(_remaining_s(deadline))
        try:
            first = socket.socket.recv(self._socket, PRELUDE_BYTES, socket.MSG_PEEK)
        except TimeoutError:
            raise TimeoutError("no TLS handshake in time") from None
        if first and first[0] != _HANDSHAKE:
            self._plain = True
            raise WrongProtocolError(first, expected="TLS")

    def _let_read_why(self, deadline: float) -> None:
        """Closing with bytes unread would reset the connection, and OpenSSL's alert might be lost with it."""
        deadline = min(deadline, MONOTONIC() + _LAST_WORDS_S)
        waste = bytearray(_RECORD_BYTES)
        try:
            self.end_sending()
            while True:
                self._set_timeout(_remaining_s(deadline))
                if not socket.socket.recv_into(self._socket, waste):
                    return
        except OSError:
            return

    def _set_timeout(self, seconds: float | None) -> None:
        if seconds != self._timeout:
            self._socket.settimeout(seconds)
            self._timeout = seconds


def _remaining_s(deadline: float) -> float:
    remaining_s = deadline - MONOTONIC()
    if remaining_s <= 0:
        raise TimeoutError("the peer did not send in time")
    return remaining_s


def _records(views: Sequence[memoryview]) -> Iterator[memoryview]:
    """Large buffers as they are, small ones joined."""
    joined = bytearray()
    for view in views:
        if joined and (len(view) >= _SMALL_BYTES or len(joined) + len(view) > _RECORD_BYTES):
            yield memoryview(joined)
            joined = bytearray()
        if len(view) >= _SMALL_BYTES:
            yield view
        else:
            joined += view
    if joined:
        yield memoryview(joined)
