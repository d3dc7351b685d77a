"""All engines: found by configuration and DNS, looked at again and again."""

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from pydantic_core import from_json

from kvtier.config.gateway import DNS_PREFIX, GatewayConfig, GatewayEngineConfig
from kvtier_gateway.engines.engine import Engine
from kvtier_gateway.engines.page import is_vllm, key_form_in, loads_in, takes_tenants
from kvtier_gateway.engines.session import EngineSession
from kvtier_gateway.metrics import GatewayMetrics

_MOST_PAGE_BYTES = 16 << 20
"""What is read of one answer to a look."""
_MODELS_EVERY = 30
"""Looks between two questions for an engine's models, beside the one when it comes up."""
_OF_TLS = re.compile(r" ssl:(<[^>]*>|\w+)")
"""What aiohttp's errors show of a context of TLS, which is no news and another one after a renewal."""
_OF_A_MODEL = ("id", "object", "created", "owned_by", "max_model_len")
"""What clients see of a model: neither paths nor what an engine's operator has named besides."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Named:
    """An address of an engine, as it is configured or found."""

    url: str
    server_name: str | None


class Fleet:
    """Keeps the list of engines true. Event loop only."""

    def __init__(self, session: EngineSession, config: GatewayConfig, metrics: GatewayMetrics) -> None:
        """
        Looks at nothing yet: see `start`.

        :param session: stays the caller's.
        """
        self._session, self._config, self._metrics = session, config, metrics
        self.engines: Sequence[Engine] = ()
        """The engines that are named. Another sequence whenever one has come or gone; no sequence is ever changed."""
        self._leaving: list[Engine] = []
        """Engines that are not named any more, and had requests when that was last looked at."""
        self.on_left: Callable[[Engine], None] = _nobody
        """Hears of engines that are not named any more, or are back after they were down: what they had may be gone."""
        self._looks: dict[Engine, asyncio.Task[None]] = {}
        self._resolving: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        """Set when the configuration has changed, for `_resolve`."""

    async def start(self) -> None:
        """Finds the engines, and looks at each once."""
        await self._find()
        await asyncio.gather(*(self._look(engine, first=True) for engine in self.engines))
        self._resolving = asyncio.create_task(self._resolve())

    async def stop(self) -> None:
        """Looks at nothing any more."""
        tasks = [*self._looks.values(), *([self._resolving] if self._resolving is not None else [])]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def set(self, config: GatewayConfig) -> None:
        """These are the engines from now on; those that stay keep what they have."""
        self._config = config
        self._changed.set()

    def all_engines(self) -> list[Engine]:
        """The engines that are named, and those that are not any more and still have requests."""
        return [*self.engines, *(engine for engine in self._leaving if engine.attempts)]

    def candidates(self, tenant: str, model: str | None) -> list[Engine]:
        """Engines that may get a request of this tenant for this model."""
        return [engine for engine in self.engines if engine.may_serve(tenant, model)]

    def alike(self, tenant: str, model: str | None) -> list[Engine]:
        """Engines that tell how blocks of such a request are called: candidates, or where none of them has said so yet,
        as vLLM before its first request, others that serve the same models."""
        found = self.candidates(tenant, model)
        if any(engine.key_form is not None for engine in found):
            return found
        served = [engine.models.keys() for engine in found if engine.models]
        return [engine for engine in self.engines if engine.models and engine.models.keys() in served] or found

    def models(self, tenant: str) -> dict[str, dict[str, Any]]:
        """The models that the tenant's engines serve which are up, by name."""
        found: dict[str, dict[str, Any]] = {}
        for engine in self.engines:
            if engine.may_serve(tenant, None):
                for name, model in (engine.models or {}).items():
                    found.setdefault(name, model)
        return found

    def knows(self, tenant: str, model: str) -> bool:
        """Whether any engine of the tenant's serves this model, though it may not be up."""
        return any(
            engine.models is None or model in engine.models
            for engine in self.engines
            if engine.config.tenants is None or tenant in engine.config.tenants
        )

    async def _resolve(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.resolve_interval_s):
                    await self._changed.wait()
            self._changed.clear()
            await self._find()

    async def _find(self) -> None:
        """Makes the list of engines what configuration and DNS say now."""
        config = self._config
        found: dict[str, tuple[_Named, GatewayEngineConfig]] = {}
        addresses = await asyncio.gather(*(self._addresses(table) for table in config.engines))
        for table, of_table in zip(config.engines, addresses, strict=True):
            for named in of_table:
                found.setdefault(named.url, (named, table))
        known = {engine.url: engine for engine in self.engines}
        for url, engine in known.items():
            if url not in found:
                engine.is_removed = True
                self._leaving.append(engine)
                self.on_left(engine)
                _log.info("engine %s is not named any more; it gets no new requests", url)
        for url, (named, table) in found.items():
            if url in known:
                known[url].config = table
            else:
                engine = known[url] = Engine(url, table, named.server_name)
                self._metrics.begin_engine(url)
                self._looks[engine] = asyncio.create_task(self._keep_looking(engine))
                _log.info("engine %s is named", url)
        self.engines = [known[url] for url in found]
        self._leaving = [engine for engine in self._leaving if engine.attempts]

    async def _addresses(self, table: GatewayEngineConfig) -> Sequence[_Named]:
        if not table.url.startswith(DNS_PREFIX):
            return [_Named(table.url, None)]
        parts = urlsplit(table.url.removeprefix(DNS_PREFIX))
        assert parts.hostname is not None
        try:
            async with asyncio.timeout(self._config.probe_timeout_s):
                answers = await asyncio.get_running_loop().getaddrinfo(
                    parts.hostname, parts.port, type=socket.SOCK_STREAM, family=socket.AF_UNSPEC
                )
        except (OSError, UnicodeError) as error:  # the latter for names that no DNS could have
            reason = "no answer in time" if isinstance(error, TimeoutError) else error
            _log.warning("%s: its addresses cannot be asked for: %s; those from before stay", table.url, reason)
            return [_Named(engine.url, engine.server_name) for engine in self.engines if engine.config.url == table.url]
        hosts = dict.fromkeys(str(address[0]) for *_, address in answers)
        urls = (f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}" for host in hosts)
        return [_Named(url, parts.hostname) for url in urls]

    async def _keep_looking(self, engine: Engine) -> None:
        num_looks = 0
        while not engine.is_removed or engine.attempts:
            await self._look(engine, first=num_looks % _MODELS_EVERY == 0)
            num_looks += 1
            await asyncio.sleep(self._config.probe_interval_s)
        del self._looks[engine]
        if all(other.url != engine.url for other in self.engines):
            self._metrics.forget_engine(engine.url)

    async def _look(self, engine: Engine, *, first: bool) -> None:
        """Asks an engine how it is. Raises nothing."""
        try:
            async with asyncio.timeout(self._config.probe_timeout_s):
                await self._get(engine, "/health")
                page = await self._get(engine, "/metrics")
                engine.loads, engine.key_form = loads_in(page), key_form_in(page)
                engine.takes_tenants, engine.is_vllm = takes_tenants(page), is_vllm(page)
                engine.prices.learn(page)
                if first or not engine.is_up or engine.models is None:
                    listed = await self._get(engine, "/v1/models")
                    engine.models, engine.adapters = _models_in(listed), _adapters_in(listed)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            refuses = isinstance(error, aiohttp.ClientConnectorError)
            reason = "no answer in time" if isinstance(error, TimeoutError) else _OF_TLS.sub("", str(error))
            was_down, before = not engine.is_up, engine.problem
            engine.problem = reason
            if engine.mark_failed(1 if refuses else self._config.probe_failures) or (was_down and before is None):
                _log.warning("engine %s is down: %s; it gets no requests until it answers", engine.url, reason)
            elif was_down and before != reason:
                engine.log.warning(f"engine {engine.url} is still down, for another reason: {reason}")
        except Exception:
            _log.exception("engine %s could not be looked at", engine.url)
        else:
            if not engine.is_up:
                _log.info("engine %s is up", engine.url)
            if engine.was_down:
                engine.was_down = False
                self.on_left(engine)  # it may be another process
            engine.mark_up()
            _tell_fence(engine)

    async def _get(self, engine: Engine, path: str) -> bytes:
        async with await self._session.get(engine, path) as response:
            if response.status != 200:
                raise ValueError(f"{path} answers {response.status}")
            page = bytearray()
            async for piece in response.content.iter_any():
                page += piece
                if len(page) > _MOST_PAGE_BYTES:
                    raise ValueError(f"{path} answers more than {_MOST_PAGE_BYTES:,} bytes")
            return bytes(page)


