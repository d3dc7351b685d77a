"""`precise` and `dynamo`: what engines hold by their KV events, weighed as llm-d and NVIDIA Dynamo do."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from kvtier_gateway.routing.kv_index import KvIndex
from kvtier_gateway.routing.scorers import pick
from kvtier_gateway.routing.strategy import Strategy
from kvtier_gateway.routing.values import Candidate, Choice, EngineId, Key, KvEvent, Prompt, Reads, RequestId

HOST_WEIGHT = 0.8
HOST_CREDIT = 0.75
POOL_CREDIT = 0.5


class _Indexed(Strategy):
    """Knows from events what engines hold."""

    reads = Reads.KEYS
    follows_events = True

    def __init__(self, seed: int = 0) -> None:
        self._random, self._index = random.Random(seed), KvIndex()

    def expect(self, keys: Sequence[Key], engines: Sequence[EngineId]) -> None:
        """Finds what the engines have."""
        self._index.runs(keys, engines)

    def sent(self, request: RequestId, prompt: Prompt, choice: Choice, now_s: float) -> None:
        """Keeps the index from forgetting what is in use."""
        self._index.touch(prompt.keys or ())

    def engine_left(self, engine: EngineId) -> None:
        """Forgets what the engine held."""
        self._index.forget(engine)

    def kv_event(self, engine: EngineId, event: KvEvent) -> None:
        """Notes in the index what the event says."""
        self._index.apply(engine, event)


class Precise(_Indexed):
    """Weighs the scores over an exact prefix: a block counts 1 on the device and 0.8 in host memory (llm-d).

    Scores are relative to the best and worst candidate, so that a difference of one block weighs as much as one of all.
    """

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate], now_s: float) -> Choice:
        """Returns a candidate with the highest score."""
        runs = self._index.runs(prompt.keys or (), [candidate.engine for candidate in candidates])
        raw = [run.device + HOST_WEIGHT * (run.local - run.device) for run in runs]
        low, spread = min(raw), max(raw) - min(raw)
        return pick([(score - low) / spread if spread else 0.0 for score in raw], candidates, self._random)


class _Sent(NamedTuple):
    engine: EngineId
    blocks: int
    new: float
    """Blocks to compute; 0 once there is a token."""


class Dynamo(_Indexed):
    """Takes the fewest blocks: prompt blocks to compute, less credits for what is cached, plus decode blocks.

    The credit for a block is 1 on the device, 0.75 in host memory, and 0.5 in the pool. There is no temperature: equal
    prompts herd.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._prefill: dict[EngineId, float] = {}
        """Blocks to compute of prompts that were sent and have no token yet."""
        self._decode: dict[EngineId, int] = {}
        """Blocks of prompts whose answers are under way."""
        self._requests: dict[RequestId, _Sent] = {}

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate], now_s: float) -> Choice:
        """Returns the candidate with the lowest cost, at random among equals."""
        new = self._new_blocks(prompt, [candidate.engine for candidate in candidates])
        costs = [
            max(0.0, self._prefill.get(c.engine, 0.0) + blocks) + self._decode.get(c.engine, 0)
            for c, blocks in zip(candidates, new, strict=True)
        ]
        lowest = min(costs)
        chosen = self._random.choice([c.engine for c, cost in zip(candidates, costs, strict=True) if cost == lowest])
        return Choice(chosen, "cost")

    def sent(self, request: RequestId, prompt: Prompt, choice: Choice, now_s: float) -> None:
        """Adds the request's blocks to what is to be computed."""
        super().sent(request, prompt, choice, now_s)
        blocks, (new,) = len(prompt.keys or ()), self._new_blocks(prompt, [choice.engine])
        self._requests[request] = _Sent(choice.engine, blocks, new)
        self._prefill[choice.engine] = self._prefill.get(choice.engine, 0.0) + new

    def first_token(self, request: RequestId, now_s: float) -> None:
        """Counts the request's blocks as decode blocks from now on: they are computed."""
        sent = self._requests.get(request)
        if sent is not None and sent.new:
            self._prefill[sent.engine] -= sent.new
            self._requests[request] = sent._replace(new=0.0)
            self._decode[sent.engine] = self._decode.get(sent.engine, 0) + sent.blocks

    def finished(self, request: RequestId, now_s: float) -> None:
        """Stops counting the request's blocks."""
        sent = self._requests.pop(request, None)
        if sent is not None and sent.new:
            self._prefill[sent.engine] -= sent.new
        elif sent is not None:
            self._decode[sent.engine] -= sent.blocks

    failed = finished

    def engine_left(self, engine: EngineId) -> None:
        """Forgets what the engine held, and its requests."""
        super().engine_left(engine)
        self._requests = {request: told for request, told in self._requests.items() if told.engine != engine}
        self._prefill.pop(engine, None)
        self._decode.pop(engine, None)

    def _new_blocks(self, prompt: Prompt, engines: Sequence[EngineId]) -> list[float]:
        """Returns the blocks that each engine would compute, less credits; never 0, which stands for computed."""
        keys, new = prompt.keys or (), []
        for run in self._index.runs(keys, engines):
            pool = max(0, (prompt.num_in_pool or 0) - run.local)
            credits = run.device + HOST_CREDIT * (run.local - run.device) + POOL_CREDIT * pool
            new.append(max(1e-9, len(keys) - credits))
        return new
