"""`round_robin`: engines by turns. With a pool whose hits are nearly as good as local ones, the baseline to beat."""

from collections.abc import Sequence

from kvtier_gateway.routing.strategy import Strategy
from kvtier_gateway.routing.values import Candidate, Choice, Prompt


class RoundRobin(Strategy):
    """Takes candidates by turns, in their order."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate], now_s: float) -> Choice:
        """Returns the candidate whose turn it is."""
        self._turn += 1
        return Choice(candidates[self._turn % len(candidates)].engine, "turn")
