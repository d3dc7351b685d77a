"""Which waiting request begins next, by what is cached of it."""

from collections import deque
from collections.abc import Sequence
from itertools import islice

from kvtier.clock import Clock
from kvtier_engine.scheduling.prefix_cache import PrefixCache
from kvtier_engine.scheduling.request import Request

_MOST_SORTED = 64
"""Requests at the head of the queue that are looked at: a look costs about 0.1 us for each block of a prompt."""
_SPEED_WEIGHT = 0.2
"""The weight of the newest step in the mean speed of computing prompts."""
_LEAST_PREFILL_TOKENS = 16
"""A step that computes fewer tokens for a request says little of the speed of prompts."""


class LongestPrefixFirst:
    """Sorts requests by their cached tokens and their age. Scheduler thread only."""

    def __init__(self, cache: PrefixCache, clock: Clock) -> None:
        self._cache, self._clock = cache, clock
        self._tokens_per_s = 0.0
        """The mean speed of computing prompts; 0 until it was measured, when age does not count."""
        self._sorted_at: tuple[int, int] | None = None
        """Free blocks and waiting requests at the last sort. While both are as they were, little has changed."""

    def note_computed(self, num_tokens: Sequence[int], seconds: float) -> None:
        """Steps that computed so many tokens of each request took so long."""
        total = sum(num_tokens)
        if seconds <= 0 or 2 * sum(count for count in num_tokens if count >= _LEAST_PREFILL_TOKENS) < total:
            return
        weight = _SPEED_WEIGHT if self._tokens_per_s else 1.0
        self._tokens_per_s += weight * (total / seconds - self._tokens_per_s)

    def sort(self, waiting: deque[Request]) -> None:
        """Puts the request that begins next first. Equal ones keep their order."""
        state = self._cache.num_free, len(waiting)
        if state == self._sorted_at:
            return
        self._sorted_at = state
        now = self._clock()
        first = list(islice(waiting, _MOST_SORTED))
        gains = {
            request.order: self._cache.num_cached_tokens(request) + (now - request.arrived_at) * self._tokens_per_s
            for request in first
        }
        first.sort(key=lambda request: gains[request.order], reverse=True)
        for _ in first:
            waiting.popleft()
        waiting.extendleft(reversed(first))
