"""`session`: consistent hashing of the header that names a session; without one, the least loaded engine."""

import random
from collections.abc import Sequence

from kvtier_gateway.routing.hash_ring import HashRing
from kvtier_gateway.routing.least_loaded import least_loaded
from kvtier_gateway.routing.strategy import Strategy
from kvtier_gateway.routing.values import Candidate, Choice, Prompt


class Session(Strategy):
    """Keeps a session on its engine whatever the load: sessions of unequal weight make hot engines."""

    def __init__(self, seed: int = 0) -> None:
        self._random, self._ring = random.Random(seed), HashRing()

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate], now_s: float) -> Choice:
        """Returns the session's engine; the least loaded one where there is no session."""
        if prompt.session is None:
            return Choice(least_loaded(candidates, self._random).engine, "no session")
        engines = [candidate.engine for candidate in candidates]
        return Choice(next(self._ring.walk(f"{prompt.tenant}\0{prompt.session}", engines)), "session")
