"""/healthz and /metrics over plain HTTP, for probes and Prometheus. No tenant's data, so no credentials."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from kvtier.errors import ConfigError

_TEXT = "text/plain; charset=utf-8"
_REQUEST_TIMEOUT_S = 10.0


class StatusServer:
    """Answers `GET /healthz` (200, or 503 with the reason) and `GET /metrics`, each on a thread of its own."""

    def __init__(self, listen: str, registry: CollectorRegistry, problem: Callable[[], str | None]) -> None:
        """
        :param listen: `host:port`; port 0 takes a free one. Bound at once: `ConfigError` when it cannot be.
        :param problem: None while all is well; called from any thread.
        """

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_TIMEOUT_S

            def do_GET(self) -> None:
                if self.path == "/healthz":
                    reason = problem()
                    self._answer(503 if reason else 200, _TEXT, f"{reason or 'ok'}\n".encode())
                elif self.path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
                else:
                    self._answer(404, _TEXT, b"try /healthz or /metrics\n")

            def log_message(self, format: str, *args: object) -> None:
                """Probes come every few seconds: nothing worth a line."""

            def _answer(self, code: int, content_type: str, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        host, _, port = listen.rpartition(":")
        try:
            self._server = ThreadingHTTPServer((host, int(port)), Handler)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"cannot listen on http {listen!r}: {error}; use host:port with a free port") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvtier-http", daemon=True)
        self.address = f"{host}:{self._server.server_address[1]}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stops listening. Only after `start`."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
