"""Asks the strategy for the engine of each request, and tells it what became of it."""

import itertools
from collections.abc import Collection, Sequence

from kvtier.clock import MONOTONIC
from kvtier_gateway.engines.engine import Engine
from kvtier_gateway.engines.fleet import Fleet
from kvtier_gateway.engines.price_list import PriceList
from kvtier_gateway.metrics import GatewayMetrics
from kvtier_gateway.routing.strategy import Strategy
from kvtier_gateway.routing.values import Candidate, Choice, EngineId, Key, Load, Prices, Prompt


class Dispatching:
    """One strategy for all requests. Event loop only."""

    def __init__(self, strategy: Strategy, fleet: Fleet, metrics: GatewayMetrics) -> None:
        """:param fleet: tells when engines leave, from now on."""
        self.strategy = strategy
        self._fleet, self._metrics = fleet, metrics
        self._ids, self._price_list = itertools.count(), PriceList()
        fleet.on_left = lambda engine: strategy.engine_left(EngineId(engine.url))

    def expect(self, keys: Sequence[Key], engines: Sequence[Engine]) -> None:
        """Has the strategy look up what takes long, for a prompt with these keys that these engines may get soon."""
        self.strategy.expect(keys, [EngineId(engine.url) for engine in engines])

    def route(self, prompt: Prompt, model: str | None) -> "Route":
        """The way of a request to an engine."""
        return Route(self, prompt, model)

    def choose(self, prompt: Prompt, model: str | None, tried: Collection[Engine]) -> tuple[Engine, Choice] | None:
        """One of the engines that may get the request and have not been tried; None: there is none."""
        now_s = MONOTONIC()
        prices = self._price_list.of(self._fleet.engines, now_s)
        engines = {
            EngineId(each.url): each for each in self._fleet.candidates(prompt.tenant, model) if each not in tried
        }
        if not engines:
            return None
        candidates = [_candidate(name, engine, prices[engine]) for name, engine in engines.items()]
        choice = self.strategy.choose(prompt, candidates, now_s)
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


def _candidate(name: EngineId, engine: Engine, prices: Prices) -> Candidate:
    load = Load(engine.num_begun, engine.num_waiting, None, engine.loads.kv_used)
    return Candidate(name, load, prices)
