"""The id of each HTTP request: in the answer, and in the lines that are logged about it."""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier.protocol.openai import REQUEST_ID
from kvtier.protocol.openai import request_id as id_of
from kvtier.system.logs import bind_log_fields


class RequestIds:
    """An ASGI application before another one, which finds the id as `request_id` in the request's state.

    The id is the one in the client's header `X-Request-Id`, or a new one. All answers, errors too, have it in the same
    header, which OpenAI's clients show as `_request_id` and `request_id`.
    """

    def __init__(self, app: ASGIApp, tenant: str | None = None) -> None:
        """:param tenant: whose requests these are."""
        self._app = app
        self._fields = {} if tenant is None else {"tenant": tenant}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's."""
        request_id = id_of(Headers(scope=scope).get(REQUEST_ID))
        scope.setdefault("state", {})["request_id"] = request_id
        host, port = scope.get("client") or ("unknown", 0)
        bind_log_fields(peer=f"{f'[{host}]' if ':' in host else host}:{port}", request_id=request_id, **self._fields)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
