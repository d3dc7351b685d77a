"""Gives a request to an engine, and its answer to the client, byte by byte as it comes."""

import asyncio
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from kvtier.clock import MONOTONIC
from kvtier.config.gateway import GatewayConfig
from kvtier.protocol.openai import REQUEST_ID
from kvtier_gateway.dispatching import Route
from kvtier_gateway.engines.engine import Engine
from kvtier_gateway.engines.session import EngineSession
from kvtier_gateway.http.api_errors import SERVER, ApiError, retry_after
from kvtier_gateway.http.stalls import Stalls
from kvtier_gateway.metrics import GatewayMetrics

_PASSED_ON = ("Content-Type", "Content-Encoding", "Cache-Control", "X-Accel-Buffering", "Retry-After")
"""Headers of engines' answers that clients get."""
_PART_BYTES = 1 << 15
"""What is given to a client's connection at a time, which waits once it keeps 64 KiB."""
_TRY_ANOTHER = frozenset((502, 503, 504))
"""Statuses of engines that cannot answer at the moment."""
_NO_TENANT = re.compile(rb'"param":\s*"kv_transfer_params\.kvtier\.tenant"')
"""An engine that does not serve a request's tenant answers with this. The gateway has named the tenant, no client."""
_ANSWERS = range(200, 600)
"""Statuses of answers. No client asks for others, such as 101, through a gateway."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request on its way to an engine."""

    path: str
    body: Callable[[Engine], bytes]
    """The body that this engine is to get."""
    request_id: str
    traceparent: str | None


class ClientGoneError(ConnectionError):
    """The client has closed its connection; nobody reads on."""


class EngineFailedError(Exception):
    """An engine gave no byte of an answer: another one may. `outcome` is a word for metrics."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is."""

    route: Route
    deadline: asyncio.Timeout
    """Ends waiting for the first byte of an answer."""
    begun_s: float
    """When its body was there."""


