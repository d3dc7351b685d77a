"""Asks the strategy for the engine of each request, and tells it what became of it."""

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from kvtier.clock import MONOTONIC
from kvtier_gateway.engines.engine import Engine
from kvtier_gateway.engines.fleet import Fleet
from kvtier_gateway.metrics import GatewayMetrics
from kvtier_gateway.routing.strategy import Strategy
from kvtier_gateway.routing.values import DEFAULT_PRICES, Candidate, Choice, EngineId, Load, Prices, Prompt

_POOL_BYTES_PER_S = 2e9
"""The bandwidth of a pool from which nothing was fetched yet."""


class Dispatching:
    """One strategy for all requests. Event loop only."""

    def __init__(self, strategy: Strategy, fleet: Fleet, metrics: GatewayMetrics) -> None:
        """:param fleet: tells when engines leave, from now on."""
        self.strategy = strategy
        self._fleet, self._metrics = fleet, metrics
        self._ids = itertools.count()
        fleet.on_left = lambda engine: strategy.engine_left(EngineId(engine.url))

    def route(self, prompt: Prompt, model: str | None) -> "Route":
        """The way of a request to an engine."""
        return Route(self, prompt, model)

    def choose(self, prompt: Prompt, model: str | None, tried: Collection[Engine]) -> tuple[Engine, Choice] | None:
        """One of the engines that may get the request and have not been tried; None: there is none."""
        engines = {EngineId(each.url): each for each in self._fleet.candidates(prompt.tenant, model)}
        prices = Pricing(self._fleet.engines)
        candidates = [_candidate(name, engine, prices) for name, engine in engines.items() if engine not in tried]
        if not candidates:
            return None
        choice = self.strategy.choose(prompt, candidates, MONOTONIC())
        self._metrics.choices.labels(choice.reason).inc()
        return engines[choice.engine], choice

    def note_first_token(self, choice: Choice, took_s: float) -> None:
        """Holds what the strategy has expected against what was."""
        if choice.predicted_s is not None:
            self._metrics.prediction_error_seconds.observe(abs(took_s - choice.predicted_s))
        if choice.alternative_s is not None:
            self._metrics.regret_seconds.inc(max(0.0, took_s - choice.alternative_s))

    def next_id(self) -> int:
        """An id that no other request under way has."""
        return next(self._ids)


class Route:
    """One request: from engine to engine until one answers. Event loop only."""

    def __init__(self, dispatching: Dispatching, prompt: Prompt, model: str | None) -> None:
        self._dispatching, self._prompt, self._model = dispatching, prompt, model
        self.tried: list[Engine] = []
        """The engines that it was given to, in order."""
        self._id: int | None = None
        """The id of the attempt under way."""
        self._choice: Choice | None = None
        self._sent_s = 0.0

    def next(self) -> Engine | None:
        """The engine that gets it now; counts against that engine at once. None: there is no other one to try."""
        found = self._dispatching.choose(self._prompt, self._model, self.tried)
        if found is None:
            return None
        engine, choice = found
        self.tried.append(engine)
        self._id, self._choice, self._sent_s = self._dispatching.next_id(), choice, MONOTONIC()
        self._dispatching.strategy.sent(self._id, self._prompt, choice, self._sent_s)
        return engine

    def first_token(self) -> None:
        """The first byte of the answer has come."""
        if self._id is not None and self._choice is not None:
            now_s = MONOTONIC()
            self._dispatching.strategy.first_token(self._id, now_s)
            self._dispatching.note_first_token(self._choice, now_s - self._sent_s)

    def ended(self, *, failed: bool) -> None:
        """The attempt is over. Idempotent."""
        if self._id is None:
            return
        strategy, attempt, self._id = self._dispatching.strategy, self._id, None
        (strategy.failed if failed else strategy.finished)(attempt, MONOTONIC())


class Pricing:
    """Prices of engines: of what was not learned of one yet, those of others that serve the same models, and where
    nothing was learned at all, what an H200 with an 8 B model does."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    def of(self, engine: Engine) -> Prices:
        """What work costs at this engine."""
        token_s = self._learned(engine, lambda each: each.prices.token_s)
        pool_bytes_per_s = self._learned(engine, lambda each: each.prices.pool_bytes_per_s)
        token_bytes = self._learned(engine, _kv_bytes_per_token)
        if token_s is None and pool_bytes_per_s is None and token_bytes is None and engine.key_form is None:
            return DEFAULT_PRICES
        prices = replace(DEFAULT_PRICES, pool_bytes_per_s=pool_bytes_per_s or _POOL_BYTES_PER_S)
        if token_s is not None:  # as a whole, whatever came before
            prices = replace(prices, token_s=token_s, token_context_s=0.0, request_s=0.0)
        if token_bytes is not None:
            prices = replace(prices, kv_bytes_per_token=max(1, round(token_bytes)))
        return prices

    def _learned(self, engine: Engine, of: Callable[[Engine], float | None]) -> float | None:
        """The engine's own, or the mean of those of its like."""
        own = of(engine)
        if own is not None or not engine.models:
            return own
        alike = [each for each in self._engines if each.models and each.models.keys() == engine.models.keys()]
        known = [value for each in alike if (value := of(each)) is not None]
        return sum(known) / len(known) if known else None


def _kv_bytes_per_token(engine: Engine) -> float | None:
    learned, form = engine.prices.block_bytes, engine.key_form
    return None if learned is None or form is None else learned / form.tokens_per_block


def _candidate(name: EngineId, engine: Engine, prices: Pricing) -> Candidate:
    num_waiting = sum(not attempt.has_begun for attempt in engine.attempts)
    load = Load(running=len(engine.attempts) - num_waiting, waiting=num_waiting, kv_use=engine.loads.kv_used)
    return Candidate(name, load, prices.of(engine))
