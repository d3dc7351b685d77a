"""`priced`, the default: the engine with the lowest expected time to first token, and the least harm to others."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from kvtier_gateway.routing.demand import Demand
from kvtier_gateway.routing.kv_index import KvIndex, Runs
from kvtier_gateway.routing.ledger import Ledger
from kvtier_gateway.routing.pricing import Work, cheapest
from kvtier_gateway.routing.strategy import Strategy
from kvtier_gateway.routing.under_way import UnderWay
from kvtier_gateway.routing.values import (
    BlocksStored,
    Candidate,
    Choice,
    EngineId,
    Key,
    KvEvent,
    Medium,
    Prompt,
    Reads,
    RequestId,
)

NEAR = 1.05
"""Costs within 5 % of the lowest count as equal, so that gateways that know the same do not all choose one engine."""
WRITTEN_AFTER_S = 0.1
"""Seconds after which a block that was computed somewhere can be read from the pool."""


class Offer(NamedTuple):
    """What a candidate would make of a prompt."""

    engine: EngineId
    cost_s: float
    """Expected time to first token, plus the seconds by which it makes other requests wait longer."""
    ttft_s: float
    fetch_s: float
    compute_s: float
    """Seconds by the prices, not corrected."""
    cut: int


class Priced(Strategy):
    """Prices what every engine would have to fetch and compute after its backlog.

    A dead pool has an infinite price, so that engines with the prefix are then the cheapest. A request counts as soon
    as it is sent: in the backlog, and as blocks that its engine will have. So further prompts with a prefix that is
    being computed go to the same engine, or to one that gets the prefix from the pool in time, whichever is sooner.
    """

    reads = Reads.KEYS
    follows_events = True

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._index, self._under_way, self._demand = KvIndex(), UnderWay(), Demand()
        self._ledgers: dict[EngineId, Ledger] = {}
        self._offer: tuple[Prompt, Offer] | None = None
        """The prompt and the offer of the last choice."""

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate], now_s: float) -> Choice:
        """Draws two of the engines near the lowest cost, and takes the one with fewer requests under way."""
        offers = self.offers(prompt, candidates, now_s)
        highest = min(offer.cost_s for offer in offers) * NEAR
        near = [i for i, offer in enumerate(offers) if offer.cost_s <= highest]
        two = self._random.sample(near, min(2, len(near)))
        best = offers[min(two, key=lambda i: (candidates[i].load.requests, offers[i].cost_s))]
        self._offer = (prompt, best)
        others = [offer.ttft_s for offer in offers if offer is not best]
        return Choice(best.engine, _reason(best), best.ttft_s, min(others, default=None))

    def expect(self, keys: Sequence[Key], engines: Sequence[EngineId]) -> None:
        """Finds what the engines have."""
        self._index.runs(keys, engines)

    def sent(self, request: RequestId, prompt: Prompt, choice: Choice, now_s: float) -> None:
        """Counts the request in the engine's backlog, and its blocks as blocks that the engine will have."""
        if self._offer is None or self._offer[0] is not prompt or self._offer[1].engine != choice.engine:
            self._offer = (prompt, self.offers(prompt, [Candidate(choice.engine)], now_s)[0])
        offer = self._offer[1]
        self._ledger(choice.engine).add(request, offer.fetch_s, offer.compute_s, now_s)
        self._demand.add(choice.engine, offer.compute_s, now_s)
        self._index.touch(prompt.keys or ())
        self._under_way.add(request, choice.engine, prompt.keys or (), now_s + offer.ttft_s)

    def first_token(self, request: RequestId, now_s: float) -> None:
        """Notes that the request's blocks are on the device, which events may say only later."""
        told = self._under_way.remove(request)
        if told is not None:
            self._ledger(told[0]).first_token(request, now_s)
            self._index.apply(told[0], BlocksStored(told[1], Medium.DEVICE))

    def finished(self, request: RequestId, now_s: float) -> None:
        """Takes the request out of the backlog if it never had a token."""
        told = self._under_way.remove(request)
        if told is not None:
            self._ledger(told[0]).drop(request)

    failed = finished

    def engine_left(self, engine: EngineId) -> None:
        """Forgets the engine's content, its requests and its ledger."""
        self._index.forget(engine)
        self._under_way.forget(engine)
        self._demand.forget(engine)
        self._ledgers.pop(engine, None)

    def kv_event(self, engine: EngineId, event: KvEvent) -> None:
        """Notes in the index what the event says."""
        self._index.apply(engine, event)

    def offers(self, prompt: Prompt, candidates: Sequence[Candidate], now_s: float) -> list[Offer]:
        """Returns what each candidate would make of the prompt."""
        keys, in_pool = prompt.keys or (), prompt.num_in_pool or 0
        coming = self._under_way.runs(keys)
        in_pool_at = [(run, ready_s + WRITTEN_AFTER_S - now_s) for run, ready_s in coming.values() if run > in_pool]
        if prompt.num_in_pool is None:
            in_pool_at.clear()
        waiting = self._demand.waiting([candidate.engine for candidate in candidates])
        works: dict[tuple[int, Runs, int], Work] = {}
        offers = []
        for candidate, runs, crowd in zip(candidates, self.content(prompt, candidates), waiting, strict=True):
            engine, pool = candidate.engine, in_pool
            backlog_s = self.backlog_s(engine, now_s)
            if in_pool_at:
                pool = max((run for run, ready_s in in_pool_at if ready_s <= backlog_s), default=in_pool)
            if engine in coming:
                run = coming[engine][0]
                runs = Runs(max(runs.device, run), max(runs.local, run))
            place = (id(candidate.prices), runs, pool)  # engines that are alike are priced once
            work = works.get(place)
            if work is None:
                work = works[place] = cheapest(candidate.prices, prompt, runs, pool)
            offers.append(self._offered(engine, work, backlog_s, crowd, now_s))
        return offers

    def content(self, prompt: Prompt, candidates: Sequence[Candidate]) -> list[Runs]:
        """Returns what each candidate has of the prompt."""
        return self._index.runs(prompt.keys or (), [candidate.engine for candidate in candidates])

    def backlog_s(self, engine: EngineId, now_s: float) -> float:
        """Returns the seconds for which the engine still computes what it was sent."""
        ledger = self._ledgers.get(engine)
        return ledger.backlog_s(now_s) if ledger is not None else 0.0

    def _offered(self, engine: EngineId, work: Work, backlog_s: float, crowd: float, now_s: float) -> Offer:
        cut, fetch_s, work_s = work
        ledger = self._ledgers.get(engine)
        compute_s = work_s if ledger is None else work_s * ledger.slowness
        ttft_s = backlog_s + compute_s
        harm_s = crowd * compute_s * ttft_s
        if fetch_s:
            fetched_s = fetch_s if ledger is None else ledger.fetch_backlog_s(now_s) + fetch_s
            ttft_s = max(ttft_s, fetched_s + compute_s)
            harm_s += crowd * fetch_s * fetched_s
        return Offer(engine, ttft_s + harm_s, ttft_s, fetch_s, work_s, cut)

    def _ledger(self, engine: EngineId) -> Ledger:
        if engine not in self._ledgers:
            self._ledgers[engine] = Ledger()
        return self._ledgers[engine]


def _reason(offer: Offer) -> str:
    if not offer.cut:
        return "backlog"
    return "fetch" if offer.fetch_s else "prefix"
