"""`least_loaded`: the engine with the fewest requests under way."""

import random
from collections.abc import Sequence

from kvtier_gateway.routing.strategy import Strategy
from kvtier_gateway.routing.values import Candidate, Choice, Prompt


class LeastLoaded(Strategy):
    """Takes one of the least loaded at random, so that gateways that start together do not choose alike."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate], now_s: float) -> Choice:
        """Returns one of the least loaded candidates."""
        return Choice(least_loaded(candidates, self._random).engine, "load")


def least_loaded(candidates: Sequence[Candidate], source: random.Random) -> Candidate:
    """Returns one of the candidates with the fewest requests under way, at random."""
    fewest = min(candidate.load.requests for candidate in candidates)
    return source.choice([candidate for candidate in candidates if candidate.load.requests == fewest])
