"""`epp`: a simulated cache per engine, and weighted scorers (the Gateway API inference extension's endpoint picker)."""

import random
from collections import OrderedDict
from collections.abc import Sequence

from kvtier_gateway.routing.scorers import pick
from kvtier_gateway.routing.strategy import Strategy
from kvtier_gateway.routing.values import Candidate, Choice, EngineId, Key, Prompt, Reads, RequestId

LRU_TOKENS = 31_250 * 64
"""The tokens that each engine is thought to keep: 31,250 blocks of 64 tokens."""
MAX_PREFIX_TOKENS = 131_072


class Epp(Strategy):
    """Believes that an engine keeps what it was sent in an LRU of two million tokens, whatever it really has."""

    reads = Reads.KEYS

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._sent: dict[EngineId, OrderedDict[Key, None]] = {}

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate], now_s: float) -> Choice:
        """Returns a candidate with the highest score."""
        keys = _keys(prompt)
        shares = [self._matched(candidate.engine, keys) / max(1, len(keys)) for candidate in candidates]
        return pick(shares, candidates, self._random)

    def sent(self, request: RequestId, prompt: Prompt, choice: Choice, now_s: float) -> None:
        """Remembers the blocks, the last first, so that ends of prompts are forgotten first."""
        lru, keys = self._sent.setdefault(choice.engine, OrderedDict()), _keys(prompt)
        for key in reversed(keys):
            lru[key] = None
            lru.move_to_end(key)
        while len(lru) > LRU_TOKENS // max(1, prompt.tokens_per_block):
            lru.popitem(last=False)

    def engine_left(self, engine: EngineId) -> None:
        """Forgets what the engine was sent."""
        self._sent.pop(engine, None)

    def _matched(self, engine: EngineId, keys: Sequence[Key]) -> int:
        lru = self._sent.get(engine, ())
        return next((i for i, key in enumerate(keys) if key not in lru), len(keys))


def _keys(prompt: Prompt) -> Sequence[Key]:
    keys = prompt.keys or ()
    return keys[: MAX_PREFIX_TOKENS // prompt.tokens_per_block] if prompt.tokens_per_block else ()
