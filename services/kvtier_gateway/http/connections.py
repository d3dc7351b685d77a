"""How many clients may be connected, and what the server says to those who do not speak HTTP."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from kvtier.net.serving_tls import note_without_tls
from kvtier.system.quiet_log import QuietLog
from kvtier_gateway.http.api_errors import ApiError

MOST_HEADER_BYTES, MOST_HEADERS = 8190, 64
"""The bytes of one header line, and how many lines there may be."""
_READ_BYTES = 1 << 16
"""What is read ahead of a client's body."""
_IDLE_S = 60.0
"""Seconds that a connection may take for the headers of a request, or be without one."""
BACKLOG = 1024
"""Clients that wait to be accepted."""

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
_log = logging.getLogger(__name__)


class _Connection(RequestHandler):
    """One connection of a client. Errors in its HTTP are answered as all others are."""

    __slots__ = ("_may_be_tls",)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """aiohttp's, for what it could not read, and for bugs of ours. Neither headers nor bodies are logged."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        if status >= 500:
            _log.error("a request failed inside the gateway", exc_info=exc)
            answer = ApiError(status, "an error inside the gateway; see its log").answer()
        else:
            answer = ApiError(status, "this is no request in HTTP that the gateway can read").answer()
        answer.force_close()
        return answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        super().connection_made(transport)
        self._may_be_tls = transport.get_extra_info("sslcontext") is None

    def data_received(self, data: bytes) -> None:
        """asyncio's."""
        if self._may_be_tls:
            self._may_be_tls = False
            note_without_tls(data)
        super().data_received(data)

    @property
    def is_idle(self) -> bool:
        """Whether no request of it is being answered."""
        return not self._request_in_progress

    def cut(self) -> None:
        """Closes it at once."""
        self.force_close()


class BoundedServer(web.Server):
    """aiohttp's server of one handler, with a bound on connections: beyond it, one more cuts the connection that has
    been idle for the longest time, or is cut itself where all have a request. Event loop only."""

    def __init__(self, handler: Handler, max_connections: int) -> None:
        """:param handler: is cancelled when its client goes away."""
        super().__init__(self._answered, handler_cancellation=True)
        self._handler = handler
        self._max_connections = max_connections
        self._warn = QuietLog(_log)
        self._open: dict[_Connection, None] = {}
        """Open connections in the order in which they came, or ended their last request."""

    def __call__(self) -> RequestHandler:
        """asyncio's factory of protocols."""
        return _Connection(
            self,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=_IDLE_S,
            access_log=None,  # type: ignore[arg-type] # aiohttp takes it for none
            logger=_quiet,
            max_line_size=MOST_HEADER_BYTES,
            max_field_size=MOST_HEADER_BYTES,
            max_headers=MOST_HEADERS,
            read_bufsize=_READ_BYTES,
            auto_decompress=False,  # a small body must not become a large one
            lingering_time=1.0,
        )

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """aiohttp's."""
        super().connection_made(handler, transport)
        assert isinstance(handler, _Connection)
        self._open[handler] = None
        if len(self._open) > self._max_connections:
            idle = next((each for each in self._open if each.is_idle), handler)
            self._warn.warning(f"{self._max_connections} clients are connected: idle ones are cut, or new ones refused")
            self._forget(idle)
            idle.cut()

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        """aiohttp's."""
        super().connection_lost(handler, exc)
        self._forget(handler)

    async def _answered(self, request: web.BaseRequest) -> web.StreamResponse:
        """Has the handler answer. A connection that had a request just now is cut after the others."""
        try:
            return await self._handler(request)
        finally:
            connection = request.protocol
            if connection in self._open:
                del self._open[connection]
                self._open[connection] = None

    @property
    def num_busy(self) -> int:
        """How many of them have a request."""
        return sum(not each.is_idle for each in self._open)

    def cut_idle(self) -> None:
        """Closes all connections that have no request."""
        for connection in [each for each in self._open if each.is_idle]:
            connection.cut()

    def _forget(self, handler: Any) -> None:
        self._open.pop(handler, None)


_quiet = logging.getLogger(f"{__name__}.aiohttp")
_quiet.setLevel(logging.CRITICAL + 1)
"""aiohttp's own lines about requests would have their headers and paths."""
