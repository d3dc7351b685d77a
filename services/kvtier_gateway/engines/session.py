"""What requests to engines go over: HTTP, with TLS by the CAs of the moment."""

import ssl
import threading
from collections.abc import Mapping
from functools import partial

import aiohttp

from kvtier.net.certificates import Renewed, TlsFiles, client_context
from kvtier_gateway.engines.engine import Engine


class EngineSession:
    """A session of aiohttp that knows engines, and raises what that raises. Event loop only.

    A thread of its own looks after the files, as a file system that hangs must not hold up requests.
    """

    def __init__(self, session: aiohttp.ClientSession, files: TlsFiles | None = None, look_s: float = 1.0) -> None:
        """Raises `ConfigError` when the files are no good.

        :param session: stays the caller's; has no deadline of its own but for connecting.
        :param files: with the CAs of engines' certificates, read again when they have changed; None: the system's CAs.
        :param look_s: seconds between two looks whether the files have changed.
        """
        self._session = session
        self._tls: ssl.SSLContext | bool = True
        """What connections are made with; those of another context go on, and get no more requests."""
        self._closed = threading.Event()
        if files is not None:
            contexts = Renewed(files.named, partial(client_context, files))
            self._tls = contexts.current()
            look = partial(self._look, contexts, look_s)
            threading.Thread(target=look, name="kvtier-engine-cas", daemon=True).start()

    def close(self) -> None:
        """Looks at no file any more; waits for nothing. The session of aiohttp stays open."""
        self._closed.set()

    async def get(self, engine: Engine, path: str) -> aiohttp.ClientResponse:
        """Asks an engine for a page."""
        return await self._session.get(engine.url + path, server_hostname=engine.server_name, ssl=self._tls)

    async def post(self, engine: Engine, path: str, data: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """Sends an engine a request."""
        return await self._session.post(
            engine.url + path,
            data=data,
            headers=headers,
            server_hostname=engine.server_name,
            allow_redirects=False,
            ssl=self._tls,
        )

    def _look(self, contexts: Renewed[ssl.SSLContext], every_s: float) -> None:
        """The thread that looks after the files."""
        while not self._closed.wait(every_s):
            self._tls = contexts.current()
