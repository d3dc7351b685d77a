"""What the gateway adds to a request, beside parsing it, hashing its blocks and looking their keys up."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import uvloop
from prometheus_client import CollectorRegistry
from pydantic_core import from_json, to_json

from kvtier.config import Config, parse_config
from kvtier.config.gateway import ApiKeyConfig, GatewayEngineConfig
from kvtier.identity.keys import BlockKey, NamespaceId, rank_keys
from kvtier.testing.blocks import summed
from kvtier_bench.measuring.report import Case
from kvtier_bench.measuring.rounds import Samples, percentile
from kvtier_bench.processes.pool_process import PoolProcess, pool_process
from kvtier_engine.demo.demo_model import demo_model_path
from kvtier_engine.model.model_folder import DEFAULT_CACHE_DIR, open_model
from kvtier_gateway.dispatching import Dispatching, Route
from kvtier_gateway.engines.engine import Engine, KeyForm
from kvtier_gateway.engines.fleet import Fleet
from kvtier_gateway.engines.session import EngineSession
from kvtier_gateway.http.bodies import clean, parse
from kvtier_gateway.http.parameters import CHAT
from kvtier_gateway.keying.pool import PoolLookup
from kvtier_gateway.keying.prompts import Asked, Prompts
from kvtier_gateway.keying.tenants import TenantHashers, short_keys
from kvtier_gateway.keying.tokenising import PromptTokens
from kvtier_gateway.metrics import GatewayMetrics
from kvtier_gateway.routing.registry import make_strategy
from kvtier_gateway.routing.values import BlocksStored, EngineId, Key, Medium

FLOOR = "parse, hash, look up"
_TOKENS_PER_BLOCK = 16
_NAMESPACE = NamespaceId(bytes(16))
_NUM_ENGINES = 8
_MANY_ENGINES = 128
_BLOCK_BYTES = 64
_WORDS_OF_TURN = 40


class _Rig:
    """What a gateway has for one tenant."""

    def __init__(self, folder: Path, pool: PoolProcess, strategy: str, stack: ExitStack) -> None:
        models = Path(os.environ.get("KVTIER__ENGINE__MODEL_CACHE_DIR", DEFAULT_CACHE_DIR))
        model = open_model(demo_model_path(), models)
        config = _config(pool, folder)
        self.tokens = PromptTokens(model.weight_files[0].parent, 256 << 20)
        self.hashers = TenantHashers(config)
        metrics = GatewayMetrics(CollectorRegistry())
        lookup = PoolLookup(config, metrics, 10.0)
        stack.callback(lookup.close)
        self.prompts = Prompts(self.tokens, self.hashers, lookup)
        stack.callback(self.prompts.close)
        self._begun = partial(_begun, config, metrics, strategy)
        self.tier = pool.tier("unix", stack, only=False)
        self.key = ApiKeyConfig(tenant=pool.tenant)
        self.tenant = pool.tenant

    def begin(self, session: EngineSession, num_engines: int, keys: Sequence[BlockKey]) -> None:
        """Has so many engines that are up, each with a price of its own and with another part of these blocks. Before
        `ours`."""
        self._fleet, self._dispatching = self._begun(session, num_engines)
        told = short_keys(keys)
        for number, engine in enumerate(self._fleet.engines):
            part = told[: len(told) * (number % 4) // 4]
            self._dispatching.strategy.kv_event(EngineId(engine.url), BlocksStored(part, Medium.DEVICE))

    async def ours(self, body: bytes) -> Route:
        """Everything between a body and its way to an engine."""
        cleaned = clean(parse(body), CHAT, self.key, media=False)
        alike = self._fleet.alike(self.tenant, cleaned.model)
        bodies: list[bytes] = []

        def meanwhile(keys: Sequence[Key]) -> None:  # as the gateway does
            self._dispatching.expect(keys, alike)
            bodies.append(cleaned.for_engine(alike[0].config.isolation, self.tenant))

        reads = self._dispatching.strategy.reads
        asked = Asked(cleaned.fields, len(body), self.tenant)
        prompt = await self.prompts.read(asked, reads, alike, meanwhile)
        assert prompt.num_in_pool, "the pool has this prompt"
        route = self._dispatching.route(prompt, cleaned.model)
        assert route.next() is not None, "all engines are up"
        assert bodies, "all engines get the same body"
        return route

    def floor(self, body: bytes, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        """What cannot be left out."""
        from_json(body)
        hasher = self.hashers.of(self.tenant, _TOKENS_PER_BLOCK)
        assert hasher is not None
        self.tier.lookup(rank_keys(hasher.hash_blocks(tokens), _NAMESPACE))


def _begun(
    config: Config, metrics: GatewayMetrics, strategy: str, session: EngineSession, num_engines: int
) -> tuple[Fleet, Dispatching]:
    fleet = Fleet(session, config.gateway, metrics)
    form = KeyForm(_TOKENS_PER_BLOCK, frozenset([_NAMESPACE]))
    tables = [GatewayEngineConfig(url=f"http://127.0.0.1:{8000 + i}") for i in range(num_engines)]
    models: dict[str, dict[str, str]] = {"model": {}}
    fleet.engines = [Engine(table.url, table, is_up=True, key_form=form, models=models) for table in tables]
    for number, engine in enumerate(fleet.engines):
        engine.prices.token_s, engine.prices.pool_bytes_per_s = 1e-4 + 1e-7 * number, 2e9 + 1e6 * number
    return fleet, Dispatching(make_strategy(strategy), fleet, metrics)


def added_cases(folder: Path, strategy: str, calls: int) -> list[Case]:
    """Measures with 64 and with 8,192 keys, and with 64 keys before many engines; ours and the floor in turn."""
    cases = []
    with ExitStack() as stack:
        pool = stack.enter_context(pool_process(folder, 256 << 20))
        for num_keys, num_engines in ((64, _NUM_ENGINES), (64, _MANY_ENGINES), (8192, _NUM_ENGINES)):
            # What it has belongs to one event loop.
            cases += _measured(_Rig(folder, pool, strategy, stack), num_keys, num_engines, calls)
    return cases


def _measured(rig: _Rig, num_keys: int, num_engines: int, calls: int) -> list[Case]:
    bodies = _conversation(rig, num_keys, calls)
    tokens = rig.tokens.of_request(from_json(bodies[0]))
    assert tokens is not None
    hasher = rig.hashers.of(rig.tenant, _TOKENS_PER_BLOCK)
    assert hasher is not None
    payload = memoryview(bytearray(_BLOCK_BYTES))
    keys = hasher.hash_blocks(tokens)
    rig.tier.write([summed(key, payload) for key in rank_keys(keys, _NAMESPACE)])
    ours, floor = Samples(), Samples()

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            rig.begin(EngineSession(session), num_engines, keys)
            for body in bodies[1:]:
                _time(floor, lambda body=body: rig.floor(body, tokens))  # type: ignore[misc]
                begun_s = time.perf_counter()
                route = await rig.ours(body)
                _note(ours, time.perf_counter() - begun_s)
                route.first_token()
                route.ended(failed=False)

    uvloop.run(run())  # as the gateway does
    name = f"{num_keys:,} keys, {num_engines} engines"
    return [
        Case.of(FLOOR, name, floor, unit="request"),
        Case.of("gateway", name, ours, floor=(FLOOR, floor), unit="request", detail=_detail(ours, floor)),
    ]


def _detail(ours: Samples, floor: Samples) -> str:
    ratio = percentile(ours.calls_s, 99) / percentile(floor.calls_s, 99)
    added_ms = (percentile(ours.calls_s, 50) - percentile(floor.calls_s, 50)) * 1e3
    return f"{ratio:.2f} times the floor at p99; {added_ms:.2f} ms more in the median"


def _time(samples: Samples, run: Callable[[], object]) -> None:
    begun_s = time.perf_counter()
    run()
    _note(samples, time.perf_counter() - begun_s)


def _note(samples: Samples, seconds: float) -> None:
    samples.calls_s.append(seconds)
    samples.rounds_s.append(seconds)


def _conversation(rig: _Rig, num_keys: int, calls: int) -> list[bytes]:
    """Requests of one conversation of so many blocks, whose last message differs."""
    source = np.random.default_rng(0)

    def message(number: int) -> dict[str, str]:
        words = " ".join(map(str, source.integers(0, 10_000, _WORDS_OF_TURN)))
        return {"role": ("user", "assistant")[number % 2], "content": words}

    of_turn = rig.tokens.of_request({"messages": [message(0)]})
    assert of_turn is not None
    num_turns = max(1, num_keys * _TOKENS_PER_BLOCK // len(of_turn))
    messages = [message(number) for number in range(num_turns)]
    lasts = [f"And now, for the {i}th time: what follows from all of this? " for i in range(calls + 1)]
    return [to_json({"messages": [*messages, {"role": "user", "content": last}], "stream": True}) for last in lasts]


def _config(pool: PoolProcess, folder: Path) -> Config:
    data = {
        "tenants": {pool.tenant: {"secret": "env:SECRET", "token": "env:TOKEN"}},
        "pool": {"address": pool.unix, "call_timeout_s": 30.0},
    }
    environ = {"SECRET": "a secret of the benchmark", "TOKEN": pool.token}
    return parse_config(data, source="benchmark", folder=folder, environ=environ)