def _tell_fence(engine: Engine) -> None:
    """Has the log say it when an engine begins or ceases to be fenced off."""
    if engine.is_fenced and not engine.was_fenced:
        _log.error(
            "engine %s gets no requests: its /metrics does not show that kvtier runs there, so tenants would share its "
            'cache; start it with kvtier, or set isolation = "cache_salt" for it in gateway.engines',
            engine.url,
        )
    elif engine.was_fenced and not engine.is_fenced:
        _log.info("engine %s keeps tenants apart, and may get requests", engine.url)
    engine.was_fenced = engine.is_fenced


def _nobody(engine: Engine) -> None:
    """Tells nobody of the engine."""


def _models_in(page: bytes) -> dict[str, dict[str, Any]]:
    """The models in an answer to `/v1/models`. Raises `ValueError` where it is none."""
    try:
        listed = [{name: each[name] for name in _OF_A_MODEL if name in each} for each in from_json(page)["data"]]
        return {str(each["id"]): each for each in listed}
    except (KeyError, TypeError) as error:
        raise ValueError("/v1/models answers what is no list of models") from error


def _adapters_in(page: bytes) -> frozenset[str]:
    """Returns the models in an answer to `/v1/models` that are made of another one."""
    return frozenset(str(each["id"]) for each in from_json(page)["data"] if each.get("parent") is not None)
