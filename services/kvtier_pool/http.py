"""/healthz over HTTP for probes, /metrics for Prometheus, and /tenants with a bearer token."""

import contextlib
import dataclasses
import io
import json
import logging
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvtier.clock import MONOTONIC
from kvtier.errors import ConfigError, InvalidInputError
from kvtier.net.address import reason_of
from kvtier.net.certificates import TlsFiles
from kvtier.net.tls import ServerTls
from kvtier.net.tls_errors import explained
from kvtier.net.wrong_protocol import http_refusal

_log = logging.getLogger(__name__)

_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
Answers = Callable[[str, str, str | None, str], tuple[int, dict[str, Any]]]
"""Gives status and JSON for method, path, `Authorization` and peer of a request."""
Pages = Callable[[str | None, str], tuple[int, str, bytes]]
"""Gives status, content type and text for `Authorization` and peer of a request."""
Strangers = Callable[[str, Exception], None]
"""Hears of a peer, and why it was refused."""
_REQUEST_TIMEOUT_S = 10.0
"""How long a peer may take for its handshake, for its request as a whole, and to take the answer."""
_TLS = b"\x16"
"""What a peer begins with that wants TLS."""
_MAX_REQUEST_BYTES = 16 << 10
"""What is read of a request. `http.server` would read 6 MB of headers, and make objects of them all."""
_PAUSE_S = 0.1
"""Seconds to pause after an `accept` that failed, most often for want of descriptors."""
_MAX_CONNECTIONS = 64
"""The most open connections. One more cuts the oldest: a stranger that holds many must not hide a probe."""


def _no_tenants(method: str, path: str, authorization: str | None, peer: str) -> tuple[int, dict[str, Any]]:
    return 404, {"error": "there are no tenants here"}


def _nothing(peer: str, error: Exception) -> None:
    """Tells nobody of the failure."""


class StatusServer:
    """Answers `GET /healthz` (200 and `ok`, or 503 with the reason), `GET /metrics`, and what is below `/tenants`, each
    on a thread of its own; HEAD as GET, without the text."""

    def __init__(  # noqa: PLR0913 - what it answers, path by path
        self,
        listen: str,
        metrics: Pages,
        problem: Callable[[], str | None],
        degraded: Callable[[], list[str]],
        files: TlsFiles | None = None,
        tenants: Answers = _no_tenants,
        on_stranger: Strangers = _nothing,
    ) -> None:
        """
        :param listen: `host:port` or `[v6]:port`; port 0: a free one. Bound at once: `ConfigError` when it cannot be.
        :param metrics: answers `/metrics`, by `Authorization` and peer; called from any thread.
        :param problem: None while it serves; called from any thread.
        :param degraded: what works less well than it should while it serves: lines below the `ok`; called from any
            thread.
        :param tenants: answers what is below `/tenants`, by method, path, `Authorization` and peer; called from any
            thread.
        :param on_stranger: told of a peer, `host:port`, that was refused before it could ask, and why; called from any
            thread.
        :param files: HTTPS instead. Nobody is asked for a certificate: probes have none.
        """
        tls: ServerTls | None = None
        if files is not None:
            tls = ServerTls(dataclasses.replace(files, ca=None))
            tls.check()

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_TIMEOUT_S

            def setup(self) -> None:
                """`socketserver`'s; reads the request before anything is made of it."""
                super().setup()
                with self.rfile as arriving:
                    self.rfile = io.BytesIO(_received(arriving, self.connection))

            def do_GET(self) -> None:
                if self.path == "/healthz":
                    self._answer(*_health(problem(), degraded))
                elif self.path == "/metrics":
                    self._answer(*metrics(*_asker(self)))
                elif self.path.startswith("/tenants"):
                    self._answer_tenants()
                else:
                    self._answer(404, _TEXT, b"try /healthz or /metrics\n")

            do_HEAD = do_GET

            def do_POST(self) -> None:
                self._answer_tenants()

            def _answer_tenants(self) -> None:
                code, answer = tenants(self.command, self.path, *_asker(self))
                self._answer(code, _JSON, json.dumps(answer).encode() + b"\n")

            def log_message(self, format: str, *args: object) -> None:
                """Probes come every few seconds: nothing worth a line."""

            def _answer(self, code: int, content_type: str, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body if self.command != "HEAD" else b"")

        host, _, port = listen.rpartition(":")
        try:
            self._server = _Server((host.removeprefix("[").removesuffix("]"), int(port)), Handler, tls, on_stranger)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"pool_service.http_listen: cannot listen on {listen!r}: {reason_of(error)}; use host:port with a free "
                "port (--http-listen)"
            ) from error
        self._thread = threading.Thread(target=self._serve, name="kvtier-http", daemon=True)
        self.address = f"{host}:{self._server.server_address[1]}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stops listening. Only after `start`."""
        self._server.stopping.set()
        self._server.socket.shutdown(socket.SHUT_RDWR)  # ends the wait for a connection
        self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        """Serves without `serve_forever`, which wakes up ten times a second to see whether to stop."""
        while not self._server.stopping.is_set():
            self._server.handle_request()


