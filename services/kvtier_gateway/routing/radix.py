"""`radix`: longest prefix while loads are balanced, shortest queue when not (`cache_aware` of SGLang's gateway)."""

import random
from collections.abc import Sequence

from kvtier_gateway.routing.least_loaded import least_loaded
from kvtier_gateway.routing.strategy import Strategy
from kvtier_gateway.routing.text_tree import TextTree
from kvtier_gateway.routing.values import Candidate, Choice, EngineId, Prompt, Reads, RequestId

MATCH_THRESHOLD = 0.3
BALANCE_DIFFERENCE = 64
BALANCE_RATIO = 1.5
MAX_CHARACTERS = 2**26
EVICT_EVERY_S = 120.0


class Radix(Strategy):
    """Follows a match of more than 0.3 of the prompt; else takes the engine that was sent the least text.

    Takes the least loaded engine where loads differ by more than 64 and the highest is above 1.5 times the lowest.
    Otherwise a miss goes to the engine with the smallest tree, however busy that engine is.
    """

    reads = Reads.TEXT

    def __init__(self, seed: int = 0, max_characters: int = MAX_CHARACTERS) -> None:
        self._random, self._tree, self._max_characters = random.Random(seed), TextTree(), max_characters
        self._evicted_at_s = 0.0

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate], now_s: float) -> Choice:
        """Goes by load where that is unbalanced, and by text otherwise."""
        loads = [candidate.load.requests for candidate in candidates]
        if max(loads) - min(loads) > BALANCE_DIFFERENCE and max(loads) > BALANCE_RATIO * min(loads):
            return Choice(least_loaded(candidates, self._random).engine, "unbalanced")
        engines = [candidate.engine for candidate in candidates]
        text = _text(prompt)
        match = self._tree.match(text)
        if match.length > MATCH_THRESHOLD * len(text):
            known = [engine for engine in engines if engine in match.engines]
            if known:
                return Choice(max(known, key=match.engines.__getitem__), "prefix")
        return Choice(min(engines, key=lambda engine: self._tree.sizes.get(engine, 0)), "smallest tree")

    def sent(self, request: RequestId, prompt: Prompt, choice: Choice, now_s: float) -> None:
        """Remembers the text; every 120 s, and when a tree is twice as large as allowed, evicts."""
        self._tree.insert(_text(prompt), choice.engine)
        if now_s - self._evicted_at_s > EVICT_EVERY_S or self._tree.sizes[choice.engine] > 2 * self._max_characters:
            self._evicted_at_s = now_s
            for engine, size in list(self._tree.sizes.items()):
                if size > self._max_characters:
                    self._tree.evict(engine, self._max_characters)

    def engine_left(self, engine: EngineId) -> None:
        """Forgets what the engine was sent."""
        self._tree.remove(engine)


def _text(prompt: Prompt) -> str:
    return f"{prompt.tenant}\0{prompt.adapter}\0{prompt.text or ''}"
