"""The HTTP side: starlette in a thread of its own, beside the engine's. The only place with asyncio."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvtier.clock import MONOTONIC, WALL
from kvtier.errors import ClosedError, ConfigError, InvalidInputError, LimitExceededError
from kvtier.system.tracing import tracing
from kvtier_engine.api.answers import AnswerFormat
from kvtier_engine.api.api_keys import ApiKeys
from kvtier_engine.api.event_stream import EventStream
from kvtier_engine.api.generation import Ask, Generation, Piece, stopping
from kvtier_engine.api.http_requests import ApiError, exception_handlers, parse_body
from kvtier_engine.api.request_ids import RequestIds
from kvtier_engine.api.request_tenants import RequestTenants
from kvtier_engine.api.requests import DEFAULT_COMPLETION_TOKENS, ChatBody, CompletionBody, ResetBody, SamplingBody
from kvtier_engine.api.tool_answers import ToolAnswer
from kvtier_engine.scheduling.beam_search import BeamSettings
from kvtier_engine.scheduling.completion import Completion
from kvtier_engine.scheduling.engine import Engine
from kvtier_engine.scheduling.request_spans import RequestSpans
from kvtier_engine.scheduling.sampling_params import Constraint, Sampling
from kvtier_engine.text.answer_text import AnswerText
from kvtier_engine.text.tokenizer import ChatTokenizer

_BODY_BYTES_PER_TOKEN = 64
_BODY_BYTES_BESIDES = 64 * 1024
"""Together the longest body that is read: tokens take about 5 bytes, escaped and rare ones some ten."""


class Server:
    """The endpoints of one engine and one model. Handlers run in the event loop; tokenisation in a thread.

    Without API keys nobody is asked who they are: whoever reaches the port may use the engine, and reset its cache.
    Only web pages may not reset it: they reach the loopback address of whoever looks at them.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        *,
        model_names: Sequence[str],
        eos_token_ids: tuple[int, ...],
        registry: CollectorRegistry,
        tenants: RequestTenants | None = None,
    ) -> None:
        """
        The engine stays the caller's, which starts and closes it.

        :param model_names: the model's, and then those of its LoRA adapters, which requests name as the model.
        :param registry: what `/metrics` exports.
        :param tenants: whose requests these are. None: of nobody who has a name.
        """
        self._tenants = tenants or RequestTenants()
        self._engine, self._tokenizer, self._registry = engine, tokenizer, registry
        self._model_names, self._eos_token_ids = model_names, eos_token_ids
        self._grammars = tokenizer.grammars(engine.limits.vocab_size, eos_token_ids)
        self._most_body_bytes = _BODY_BYTES_PER_TOKEN * engine.limits.max_total_tokens + _BODY_BYTES_BESIDES

    def app(self) -> ASGIApp:
        """The ASGI application."""
        app = Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/cache/reset", self._reset_cache, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._one_model),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            exception_handlers=exception_handlers(),
        )
        app.router.redirect_slashes = False  # a redirect is no answer of OpenAI's; clients that post do not follow it
        keys = self._tenants.api_keys
        return RequestIds(ApiKeys(app, keys, WALL) if keys else app, self._tenants.only)

    async def _completions(self, http: HttpRequest) -> Response:
        arrived_at, spans = MONOTONIC(), self._spans_of(http)
        body = await parse_body(http, CompletionBody, self._most_body_bytes)
        self._check(body)
        tenant = self._tenants.of_request(http, body)
        sampling = await self._sampling(body, body.max_tokens or DEFAULT_COMPLETION_TOKENS)
        asks = []
        for index, prompt in enumerate(body.prompts):
            tokens: Sequence[int] = (
                (await run_in_threadpool(self._tokenizer.encode, prompt)).tolist()
                if isinstance(prompt, str)
                else prompt
            )
            spans = self._spans_of(http) if index else spans  # each is traced as a request of its own
            asks.append(self._ask(body, tokens, sampling, arrived_at, spans, tenant))
        return await self._answer(http, body, asks)

    async def _chat(self, http: HttpRequest) -> Response:
        arrived_at, spans = MONOTONIC(), self._spans_of(http)
        body = await parse_body(http, ChatBody, self._most_body_bytes)
        self._check(body)
        tenant = self._tenants.of_request(http, body)
        tools = [tool.model_dump(exclude_unset=True) for tool in body.offered_tools]
        if tools and self._tokenizer.call_style is None:
            raise ApiError(
                400,
                "tools: this engine does not read the calls that its model writes; leave them out",
                param="tools",
                remedy="for tools, serve a model whose chat template has <tool_call>, or is Llama 3's",
            )
        messages = [message.for_template() for message in body.messages]
        try:
            tokens = (await run_in_threadpool(self._tokenizer.encode_chat, messages, tools)).tolist()
        except InvalidInputError as error:
            raise ApiError(400, str(error), param="messages") from error
        room = max(1, self._engine.limits.max_total_tokens - len(tokens))
        sampling = await self._sampling(body, body.max_completion_tokens or body.max_tokens or room)
        return await self._answer(http, body, [self._ask(body, tokens, sampling, arrived_at, spans, tenant)])

    def _ask(
        self,
        body: SamplingBody,
        tokens: Sequence[int],
        sampling: Sampling,
        arrived_at: float,
        spans: RequestSpans | None,
        tenant: str | None,
    ) -> Ask:
        adapter = body.model if body.model in self._model_names[1:] else None
        return Ask(tokens=tokens, sampling=sampling, arrived_at=arrived_at, spans=spans, tenant=tenant, adapter=adapter)

    def _spans_of(self, http: HttpRequest) -> RequestSpans | None:
        """None: the request is not traced."""
        tenant = self._tenants.of_connection(http)
        return RequestSpans.begin(http.headers.get("traceparent"), tenant) if tracing.is_on else None

    def _check(self, body: SamplingBody) -> None:
        """What can be refused before anything is tokenised."""
        self._check_model(body.model)
        if not self._engine.serves(body.tenant):
            param = "kv_transfer_params.kvtier.tenant"
            raise ApiError(400, f"{param}: {body.tenant!r} is no tenant of this engine", param=param)
        conflict, remedy = body.conflict(), None
        most = self._engine.max_branches
        if conflict is None and body.num_branches > most:
            param = "n" if body.num_choices == body.num_branches else "best_of"
            conflict = param, f"this engine computes up to {most} answers at once; ask for fewer"
            remedy = "for more answers to one prompt, raise engine.max_running"
        vocab_size = self._engine.limits.vocab_size
        if conflict is None and max(body.logit_bias or {}, default=0) >= vocab_size:
            conflict = "logit_bias", f"token ids must be from 0 to {vocab_size - 1}"
        if conflict is not None:
            raise ApiError(400, ": ".join(conflict), param=conflict[0], remedy=remedy)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._model_names:
            message = f"there is no model {name!r} here, only {', '.join(map(repr, self._model_names))}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _constraint(self, body: SamplingBody) -> Constraint | None:
        grammar = body.grammar(self._tokenizer.call_style) if isinstance(body, ChatBody) else None
        if not isinstance(body, ChatBody) or grammar is None:
            return None
        param = "tools" if body.response_format is None or body.response_format.type == "text" else "response_format"
        try:
            return await run_in_threadpool(self._grammars.compile, grammar)
        except InvalidInputError as error:
            raise ApiError(400, f"{param}: {error}", param=param) from error
        except ConfigError as error:
            message = (
                f"{param}: this engine holds no answers to schemas; leave out response_format, strict, and a "
                "tool_choice that requires a call"
            )
            raise ApiError(400, message, param=param, remedy=str(error)) from error

    async def _sampling(self, body: SamplingBody, max_tokens: int) -> Sampling:
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=body.seed,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            logit_bias=tuple((body.logit_bias or {}).items()),
            eos_token_ids=self._eos_token_ids,
            num_branches=body.num_branches,
            constraint=await self._constraint(body),
            beams=_beams(body),
            num_top=body.num_top
            if body.num_top is not None or body.use_beam_search or body.num_branches == body.num_choices
            else 0,
        )

    async def _answer(self, http: HttpRequest, body: ChatBody | CompletionBody, asks: Sequence[Ask]) -> Response:
        answer = AnswerFormat(
            chat=isinstance(body, ChatBody),
            request_id=http.state.request_id,
            model=body.model or self._model_names[0],
            prompts=[ask.tokens for ask in asks],
            show_prompts=bool(body.return_prompt_token_ids),
            usage_chunk=body.wants_usage_chunk,
            num_choices=body.num_choices * len(asks),
            spelling=None if body.num_top is None else self._tokenizer,
            tools=self._tool_answers(body),
        )
        generation = self._generate(http, body, asks)
        if body.stream:
            return EventStream(generation, answer)
        answers = await _read_all(generation)
        chosen: list[Piece] = []
        completions: list[list[Completion]] = []
        for first in range(0, len(answers), body.num_branches):
            of_prompt = answers[first : first + body.num_branches]
            completions.append([piece.done for piece in of_prompt if piece.done is not None])
            best = of_prompt if body.use_beam_search else _likeliest(of_prompt, body.num_choices)
            chosen += best[: body.num_choices]
        return JSONResponse(answer.whole(chosen, completions))

    def _tool_answers(self, body: ChatBody | CompletionBody) -> Callable[[], ToolAnswer] | None:
        style = self._tokenizer.call_style
        if not isinstance(body, ChatBody) or not body.offered_tools or style is None:
            return None
        return partial(ToolAnswer, style, body.most_calls)

    def _generate(self, http: HttpRequest, body: ChatBody | CompletionBody, asks: Sequence[Ask]) -> Generation:
        stop = body.stop_sequences
        num_branches = sum(ask.sampling.num_branches for ask in asks)
        texts = [AnswerText(self._tokenizer.detokenizer(), stop) for _ in range(num_branches)]
        prompt = "messages" if isinstance(body, ChatBody) else "prompt"
        try:
            return Generation(
                self._engine, http, asks, texts, read_along=bool(body.stream or stop) and not body.use_beam_search
            )
        except LimitExceededError as error:
            remedy = None if self._engine.limits.model_is_the_limit else "for longer requests, raise engine.kv_bytes"
            raise ApiError(400, str(error), param=prompt, code="context_length_exceeded", remedy=remedy) from error
        except InvalidInputError as error:
            raise ApiError(400, str(error), param=prompt) from error
        except ClosedError as error:
            raise _unavailable(error) from error

    async def _reset_cache(self, http: HttpRequest) -> Response:
        await parse_body(http, ResetBody, self._most_body_bytes)
        if "origin" in http.headers:  # browsers add it to every POST of a page, and no page can leave it out
            raise ApiError(403, "web pages may not reset the cache: send the request without an Origin header")
        if self._tenants.have_keys_of_several:
            raise ApiError(403, "this engine has several tenants, and none of them may reset the others' cache")
        done: Future[int | None] = Future()
        try:
            self._engine.reset_cache(done.set_result)
            num_blocks = await asyncio.shield(asyncio.wrap_future(done))
        except ClosedError as error:
            raise _unavailable(error) from error
        except asyncio.CancelledError:
            raise stopping() from None
        if num_blocks is None:
            raise stopping()
        return JSONResponse({"object": "cache.reset", "scope": "engine", "forgotten_blocks": {"device": num_blocks}})

    async def _models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [_model(name) for name in self._model_names]})

    async def _one_model(self, http: HttpRequest) -> Response:
        self._check_model(http.path_params["model"])
        return JSONResponse(_model(http.path_params["model"]))

    async def _health(self, http: HttpRequest) -> Response:
        healthy = self._engine.healthy
        return JSONResponse({"status": "ok" if healthy else "failed"}, 200 if healthy else 503)

    async def _metrics(self, http: HttpRequest) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "kvtier"}