class Forwarding:
    """Event loop only."""

    def __init__(
        self,
        session: EngineSession,
        config: GatewayConfig,
        metrics: GatewayMetrics,
        stalls: Stalls,
        token: str | None,
    ) -> None:
        """
        :param session: stays the caller's.
        :param token: the bearer token for engines.
        """
        self._session, self._config, self._metrics, self._stalls = session, config, metrics, stalls
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self.is_stopping = False
        """Whether it is the gateway that gives up requests."""

    async def forward(self, request: web.BaseRequest, outgoing: Outgoing, route: Route) -> web.StreamResponse:
        """Gives the request to one engine after the other until one answers; the answer, sent.

        Raises `ApiError` where none does; nothing has been sent then.
        """
        begun_s = MONOTONIC()
        failure: EngineFailedError | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.request_timeout_s) as deadline:
                while len(route.tried) < self._config.max_attempts and (engine := route.next()) is not None:
                    try:
                        return await self._attempt(request, outgoing, engine, Progress(route, deadline, begun_s))
                    except EngineFailedError as error:
                        failure = error
                        route.ended(failed=True)
                        self._metrics.attempts.labels(engine.url, error.outcome).inc()
                        engine.request_log.warning(f"engine {engine.url} did not answer a request: {error}")
                    finally:
                        route.ended(failed=False)
            raise _nobody(failure)
        raise ApiError(504, "no engine has answered in time", code="timeout")

    async def _attempt(
        self,
        request: web.BaseRequest,
        outgoing: Outgoing,
        engine: Engine,
        progress: "Progress",
    ) -> web.StreamResponse:
        """Raises `EngineFailedError` as long as nothing has gone to the client."""
        with engine.holding() as attempt:
            answer: web.StreamResponse | None = None
            try:
                async with await self._sent(outgoing, engine) as response:
                    first = await response.content.readany()
                    if response.status in _TRY_ANOTHER or response.status not in _ANSWERS:
                        raise EngineFailedError("refused", f"it answers {response.status}")
                    if response.status == 400 and _NO_TENANT.search(first):
                        raise EngineFailedError("refused", "the request's tenant is not among its gateway_tenants")
                    progress.deadline.reschedule(None)
                    progress.route.first_token()
                    engine.note_begun(attempt)
                    self._metrics.first_byte_seconds.observe(MONOTONIC() - progress.begun_s)
                    answer = _begun(response, outgoing)
                    await self._relay(request, response, first, answer)
            except asyncio.CancelledError:
                if not attempt.is_lost or attempt.task.uncancel():
                    self._metrics.attempts.labels(engine.url, "cancelled").inc()
                    raise
                if answer is None:
                    raise EngineFailedError("hung", "it was given up") from None
                await self._break_off(request, answer, engine)
            except ClientGoneError:
                self._metrics.attempts.labels(engine.url, "cancelled").inc()
                raise
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                engine.mark_unreachable()
                raise EngineFailedError("unreachable", "it accepts no connection") from error
            except aiohttp.ClientError as error:
                if answer is None:
                    raise EngineFailedError("lost", f"the connection broke ({type(error).__name__})") from error
                await self._break_off(request, answer, engine)
            self._metrics.attempts.labels(engine.url, "answered").inc()
            return answer

    async def _sent(self, outgoing: Outgoing, engine: Engine) -> aiohttp.ClientResponse:
        headers = {**self._headers, REQUEST_ID: outgoing.request_id}
        if outgoing.traceparent is not None:
            headers["traceparent"] = outgoing.traceparent
        return await self._session.post(engine, outgoing.path, outgoing.body(engine), headers)

    async def _relay(
        self, request: web.BaseRequest, response: aiohttp.ClientResponse, first: bytes, answer: web.StreamResponse
    ) -> None:
        """Sends what comes when it comes. A client that reads slowly slows the engine's connection down, and nobody
        else."""
        content = response.content
        piece = first
        with self._stalls.watched(request) as stall:
            stall.begin()
            with _towards_client():
                await answer.prepare(request)
            while piece:
                # In parts: what the connection does not take at once, it keeps a copy of.
                for start in range(0, len(piece), _PART_BYTES):
                    stall.begin()
                    with _towards_client():
                        await answer.write(piece[start : start + _PART_BYTES])
                stall.end()
                piece = await content.readany()
            stall.begin()
            with _towards_client():
                await answer.write_eof()

    async def _break_off(self, request: web.BaseRequest, answer: web.StreamResponse, engine: Engine) -> None:
        """Ends an answer that the engine has not ended, so that the client sees that it is not whole."""
        if self.is_stopping:
            error = ApiError(503, "the gateway is stopping", code="unavailable")
        else:
            error = ApiError(502, "the engine failed before the answer was complete", code="engine_failed")
            self._metrics.broken_streams.labels(engine.url).inc()
            engine.request_log.warning(f"engine {engine.url} failed in the middle of an answer")
        if answer.content_type == "text/event-stream":
            with contextlib.suppress(ConnectionError):
                await answer.write(error.event())
                await answer.write_eof()
        elif request.transport is not None:
            request.transport.abort()


def _begun(response: aiohttp.ClientResponse, outgoing: Outgoing) -> web.StreamResponse:
    """The answer to the client, of which nothing has been sent."""
    answer = web.StreamResponse(status=response.status, headers=SERVER)
    for name in _PASSED_ON:
        value = response.headers.get(name, "")
        if value and value.isascii() and value.isprintable():
            answer.headers[name] = value
    answer.headers[REQUEST_ID] = outgoing.request_id
    if response.content_length is not None:
        answer.content_length = response.content_length
    return answer


class _towards_client:
    """A context in which a connection that breaks is the client's: aiohttp has one class of errors for both sides."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConnectionError):
            raise ClientGoneError from error


def _nobody(failure: EngineFailedError | None) -> ApiError:
    """What the client hears where no engine has answered."""
    if failure is None:
        message = "no engine can take this request at the moment"
    else:
        message = "the engines that were tried have failed"
    return ApiError(503, f"{message}; send it again later", code="unavailable", headers=retry_after(1.0))
