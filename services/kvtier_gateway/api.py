"""The API that clients see: who asks, what for, and which engine gets it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from aiohttp import web
from pydantic_core import to_json

from kvtier.clock import MONOTONIC
from kvtier.config.gateway import ApiKeyConfig, GatewayConfig
from kvtier.protocol.openai import REQUEST_ID, request_id
from kvtier.system.logs import bind_log_fields
from kvtier_gateway.dispatching import Dispatching
from kvtier_gateway.engines.engine import Engine
from kvtier_gateway.engines.fleet import Fleet
from kvtier_gateway.forwarding import Forwarding, Outgoing
from kvtier_gateway.http.api_errors import SERVER, ApiError, retry_after
from kvtier_gateway.http.bodies import BodyRoom, clean, parse, read_body
from kvtier_gateway.http.parameters import CHAT, COMPLETIONS
from kvtier_gateway.http.stalls import Stalls
from kvtier_gateway.keying.prompts import Asked, Prompts
from kvtier_gateway.keys import ApiKeys, Client
from kvtier_gateway.metrics import GatewayMetrics
from kvtier_gateway.routing.values import Key

_FORWARDED = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETIONS}
"""The paths of engines that clients reach, and the parameters that go there."""
_MODELS = "/v1/models"
_CLIENT_CLOSED = "499"


@dataclass(frozen=True, slots=True)
class _Caller:
    """The client of a request."""

    rights: ApiKeyConfig
    """The rights that its key had when its headers came."""
    identity: str
    """The id of the request."""
    count_answers: Callable[[int], None]
    """Counts the answers that it asks for; see `Client.admitted`."""


class Api:
    """Answers clients. Event loop only."""

    def __init__(  # noqa: PLR0913 - the parts that it is put together from
        self,
        config: GatewayConfig,
        keys: ApiKeys,
        fleet: Fleet,
        prompts: Prompts,
        dispatching: Dispatching,
        forwarding: Forwarding,
        stalls: Stalls,
        metrics: GatewayMetrics,
    ) -> None:
        self._config, self._keys, self._fleet = config, keys, fleet
        self._prompts, self._dispatching, self._forwarding = prompts, dispatching, forwarding
        self._stalls, self._metrics = stalls, metrics
        self._room = BodyRoom(int(config.max_bodies_bytes))
        extra = frozenset(config.pass_parameters)
        self._allowed = {path: known | extra for path, known in _FORWARDED.items()}
        self.is_stopping = False
        """Set once the gateway takes no new requests."""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers one request. Raises nothing but what ends a connection."""
        path = request.raw_path.partition("?")[0]
        if path == "/healthz":
            return self.health()
        identity = request_id(request.headers.get(REQUEST_ID))
        client: Client | None = None
        rights: ApiKeyConfig | None = None  # for all of the request, whatever a reload says meanwhile
        status = _CLIENT_CLOSED
        try:
            if self.is_stopping:
                raise _stopping()
            client = self._keys.client_of(request.headers.getall("Authorization", []))
            rights = client.table
            bind_log_fields(tenant=rights.tenant, request_id=identity)
            with client.admitted() as count_answers:
                answer = await self._answer_client(request, path, _Caller(rights, identity, count_answers))
            status = str(answer.status)
            return answer
        except ApiError as error:
            status = str(error.status)
            code = error.body["error"]["code"] or status
            self._metrics.refusals.labels(client.name if client is not None else "", code).inc()
            refusal = error.answer()
            refusal.headers[REQUEST_ID] = identity
            if self.is_stopping:
                refusal.force_close()
            return refusal
        finally:
            if rights is not None:
                self._metrics.requests.labels(rights.tenant, status).inc()

    def health(self) -> web.Response:
        """200 while requests can be answered."""
        if self.is_stopping:
            return web.Response(status=503, text="stopping\n", headers=SERVER)
        if not any(engine.is_usable for engine in self._fleet.engines):
            return web.Response(status=503, text="no engine can be used\n", headers=SERVER)
        return web.Response(text="ok\n", headers=SERVER)

    async def _answer_client(self, request: web.BaseRequest, path: str, caller: "_Caller") -> web.StreamResponse:
        allowed = self._allowed.get(path)
        if allowed is not None:
            if request.method != "POST":
                raise _wrong_method(request, "POST")
            return await self._forward(request, path, allowed, caller)
        if path == _MODELS or path.startswith(f"{_MODELS}/"):
            if request.method != "GET":
                raise _wrong_method(request, "GET")
            return self._models(caller.rights.tenant, path, caller.identity)
        raise ApiError(404, f"{request.method} {path[:200]}: there is no such route here")

    async def _forward(
        self, request: web.BaseRequest, path: str, allowed: Collection[str], caller: "_Caller"
    ) -> web.StreamResponse:
        rights = caller.rights
        with self._room.held(rights.tenant) as holding:
            with self._stalls.watched(request) as stall:
                body = await read_body(request, int(self._config.max_body_bytes), holding, stall)
            read_s = MONOTONIC()
            cleaned = clean(parse(body), allowed, rights, media=self._config.media)
            del body
            for name in cleaned.stripped:
                self._metrics.stripped.labels(name).inc()
            caller.count_answers(cleaned.num_answers)
            self._check_model(rights.tenant, cleaned.model)
            session = request.headers.get(self._config.session_header)
            bodies: dict[str, bytes] = {}

            def body_for(engine: Engine) -> bytes:
                isolation = engine.config.isolation
                if isolation not in bodies:
                    bodies[isolation] = cleaned.for_engine(isolation, rights.tenant)
                return bodies[isolation]

            alike = self._fleet.alike(rights.tenant, cleaned.model)

            def meanwhile(keys: Sequence[Key]) -> None:
                self._dispatching.expect(keys, alike)
                for engine in alike[:1]:
                    body_for(engine)

            asked = Asked(cleaned.fields, holding.nbytes, rights.tenant, session)
            prompt = await self._prompts.read(asked, self._dispatching.strategy.reads, alike, meanwhile)
            outgoing = Outgoing(path, body_for, caller.identity, request.headers.get("traceparent"))
            self._metrics.own_seconds.observe(MONOTONIC() - read_s)
            return await self._forwarding.forward(request, outgoing, self._dispatching.route(prompt, cleaned.model))

    def _check_model(self, tenant: str, model: str | None) -> None:
        if model is not None and not self._fleet.knows(tenant, model):
            message = f"there is no model {model[:200]!r} here"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _models(self, tenant: str, path: str, identity: str) -> web.Response:
        models = self._fleet.models(tenant)
        if path == _MODELS:
            return _json({"object": "list", "data": list(models.values())}, identity)
        name = unquote(path.removeprefix(f"{_MODELS}/"))
        if name not in models:
            raise ApiError(404, f"there is no model {name[:200]!r} here", param="model", code="model_not_found")
        return _json(models[name], identity)


def _json(value: Any, identity: str) -> web.Response:
    return web.Response(body=to_json(value), content_type="application/json", headers={**SERVER, REQUEST_ID: identity})


def _wrong_method(request: web.BaseRequest, allowed: str) -> ApiError:
    return ApiError(405, f"{request.method[:20]}: this route takes {allowed} only", headers={"Allow": allowed})


def _stopping() -> ApiError:
    return ApiError(503, "the gateway is stopping; send it again", code="unavailable", headers=retry_after(1.0))