async def _read_all(generation: Generation) -> list[Piece]:
    """The answers, whole, by index."""
    pieces: list[Piece] = []
    with contextlib.closing(generation):
        while generation.num_open:
            pieces += await generation.read()
    whole = []
    for branch in sorted({piece.branch for piece in pieces}):
        of_branch = [piece for piece in pieces if piece.branch == branch]
        text = "".join(piece.text for piece in of_branch)
        logprobs = [each for piece in of_branch for each in piece.logprobs]
        whole.append(Piece(branch, text, logprobs, of_branch[-1].done))
    return whole


def _beams(body: SamplingBody) -> BeamSettings | None:
    if not body.use_beam_search:
        return None
    return BeamSettings(
        width=body.num_branches,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=bool(body.early_stopping),
    )


def _likeliest(answers: list[Piece], num_choices: int) -> list[Piece]:
    """The answers of the highest log probability per token, the likeliest first; all in order if none is left out."""
    if len(answers) == num_choices:
        return answers

    def mean(piece: Piece) -> float:
        of_tokens = [logprobs.of_token for _, logprobs in piece.logprobs]
        return sum(of_tokens) / len(of_tokens)

    return sorted(answers, key=mean, reverse=True)[:num_choices]


def _unavailable(error: ClosedError) -> ApiError:
    return ApiError(503, str(error), code="unavailable")
