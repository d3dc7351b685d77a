"""Reading requests, and refusing bad ones the way OpenAI's API does."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvtier.protocol.openai import error_body, error_kind
from kvtier_engine.api.remedies import Remedies
from kvtier_engine.api.requests import MOST_PROMPTS

Body = TypeVar("Body", bound=BaseModel)

_CLIENT_CLOSED = 499
"""nginx's status for a client that went away; nobody reads it."""
_LINGER_S = 1.0
"""Seconds for which a client that is refused early may go on sending: many read an answer only then."""
_UNIONS = {
    "prompt": f"must be text or a list of token ids, or a list of 1 to {MOST_PROMPTS} of either",
    "tool_choice": 'must be "none", "auto", "required", or {"type": "function", "function": {"name": ...}}',
    "stop": "must be text or a list of at most 4 texts, each of 1 to 1024 characters",
}
"""What parameters of several types are. Errors of such name the types' places too, which no client has heard of."""


class ApiError(Exception):
    """Becomes an OpenAI-style error response. Its text says what a client can do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        remedy: str | None = None,
    ) -> None:
        """:param remedy: what the operator can do: for the log (`Remedies.tell`), never in the response."""
        super().__init__(message)
        self.status, self.remedy = status, remedy
        self.body = error_body(message, error_kind(status), param, code)


class _UnreadError(ApiError):
    """Refuses a request whose body has not been read to its end."""


async def parse_body(http: HttpRequest, kind: type[Body], most_bytes: int) -> Body:
    """The request's body.

    :raises ApiError: no JSON, too long, packed, or not what `kind` says; names the first wrong parameter.
    """
    data = await _read(http, most_bytes)
    try:
        return kind.model_validate_json(data or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = _json_path(first["loc"])
        raise ApiError(400, f"{param or 'body'}: {_explain(first)}", param=param or None) from error


def _json_path(location: Sequence[int | str]) -> str:
    """`messages[0].content`."""
    if location and location[0] in _UNIONS:
        return str(location[0])
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location if part != "[key]")
    return "".join(parts).removeprefix(".")


async def _read(http: HttpRequest, most_bytes: int) -> bytes:
    """One that no request needs is refused before it takes memory, and minutes to tokenise: where its headers say how
    long it is, before it is read."""
    too_long = _UnreadError(413, f"the body is longer than {most_bytes:,} bytes, more than one request can use here")
    if "Content-Length" in http.headers and "Transfer-Encoding" in http.headers:
        raise _UnreadError(400, "Content-Length and Transfer-Encoding contradict each other; send one of them")
    if http.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise _UnreadError(415, "Content-Encoding: send the body as it is")
    if int(http.headers.get("Content-Length", 0)) > most_bytes:
        raise too_long
    body = bytearray()
    async for piece in http.stream():
        body += piece
        if len(body) > most_bytes:
            raise too_long
    return bytes(body)


class _EarlyAnswer(JSONResponse):
    """An answer to a request that has not been read to its end; its connection is closed.

    What still comes is thrown away for a while first: a client may not hear what was sent to it before a reset.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's."""
        headers = [*self.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b""})


def _explain(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "this engine does not know this parameter; leave it out"
    if len(error["loc"]) > 1 and error["loc"][0] in _UNIONS:
        return _UNIONS[error["loc"][0]]
    message = str(error["msg"]).replace("valid dictionary", "valid object").replace("valid list", "valid array")
    return message.replace("'", '"') if error["type"] == "literal_error" else message


def _answer_api_error(remedies: Remedies) -> Callable[[HttpRequest, Exception], Awaitable[Response]]:
    async def answer(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        if error.remedy is not None:
            remedies.tell(error.remedy)
        kind = _EarlyAnswer if isinstance(error, _UnreadError) else JSONResponse
        return kind(error.body, error.status)

    return answer


async def answer_http_error(http: HttpRequest, error: Exception) -> Response:
    """No such route, or another method."""
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path}: {error.detail}"
    return JSONResponse(error_body(message, "invalid_request_error"), error.status_code, headers=error.headers)


async def answer_client_gone(http: HttpRequest, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED)


async def answer_bug(http: HttpRequest, error: Exception) -> Response:
    return JSONResponse(
        error_body("an error inside the engine; tell whoever runs it the X-Request-Id of this answer", "server_error"),
        500,
    )


def exception_handlers() -> dict[Any, Any]:
    """What the starlette of one engine does with exceptions."""
    return {
        ApiError: _answer_api_error(Remedies()),
        HTTPException: answer_http_error,
        ClientDisconnect: answer_client_gone,
        Exception: answer_bug,
    }
