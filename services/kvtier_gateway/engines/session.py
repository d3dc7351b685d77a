"""What requests to engines go over: HTTP, with TLS by the CAs of the moment."""

import ssl
from collections.abc import Mapping
from functools import partial

import aiohttp

from kvtier.net.certificates import Renewed, TlsFiles, client_context
from kvtier_gateway.engines.engine import Engine


class EngineSession:
    """A session of aiohttp that knows engines, and raises what that raises. Event loop only."""

    def __init__(self, session: aiohttp.ClientSession, files: TlsFiles | None = None) -> None:
        """Raises `ConfigError` when the files are no good.

        :param session: stays the caller's; has no deadline of its own but for connecting.
        :param files: with the CAs of engines' certificates, read again when they have changed; None: the system's CAs.
        """
        self._session = session
        self._contexts = None if files is None else Renewed(files.named, partial(client_context, files))
        self._tls()

    async def get(self, engine: Engine, path: str) -> aiohttp.ClientResponse:
        """Asks an engine for a page."""
        return await self._session.get(engine.url + path, server_hostname=engine.server_name, ssl=self._tls())

    async def post(self, engine: Engine, path: str, data: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """Sends an engine a request."""
        return await self._session.post(
            engine.url + path,
            data=data,
            headers=headers,
            server_hostname=engine.server_name,
            allow_redirects=False,
            ssl=self._tls(),
        )

    def _tls(self) -> ssl.SSLContext | bool:
        """What connections are made with; those of another context go on, and get no more requests."""
        return True if self._contexts is None else self._contexts.current()
