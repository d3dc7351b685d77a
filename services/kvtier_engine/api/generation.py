"""One request to the engine, from the event loop: submitted, read piece by piece, cancelled when nobody reads on."""

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from kvtier_engine.api.http_requests import ApiError
from kvtier_engine.scheduling.engine import Engine
from kvtier_engine.scheduling.request import Completion, Sampling
from kvtier_engine.scheduling.request_spans import RequestSpans
from kvtier_engine.scheduling.token_feed import TokenFeed
from kvtier_engine.text.answer_text import AnswerText

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What the engine is asked."""

    tokens: Sequence[int]
    sampling: Sampling
    arrived_at: float
    spans: RequestSpans | None
    """None: the request is not traced."""


class Generation:
    """Event loop only. Close it, whatever happens: that ends the request if it is not over."""

    def __init__(self, engine: Engine, http: HttpRequest, ask: Ask, text: AnswerText, *, read_along: bool) -> None:
        """Submits the request.

        :param http: its body must have been read.
        :param read_along: False reads all text at the end, which costs the engine nothing per token. Then `text` must
            have no stop sequence.
        :raises KvtierError: what `Engine.submit` raises.
        """
        self._engine, self._text, self._read_along = engine, text, read_along
        self._feed = TokenFeed(asyncio.get_running_loop())
        on_token = self._feed.put if read_along else None
        self._request_id = engine.submit(
            ask.tokens, ask.sampling, ask.arrived_at, self._feed.end, on_token, spans=ask.spans
        )
        self._over = False
        """Whether the engine has been told to end the request, or has ended it."""
        self._gone = asyncio.create_task(_client_gone(http))
        self._gone.add_done_callback(lambda _: self._feed.interrupt())

    async def read(self) -> tuple[str, Completion | None]:
        """The text that has come since the last read, maybe none; at the end, the completion.

        The completion holds the tokens up to the one that completed a stop sequence.

        :raises ClientDisconnect: the client has gone away.
        :raises ApiError: the request failed, or the engine is stopping.
        """
        try:
            await self._feed.wait()
        except asyncio.CancelledError:
            # Nothing but the end of a stop's grace period cancels handlers. The client is told while it can be.
            raise stopping() from None
        tokens, done = self._feed.take()
        if done is None:
            if self._gone.done():
                raise ClientDisconnect
            text = self._text.feed(tokens)
            if self._text.stopped:
                self._end("stop")
            return text, None
        self._over = True
        if self._read_along:
            text = self._text.feed(tokens) + self._text.finish()
        else:
            text = await run_in_threadpool(lambda: self._text.feed(done.token_ids) + self._text.finish())
        completion = self._cut(done)
        _log.debug(
            "%d prompt tokens, cached %s, %d answered (%s), the first after %.3f s",
            completion.num_prompt_tokens,
            dict(completion.cached_by_tier),
            len(completion.token_ids),
            completion.finish_reason,
            completion.ttft_s,
        )
        return text, completion

    def close(self) -> None:
        """Ends the request early unless it is over. Idempotent."""
        self._gone.cancel()
        self._end("cancelled")

    def _end(self, reason: Literal["stop", "cancelled"]) -> None:
        if not self._over:
            self._over = True
            self._engine.cancel(self._request_id, reason)

    def _cut(self, done: Completion) -> Completion:
        if self._text.stopped:
            return dataclasses.replace(done, token_ids=done.token_ids[: self._text.num_tokens], finish_reason="stop")
        if done.finish_reason == "cancelled":
            raise stopping()
        if done.finish_reason == "failed":
            raise ApiError(500, "the engine failed while it computed the answer; see its log")
        return done


def stopping() -> ApiError:
    """What requests get that the engine's stop has ended."""
    return ApiError(503, "the engine is stopping", code="unavailable")


async def _client_gone(http: HttpRequest) -> None:
    """Returns when the client has closed the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
