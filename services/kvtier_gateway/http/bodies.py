"""The body of a request: read within bounds, rid of what clients may not set, and written anew for an engine.

What an engine gets is never a client's bytes but JSON that the gateway has written from what it has read itself: of
two equal names, of unusual numbers and encodings, both have the same idea.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import HttpVersion11, web
from pydantic_core import from_json, to_json

from kvtier.config.gateway import ApiKeyConfig
from kvtier_gateway.http.api_errors import ApiError, retry_after
from kvtier_gateway.http.parameters import OWN, TEXT_PARTS
from kvtier_gateway.http.stalls import Stall

Json = dict[str, Any]
_PLAIN = {"Content-Encoding": "identity", "Transfer-Encoding": "chunked"}
"""Headers that say how a body is packed, and what they say of one that is not."""


class BodyRoom:
    """How many bytes of bodies are held at a time, of all tenants and of each. Event loop only."""

    def __init__(self, most_bytes: int) -> None:
        """:param most_bytes: of all; of one tenant half of it at most."""
        self._most_bytes = most_bytes
        self._held: dict[str, int] = {}

    @contextmanager
    def held(self, tenant: str) -> Iterator["Holding"]:
        """What one request holds; it is given back at the end."""
        holding = Holding(self, tenant)
        try:
            yield holding
        finally:
            left = self._held.get(tenant, 0) - holding.nbytes
            if left > 0:
                self._held[tenant] = left
            else:
                self._held.pop(tenant, None)

    def take(self, tenant: str, nbytes: int) -> None:
        """Raises `ApiError` where there is no more room."""
        of_tenant = self._held.get(tenant, 0) + nbytes
        if of_tenant > self._most_bytes // 2 or sum(self._held.values()) + nbytes > self._most_bytes:
            raise ApiError(
                429, "too many large requests are under way; send them again later", headers=retry_after(1.0)
            )
        self._held[tenant] = of_tenant


class Holding:
    """The bytes that one request holds."""

    def __init__(self, room: BodyRoom, tenant: str) -> None:
        self._room, self._tenant = room, tenant
        self.nbytes = 0

    def take(self, nbytes: int) -> None:
        """Holds so many more. Raises `ApiError` where there is no room."""
        self._room.take(self._tenant, nbytes)
        self.nbytes += nbytes


async def read_body(request: web.BaseRequest, most_bytes: int, holding: Holding, stall: Stall) -> bytes:
    """All of the body.

    Raises `ApiError` for one that is too long, packed, or not sent to its end."""
    for name, plain in _PLAIN.items():
        if any(value.lower() != plain for value in request.headers.getall(name, ())):
            raise ApiError(415, f"{name}: send the body as it is")
    length = request.content_length
    if length is not None and length > most_bytes:
        raise _too_long(most_bytes)
    await _let_it_come(request)
    pieces: list[bytes] = []
    while True:
        stall.begin()
        try:
            piece = await request.content.readany()
        except web.RequestPayloadError as error:
            raise ApiError(400, "the body does not end as its headers say") from error
        if not piece:
            break
        holding.take(len(piece))
        if holding.nbytes > most_bytes:
            raise _too_long(most_bytes)
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def _let_it_come(request: web.BaseRequest) -> None:
    """Tells a client to send its body that waits for this. Raises `ApiError` where it expects something else."""
    expected = request.headers.get("Expect")
    if expected is None or request.version < HttpVersion11:
        return
    if expected.lower() != "100-continue":
        raise ApiError(417, "Expect: only 100-continue can be expected of this gateway")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the answer has not begun


def parse(body: bytes) -> Json:
    """The object that the body is. Raises `ApiError` where it is none."""
    try:
        found = from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        # The error's own text may quote the body, but for the place.
        place = str(error).rpartition(" at ")[2]
        raise ApiError(400, f"the body is no JSON that the gateway reads: at {place}") from error
    if not isinstance(found, dict):
        raise ApiError(400, "the body must be a JSON object")
    return found


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A request without what its client may not set."""

    fields: Json
    kvtier: Json
    """What goes into `kv_transfer_params.kvtier` beside the tenant."""
    stripped: tuple[str, ...]
    """The names of what was taken out."""

    @property
    def model(self) -> str | None:
        """The name of the model that is asked for."""
        return self.fields.get("model")

    @property
    def num_answers(self) -> int:
        """How many sequences an engine computes for it. What is no number or no prompt counts as one: engines refuse
        that."""
        prompt = self.fields.get("prompt")
        num_prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        of_each = [self.fields.get(name) for name in ("n", "best_of")]
        return num_prompts * max([1, *(num for num in of_each if isinstance(num, int))])

    def for_engine(self, isolation: str, tenant: str) -> bytes:
        """The body for an engine, which says whose it is as this engine wants to hear it."""
        own: Json = {"cache_salt": tenant}
        if isolation == "tenant":
            own = {"kv_transfer_params": {"kvtier": {"tenant": tenant, **self.kvtier}}}
        return to_json({**self.fields, **own}, inf_nan_mode="strings")


