"""Keeps web pages from an engine on a loopback address: who asks must call it by a name of this machine.

A page that somebody on this machine looks at may have its browser send requests here. By its own name, once that name
leads to 127.0.0.1 (DNS rebinding), it could read the answers as well. The browser says who asks: a page cannot change
`Host`, which is the name that it used, nor `Origin`, which is where it came from.
"""

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvtier.net.address import is_loopback
from kvtier.protocol.openai import error_body
from kvtier_engine.api.remedies import Remedies


class KnownHosts:
    """An ASGI application before another one: answers requests with 403 whose `Host` or `Origin` is neither a loopback
    name nor one of those that are allowed. Requests without these headers pass: browsers always send them."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        """:param allowed: names beside the loopback ones, without a port, in any case."""
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed)
        self._remedies = Remedies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's."""
        headers = Headers(scope=scope)
        for name in ("host", "origin"):
            for value in headers.getlist(name):
                if not self._knows(value if name == "origin" else f"//{value}"):
                    self._remedies.tell("name the hosts by which a proxy calls it in engine.allowed_hosts")
                    await _refusal(name.capitalize(), value)(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _knows(self, url: str) -> bool:
        try:
            host = urlsplit(url).hostname or ""
        except ValueError:
            return False
        return host in self._allowed or host.endswith(".localhost") or is_loopback(host)


def _refusal(header: str, value: str) -> JSONResponse:
    message = (
        f"{header}: {value!r} is no name of an engine that listens on a loopback address; call it localhost or by its "
        "address"
    )
    return JSONResponse(error_body(message, "invalid_request_error"), 403)
