"""Engines behind a strategy: one run of a simulation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier_gateway.fleet.engine import SimEngine
from kvtier_gateway.fleet.events import Events
from kvtier_gateway.fleet.figures import Figures
from kvtier_gateway.fleet.hardware import EngineModel, PoolModel
from kvtier_gateway.fleet.pool import SimPool
from kvtier_gateway.fleet.request import SimRequest
from kvtier_gateway.fleet.workload import SyntheticText, Workload
from kvtier_gateway.routing.strategy import Strategy
from kvtier_gateway.routing.values import Candidate, EngineId, KvEvent, Load, Prompt, Reads

_REPORT_EVERY = 200


@dataclass(frozen=True, slots=True)
class Site:
    """What is simulated."""

    num_engines: int
    load: float
    pool: PoolModel
    engine: EngineModel


class Fleet:
    """The gateway's side of a simulation: asks the strategy, and tells it what engines tell.

    Loads that the gateway counts itself are up to date; KV use, backlog and prices are those of the last look at an
    engine's metrics.
    """

    def __init__(self, site: Site, work: Workload, make: Callable[["Fleet"], Strategy]) -> None:
        """:param make: makes the strategy; one that is to know the truth takes it from the fleet."""
        self.events = Events()
        block_bytes = work.tokens_per_block * site.engine.compute.kv_bytes_per_token
        self.pool = SimPool(site.pool, site.num_engines, block_bytes)
        self.engines = {
            name: SimEngine(name, site.engine, self.pool, work.tokens_per_block, self.events, self)
            for name in (EngineId(f"engine-{i}") for i in range(site.num_engines))
        }
        self._site, self._work, self._text = site, work, SyntheticText()
        self._places = {name: i for i, name in enumerate(self.engines)}
        self._running, self._waiting = [0] * site.num_engines, [0] * site.num_engines
        self._candidates = [Candidate(name, Load(), engine.prices) for name, engine in self.engines.items()]
        self._metrics = [(0, 0.0, engine.prices) for engine in self.engines.values()]
        self.strategy = make(self)
        self.figures = Figures(site.num_engines)

    def run(self, on_progress: Callable[[int], None] = lambda count: None) -> Figures:
        """All requests to their ends. Calls `on_progress` with how many have arrived since it was called last."""
        speed = self._work.speed(self._site.num_engines, self._site.load)
        for request in self._work.requests:
            self.events.at(request.arrives_s / speed, self._arrive, request, on_progress)
        self._left = len(self._work.requests)
        self.events.after(self._site.engine.metrics_every_s, self._look)
        self.events.run()
        self.figures.end(self.events.now_s, self.engines.values())
        return self.figures

    def first_token(self, engine: SimEngine, request: SimRequest) -> None:
        """An engine tells."""
        place = self._places[engine.id]
        self._waiting[place] -= 1
        self._running[place] += 1
        self._update(place)
        self.strategy.first_token(request.number, self.events.now_s)
        self.figures.first_token(request)

    def finished(self, engine: SimEngine, request: SimRequest) -> None:
        """An engine tells."""
        place = self._places[engine.id]
        self._running[place] -= 1
        self._left -= 1
        self.figures.change(place, -1, self.events.now_s)
        self.figures.finished(request, self.events.now_s)
        self._update(place)
        self.strategy.finished(request.number, self.events.now_s)

    def told(self, engine: SimEngine, events: Sequence[KvEvent]) -> None:
        """An engine tells."""
        if self.strategy.follows_events:
            for event in events:
                self.strategy.kv_event(engine.id, event)

    def _arrive(self, request: SimRequest, on_progress: Callable[[int], None]) -> None:
        now_s, strategy = self.events.now_s, self.strategy
        request.arrives_s = now_s
        prompt = self._prompt(request)
        choice = strategy.choose(prompt, self._candidates, now_s)
        request.choice = choice
        strategy.sent(request.number, prompt, choice, now_s)
        place = self._places[choice.engine]
        self._waiting[place] += 1
        self.figures.change(place, 1, now_s)
        self._update(place)
        self.engines[choice.engine].arrive(request)
        if request.number % _REPORT_EVERY == _REPORT_EVERY - 1:
            on_progress(_REPORT_EVERY)

    def _prompt(self, request: SimRequest) -> Prompt:
        reads, session = self.strategy.reads, request.session
        if reads is Reads.TEXT:
            return Prompt(request.prompt_tokens, text=self._text.of(request.all_ids), session=session)
        if reads is Reads.NOTHING:
            return Prompt(request.prompt_tokens, session=session)
        return Prompt(
            request.prompt_tokens,
            keys=request.keys,
            tokens_per_block=self._work.tokens_per_block,
            num_in_pool=self.pool.run(request.keys) if self.pool.is_there else None,
            session=session,
        )

    def _update(self, place: int) -> None:
        backlog, kv_use, prices = self._metrics[place]
        load = Load(self._running[place], self._waiting[place], backlog, kv_use)
        self._candidates[place] = Candidate(self._candidates[place].engine, load, prices)

    def _look(self) -> None:
        """Reads the metrics of all engines."""
        for place, engine in enumerate(self.engines.values()):
            prices = self._metrics[place][2]
            if prices.pool_bytes_per_s != engine.pool_bandwidth:
                prices = engine.measured_prices()
            self._metrics[place] = (engine.backlog_tokens, engine.device.use, prices)
            self._update(place)
        if self._left:
            self.events.after(self._site.engine.metrics_every_s, self._look)