def _health(problem: str | None, degraded: Callable[[], list[str]]) -> tuple[int, str, bytes]:
    lines = [problem] if problem else ["ok", *degraded()]
    return 503 if problem else 200, _TEXT, "".join(f"{line}\n" for line in lines).encode()


def _asker(request: BaseHTTPRequestHandler) -> tuple[str | None, str]:
    """The `Authorization` of a request, and who has sent it."""
    return request.headers.get("Authorization"), _peer(request.client_address)


def _peer(client_address: Any) -> str:
    """What the logs call the peer at an address as sockets have it."""
    host, port = client_address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _received(arriving: io.BufferedIOBase, connection: socket.socket) -> bytes:
    """The lines of a request up to an empty one, as far as they come in time; no more than is read of a request.

    Raises `TimeoutError`: they took too long, all in all.
    """
    deadline = MONOTONIC() + _REQUEST_TIMEOUT_S
    lines = bytearray()
    while len(lines) < _MAX_REQUEST_BYTES and b"\n\r\n" not in lines and b"\n\n" not in lines:
        left_s = deadline - MONOTONIC()
        if left_s <= 0:
            raise TimeoutError("a request did not come in time")
        connection.settimeout(left_s)
        part = arriving.read1(_MAX_REQUEST_BYTES - len(lines))
        if not part:
            break
        lines += part
    connection.settimeout(_REQUEST_TIMEOUT_S)
    return bytes(lines)


class _Server(ThreadingHTTPServer):
    """A thread per connection, which makes the TLS handshake as well."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
        tls: ServerTls | None,
        on_stranger: Strangers,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.stopping = threading.Event()
        self._tls = tls
        self._on_stranger = on_stranger
        self._lock = threading.Lock()
        self._open: dict[Any, socket.socket] = {}
        """Open connections by the client's address, oldest first. Guarded by _lock."""
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """`socketserver`'s; on the listening thread, which would try again at once."""
        try:
            return super().get_request()
        except OSError:
            self.stopping.wait(_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """`socketserver`'s; on the listening thread."""
        with self._lock:
            if len(self._open) >= _MAX_CONNECTIONS:
                oldest = self._open.pop(next(iter(self._open)))
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(oldest, socket.SHUT_RDWR)
            self._open[client_address] = request
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """`socketserver`'s; on the connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(client_address, None)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """`socketserver`'s; on the connection's thread."""
        request.settimeout(_REQUEST_TIMEOUT_S)
        first = request.recv(1, socket.MSG_PEEK)
        if first and (first == _TLS) != (self._tls is not None):
            spoken, wanted = ("TLS", "HTTP") if self._tls is None else ("no TLS", "HTTPS")
            self._on_stranger(
                _peer(client_address), InvalidInputError(f"{spoken} at the pool's HTTP port, which speaks {wanted}")
            )
            request.sendall(http_refusal(f"this port speaks {wanted}"))
        elif self._tls is None:
            super().finish_request(request, client_address)
        else:
            self._finish_encrypted(request, client_address, self._tls)

    def _finish_encrypted(self, request: socket.socket, client_address: Any, tls: ServerTls) -> None:
        with tls.wrap(request) as encrypted:
            with self._lock:
                if client_address in self._open:
                    self._open[client_address] = encrypted
            try:
                encrypted.do_handshake()
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                raise  # a probe that asks no more than whether somebody listens
            except ssl.SSLError as error:
                self._on_stranger(_peer(client_address), explained(error, encrypted))
                return
            super().finish_request(encrypted, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """`socketserver`'s would print a traceback for every probe that gives up."""
        if isinstance(sys.exc_info()[1], OSError):
            _log.debug("an HTTP connection failed", exc_info=True)
        else:
            _log.exception("an HTTP request failed")
