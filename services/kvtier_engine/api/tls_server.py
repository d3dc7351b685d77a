"""uvicorn's server behind a `TlsListener`, which counts clients before they speak TLS; uvicorn's own does not."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial

import uvicorn

from kvtier.net.tls_listener import TlsListener


class TlsServer(uvicorn.Server):
    """Run by `run`, with its sockets. One event loop."""

    def __init__(self, config: uvicorn.Config, context: ssl.SSLContext) -> None:
        super().__init__(config)
        self._context = context
        self._listeners: list[TlsListener] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's."""
        await super().startup(sockets=[])
        make: Callable[..., asyncio.BaseProtocol] = self.config.http_protocol_class
        protocol = partial(make, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        self._listeners = [TlsListener(each, self._context, protocol) for each in sockets or ()]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's."""
        for listener in self._listeners:
            await listener.close()
        await super().shutdown(sockets)
