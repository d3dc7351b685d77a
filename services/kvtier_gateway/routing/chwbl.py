"""`chwbl`: consistent hashing with bounded loads over a prompt's head (Mirrokni et al. 2016; KubeAI)."""

from collections.abc import Sequence

from kvtier_gateway.routing.hash_ring import HashRing
from kvtier_gateway.routing.strategy import Strategy
from kvtier_gateway.routing.values import Candidate, Choice, Prompt, Reads

HEAD_CHARACTERS = 100
MEAN_LOAD_FACTOR = 1.25


class Chwbl(Strategy):
    """Hashes the adapter and the first characters, and passes over engines above 1.25 times the mean load.

    Each head is one point of the ring, so that prompts that share a long system prompt share one engine until it is
    full, and then the next one.
    """

    reads = Reads.TEXT

    def __init__(self) -> None:
        self._ring = HashRing()

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate], now_s: float) -> Choice:
        """Returns the first engine from the head's point of the ring on that may take one more request."""
        loads = {candidate.engine: candidate.load.requests for candidate in candidates}
        bound = MEAN_LOAD_FACTOR * (sum(loads.values()) + 1) / len(loads)
        key = f"{prompt.tenant}\0{prompt.adapter}\0{(prompt.text or '')[:HEAD_CHARACTERS]}"
        walk = list(self._ring.walk(key, list(loads)))
        for place, engine in enumerate(walk):
            if loads[engine] + 1 <= bound or sum(loads.values()) == 0:
                return Choice(engine, "bounded" if place else "prefix")
        return Choice(walk[0], "prefix")
