"""Errors as OpenAI's API tells them."""

from collections.abc import Mapping

from aiohttp import web
from pydantic_core import to_json

from kvtier.protocol.openai import error_body, error_kind

SERVER = {"Server": "kvtier"}
"""The header in place of the names and releases that aiohttp tells."""


class ApiError(Exception):
    """Becomes an answer with OpenAI's error object. What its text says goes to the client: no secret, no body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, "rate_limit_error" if status == 429 else error_kind(status), param, code)
        self.headers = dict(headers or {})

    def answer(self) -> web.Response:
        """The answer to the client."""
        return web.Response(
            status=self.status, body=to_json(self.body), content_type="application/json", headers=SERVER | self.headers
        )

    def event(self) -> bytes:
        """The answer as an event of a stream that has begun."""
        return b"data: " + to_json(self.body) + b"\n\n"


def retry_after(seconds: float) -> dict[str, str]:
    """The header that says when to come again; whole seconds, at least one."""
    return {"Retry-After": str(max(1, int(-(-seconds // 1))))}
