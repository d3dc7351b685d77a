"""Requests to the engine, from the event loop: submitted, read piece by piece, cancelled when nobody reads on."""

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from kvtier.errors import KvtierError
from kvtier_engine.api.http_requests import ApiError
from kvtier_engine.scheduling.completion import Completion, Logprobs, NewToken
from kvtier_engine.scheduling.engine import Engine
from kvtier_engine.scheduling.request_spans import RequestSpans
from kvtier_engine.scheduling.sampling_params import Sampling
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
    tenant: str | None = None
    """The tenant whose cache it uses; None: nobody is named."""
    adapter: str | None = None
    """The LoRA adapter that it is computed with; None: none."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What has come of one answer since the last piece of it."""

    branch: int
    text: str
    logprobs: list[tuple[int, Logprobs]]
    """The tokens that came, if log probabilities were asked for; none before there is text of theirs."""
    done: Completion | None
    """The end of the answer, with its tokens up to the one that completed a stop sequence; None before the end."""


class _Answer:
    """What one branch has come to."""

    def __init__(self, text: AnswerText) -> None:
        self.text = text
        self._logprobs: list[tuple[int, Logprobs]] = []
        """The log probabilities of tokens of which there is no text yet."""

    def feed(self, tokens: Sequence[NewToken]) -> str:
        num_before = self.text.num_tokens
        text = self.text.feed(token.token_id for token in tokens)
        counted = tokens[: self.text.num_tokens - num_before]
        self._logprobs += [(token.token_id, token.logprobs) for token in counted if token.logprobs is not None]
        return text

    def take_logprobs(self) -> list[tuple[int, Logprobs]]:
        logprobs, self._logprobs = self._logprobs, []
        return logprobs

    def whole(self, done: Completion) -> str:
        """All of it at once."""
        text = self.text.feed(done.token_ids) + self.text.finish()
        self._logprobs = list(zip(done.token_ids, done.logprobs, strict=False))[: self.text.num_tokens]
        return text


class Generation:
    """The answers to some prompts, each of which is a request to the engine. Their branches are numbered through.

    Event loop only. Close it, whatever happens: that ends the requests that are not over.
    """

    def __init__(
        self, engine: Engine, http: HttpRequest, asks: Sequence[Ask], texts: Sequence[AnswerText], *, read_along: bool
    ) -> None:
        """Submits the requests, all or none.

        :param http: its body must have been read.
        :param texts: of each branch of all of them.
        :param read_along: False reads all text at the end, which costs the engine nothing per token, and finds stop
            sequences only then.
        :raises KvtierError: what `Engine.submit` raises.
        """
        self._engine, self._read_along = engine, read_along
        self._answers = [_Answer(text) for text in texts]
        self._feed = TokenFeed(asyncio.get_running_loop())
        self._request_ids: list[int] = []
        self._branches: list[tuple[int, int]] = []
        """The request of each branch, and the branch's number within it."""
        try:
            for ask in asks:
                self._submit(ask)
        except KvtierError:
            self._cancel_all()
            raise
        self.num_open = len(texts)
        """Answers that have not ended."""
        self._gone = asyncio.create_task(_client_gone(http))
        self._gone.add_done_callback(lambda _: self._feed.interrupt())

    async def read(self) -> list[Piece]:
        """What has come since the last read, maybe nothing: of each answer at most one piece.

        :raises ClientDisconnect: the client has gone away.
        :raises ApiError: the request failed, or the engine is stopping.
        """
        try:
            await self._feed.wait()
        except asyncio.CancelledError:
            # Nothing but the end of a stop's grace period cancels handlers. The client is told while it can be.
            raise stopping() from None
        tokens, completions = self._feed.take()
        ended = {completion.branch: completion for completion in completions}
        self.num_open -= len(ended)
        if self.num_open and self._gone.done():
            raise ClientDisconnect
        by_branch: dict[int, list[NewToken]] = {branch: [] for branch in ended}
        for token in tokens:
            by_branch.setdefault(token.branch, []).append(token)
        return [await self._piece(branch, new, ended.get(branch)) for branch, new in sorted(by_branch.items())]

    def close(self) -> None:
        """Ends the request early unless it is over. Idempotent."""
        self._gone.cancel()
        if self.num_open:
            self.num_open = 0
            self._cancel_all()

    def _submit(self, ask: Ask) -> None:
        first, put, end = len(self._branches), self._feed.put, self._feed.end

        def put_later(token: NewToken) -> None:
            put(dataclasses.replace(token, branch=first + token.branch))

        def end_later(done: Completion) -> None:
            end(dataclasses.replace(done, branch=first + done.branch))

        on_token = (put_later if first else put) if self._read_along else None
        on_done = end_later if first else end
        request_id = self._engine.submit(
            ask.tokens,
            ask.sampling,
            ask.arrived_at,
            on_done,
            on_token,
            spans=ask.spans,
            tenant=ask.tenant,
            adapter=ask.adapter,
        )
        self._request_ids.append(request_id)
        self._branches += [(request_id, branch) for branch in range(ask.sampling.num_branches)]

    def _cancel_all(self) -> None:
        for request_id in self._request_ids:
            self._engine.cancel(request_id)

    async def _piece(self, branch: int, tokens: list[NewToken], done: Completion | None) -> Piece:
        answer = self._answers[branch]
        had_stopped = answer.text.stopped
        if done is None:
            text = answer.feed(tokens)
            if answer.text.stopped and not had_stopped:
                request_id, of_request = self._branches[branch]
                self._engine.cancel(request_id, "stop", of_request)
            return Piece(branch, text, answer.take_logprobs() if text else [], None)
        if self._read_along:
            text = answer.feed(tokens) + answer.text.finish()
        else:
            text = await run_in_threadpool(answer.whole, done)
        completion = _cut(done, answer.text)
        _log.debug(
            "%d prompt tokens, cached %s, %d answered (%s), the first after %.3f s",
            completion.num_prompt_tokens,
            dict(completion.cached_by_tier),
            len(completion.token_ids),
            completion.finish_reason,
            completion.ttft_s,
        )
        return Piece(branch, text, answer.take_logprobs(), completion)


def _cut(done: Completion, text: AnswerText) -> Completion:
    if text.stopped:
        kept = slice(text.num_tokens)
        return dataclasses.replace(
            done, token_ids=done.token_ids[kept], logprobs=done.logprobs[kept], finish_reason="stop"
        )
    if done.finish_reason == "cancelled":
        raise stopping()
    if done.finish_reason == "failed" and done.failure:
        raise ApiError(400, f"response_format or tools: an answer cannot be held to it: {done.failure}")
    if done.finish_reason == "failed":
        raise ApiError(500, "the engine failed while it computed the answer; send the request again later")
    return done


def stopping() -> ApiError:
    """What requests get that the engine's stop has ended."""
    return ApiError(503, "the engine is stopping", code="unavailable")


async def _client_gone(http: HttpRequest) -> None:
    """Returns when the client has closed the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
