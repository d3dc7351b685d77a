"""The HTTP side: starlette in a thread of its own, beside the engine's. The only place with asyncio."""

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvtier.clock import MONOTONIC
from kvtier.errors import ClosedError, InvalidInputError, LimitExceededError
from kvtier_engine.api import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    chat_response,
    completion_response,
    error_body,
)
from kvtier_engine.engine import Engine
from kvtier_engine.request import Completion, Sampling
from kvtier_engine.tokenizer import ChatTokenizer

Body = TypeVar("Body", bound=BaseModel)
Respond = Callable[[str, str, str, Completion], dict[str, Any]]

_BODY_BYTES_PER_TOKEN = 64
_BODY_BYTES_BESIDES = 64 * 1024
"""Together the longest body that is read: tokens take about 5 bytes, escaped and rare ones some ten."""
_CLIENT_CLOSED = 499
"""nginx's status for a client that went away; nobody reads it."""


class ApiError(Exception):
    """Becomes an OpenAI-style error response."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = error_body(message, kind, param, code)


class Server:
    """The endpoints of one engine and one model. Handlers run in the event loop; tokenisation in a thread."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        *,
        model_name: str,
        eos_token_ids: tuple[int, ...],
        registry: CollectorRegistry,
    ) -> None:
        """:param registry: what `/metrics` exports. The engine stays the caller's, who starts and closes it."""
        self._engine, self._tokenizer, self._registry = engine, tokenizer, registry
        self._model_name, self._eos_token_ids = model_name, eos_token_ids
        self._most_body_bytes = _BODY_BYTES_PER_TOKEN * engine.limits.max_total_tokens + _BODY_BYTES_BESIDES

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            exception_handlers={ApiError: _answer_api_error, HTTPException: _answer_http_error, Exception: _answer_bug},
        )

    async def _completions(self, http: HttpRequest) -> Response:
        arrived_at = MONOTONIC()
        body = await _parse(http, CompletionBody, self._most_body_bytes)
        if isinstance(body.prompt, str):
            tokens = (await run_in_threadpool(self._tokenizer.encode, body.prompt)).tolist()
        else:
            tokens = body.prompt
        max_tokens = body.max_tokens or DEFAULT_COMPLETION_TOKENS
        return await self._answer(http, body, tokens, max_tokens, arrived_at, completion_response)

    async def _chat(self, http: HttpRequest) -> Response:
        arrived_at = MONOTONIC()
        body = await _parse(http, ChatBody, self._most_body_bytes)
        messages = [message.model_dump() for message in body.messages]
        try:
            tokens = (await run_in_threadpool(self._tokenizer.encode_chat, messages)).tolist()
        except InvalidInputError as error:
            raise ApiError(400, str(error), param="messages") from error
        room = max(1, self._engine.limits.max_total_tokens - len(tokens))
        max_tokens = body.max_completion_tokens or body.max_tokens or room
        return await self._answer(http, body, tokens, max_tokens, arrived_at, chat_response)

    async def _answer(
        self,
        http: HttpRequest,
        body: CompletionBody | ChatBody,
        tokens: list[int],
        max_tokens: int,
        arrived_at: float,
        respond: Respond,
    ) -> Response:
        if body.model not in (None, self._model_name):
            message = f"there is no model {body.model!r} here, only {self._model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        sampling = Sampling(
            max_tokens=max_tokens,
            temperature=body.temperature,
            seed=body.seed,
            eos_token_ids=self._eos_token_ids,
        )
        done = await self._generate(http, tokens, sampling, arrived_at)
        if done is None:
            return Response(status_code=_CLIENT_CLOSED)
        text = await run_in_threadpool(self._tokenizer.decode, done.token_ids)
        response = respond(uuid.uuid4().hex, self._model_name, text, done)
        if body.return_prompt_token_ids:
            response["kvtier"]["prompt_token_ids"] = tokens
        return JSONResponse(response)

    async def _generate(
        self, http: HttpRequest, tokens: list[int], sampling: Sampling, arrived_at: float
    ) -> Completion | None:
        """None when the client went away, which cancels the request."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Completion] = loop.create_future()

        def finish(completion: Completion) -> None:
            # The loop may be closed already when a long step ends after the grace period of a stop: nobody waits then.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(done.set_result, completion)

        request_id = self._submit(tokens, sampling, arrived_at, finish)
        gone = asyncio.create_task(_client_gone(http))
        try:
            await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # Nothing but the end of a stop's grace period cancels handlers. The client is told while it can be.
            raise _stopping() from None
        finally:
            gone.cancel()
            if not done.done():
                self._engine.cancel(request_id)
        if not done.done():
            return None
        completion = done.result()
        if completion.finish_reason == "cancelled":
            raise _stopping()
        if completion.finish_reason == "failed":
            raise ApiError(500, "the engine failed while it computed the answer; see its log")
        return completion

    def _submit(
        self, tokens: list[int], sampling: Sampling, arrived_at: float, finish: Callable[[Completion], None]
    ) -> int:
        try:
            return self._engine.submit(tokens, sampling, arrived_at, finish)
        except LimitExceededError as error:
            raise ApiError(400, str(error), code="context_length_exceeded") from error
        except InvalidInputError as error:
            raise ApiError(400, str(error), param="prompt") from error
        except ClosedError as error:
            raise ApiError(503, str(error), code="unavailable") from error

    async def _models(self, http: HttpRequest) -> Response:
        model = {"id": self._model_name, "object": "model", "created": 0, "owned_by": "kvtier"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self, http: HttpRequest) -> Response:
        healthy = self._engine.healthy
        return JSONResponse({"status": "ok" if healthy else "failed"}, 200 if healthy else 503)

    async def _metrics(self, http: HttpRequest) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


async def _client_gone(http: HttpRequest) -> None:
    """Returns when the client has closed the connection. The body must have been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _stopping() -> ApiError:
    return ApiError(503, "the engine is stopping", code="unavailable")


async def _parse(http: HttpRequest, kind: type[Body], most_bytes: int) -> Body:
    try:
        return kind.model_validate_json(await _read(http, most_bytes))
    except ValidationError as error:
        first = error.errors()[0]
        # A union's errors name its members too, which no client has heard of.
        param = "prompt" if "prompt" in first["loc"] else ".".join(str(part) for part in first["loc"])
        message = f"{param or 'body'}: {_explain(first)}"
        raise ApiError(400, message, param=param or None) from error


async def _read(http: HttpRequest, most_bytes: int) -> bytes:
    """The body. One that no request needs is refused before it takes memory, and minutes to tokenise."""
    body = bytearray()
    async for piece in http.stream():  # to its end: clients that are still sending do not hear an answer
        if len(body) <= most_bytes:
            body += piece
    if len(body) > most_bytes:
        raise ApiError(413, f"the body is longer than {most_bytes:,} bytes, more than one request can use here")
    return bytes(body)


def _explain(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "this engine does not know this parameter; leave it out"
    if error["type"] == "literal_error" and error["loc"] == ("stream",):
        return "answers are not streamed; leave it out or set it to false"
    if error["loc"][:1] == ("prompt",) and len(error["loc"]) > 1:
        return "must be text or a list of token ids"
    return str(error["msg"])


async def _answer_api_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status)


async def _answer_http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path}: {error.detail}"
    return JSONResponse(error_body(message, "invalid_request_error"), error.status_code, headers=error.headers)


async def _answer_bug(http: HttpRequest, error: Exception) -> Response:
    return JSONResponse(error_body("an error inside the server; see its log", "server_error"), 500)
