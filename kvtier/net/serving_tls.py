"""TLS of the HTTP servers of an event loop: files that are renewed, and words for clients that do not speak it."""

import logging
import ssl
from functools import partial
from typing import Any

from kvtier.net.certificates import Renewed, TlsFiles, server_context
from kvtier.net.tls_errors import explained
from kvtier.net.wrong_protocol import http_refusal
from kvtier.system.quiet_log import QuietLog

_TLS_BEGINS = b"\x16\x03"
"""The first bytes that a client which speaks TLS sends."""
_strangers = QuietLog(logging.getLogger(__name__))


def serving_context(files: TlsFiles) -> ssl.SSLContext:
    """Makes a server's context in which each handshake takes the files of its time.

    A client that asks in the clear hears that HTTPS is spoken here, and the log tells of handshakes that fail. Raises
    `ConfigError` when the files are no good.
    """
    contexts = Renewed(files.named, partial(server_context, files, kind=_Context))
    first = contexts.current()

    def take_newest(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = contexts.current()

    first.sni_callback = take_newest
    return first


def note_without_tls(data: bytes) -> None:
    """Has the log say it when the first bytes of a client are TLS, at a port of HTTP."""
    if data.startswith(_TLS_BEGINS):
        _strangers.warning("a client speaks TLS to a port of HTTP: have it ask http://, or set tls_certificate here")


class _Connection(ssl.SSLObject):
    """One side of a handshake, as asyncio and uvloop drive it. One thread."""

    outgoing: ssl.MemoryBIO
    """What is put there is sent."""
    has_answered = False

    def do_handshake(self) -> None:
        """`ssl`'s."""
        if self.has_answered:
            raise ssl.SSLError("what came after an answer in the clear")
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLEOFError):
            raise
        except ssl.SSLError as error:
            _strangers.warning(f"a client made no TLS connection: {explained(error, self)}")
            if error.reason != "HTTP_REQUEST":
                raise
            self.has_answered = True
            self.outgoing.read()
            self.outgoing.write(http_refusal("this port speaks HTTPS: ask https://"))
            raise ssl.SSLWantReadError from error  # upon which the answer is sent; the next call ends the connection


class _Context(ssl.SSLContext):
    sslobject_class = _Connection

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> ssl.SSLObject:
        """`ssl`'s."""
        connection = super().wrap_bio(incoming, outgoing, *args, **options)
        assert isinstance(connection, _Connection)
        connection.outgoing = outgoing
        return connection