def clean(body: Json, allowed: Collection[str], key: ApiKeyConfig, *, media: bool) -> Cleaned:
    """Takes out what clients may not set. Changes `body`.

    Raises `ApiError` for parameters that are neither known nor allowed, and for messages with parts that may not be.
    """
    kept: Json = {}
    stripped: list[str] = []
    unknown = None
    for name, value in body.items():
        if name in OWN and name not in allowed:
            stripped.append(name)
        elif name in allowed:
            kept[name] = value
        else:
            unknown = unknown or name
    if unknown is not None:
        shown = unknown[:64]
        raise ApiError(
            400,
            f"{shown}: this gateway does not pass this parameter on; leave it out",
            param=shown,
            code="unknown_parameter",
        )
    if endless := next((name for name, value in kept.items() if _is_infinite(value)), None):
        raise ApiError(400, f"{endless}: the number is too large", param=endless)
    if not isinstance(kept.get("model", ""), str):
        raise ApiError(400, "model: must be text", param="model")
    for place, message in enumerate(_list_of(kept.get("messages"))):
        parts = message.get("content") if isinstance(message, dict) else None
        for part in _list_of(parts):
            if not isinstance(part, dict) or part.get("type") in TEXT_PARTS:
                continue
            if not media:
                raise ApiError(
                    400,
                    "this gateway takes messages of text only",
                    param=f"messages[{place}].content",
                    code="unsupported_content",
                )
            if _without(part, "uuid"):
                stripped.append("uuid")
    return Cleaned(kept, _of_clients(body.get("kv_transfer_params"), key), tuple(dict.fromkeys(stripped)))


def _of_clients(params: Any, key: ApiKeyConfig) -> Json:
    """What a client may say about its own request's KV."""
    said = params.get("kvtier") if isinstance(params, Mapping) else None
    if not isinstance(said, Mapping):
        return {}
    names: Iterable[str] = ("no_store", "pin", "ttl_s") if key.may_pin else ("no_store",)
    values = {name: said.get(name) for name in names}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, bool | int | float) and not _is_infinite(value)
    }


def _is_infinite(value: Any) -> bool:
    """Whether it is a number such as 1e999, which no JSON that is written anew could say."""
    return isinstance(value, float) and math.isinf(value)


def _list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _without(value: Any, name: str) -> bool:
    """Takes the name out of an object and of all that are in it; whether it was there."""
    if isinstance(value, dict):
        found = value.pop(name, None) is not None
        below: Iterable[Any] = value.values()
    else:
        found, below = False, _list_of(value)
    for each in below:
        found |= _without(each, name)
    return found


def _too_long(most_bytes: int) -> ApiError:
    return ApiError(413, f"the body is longer than {most_bytes:,} bytes, the most that this gateway takes")
