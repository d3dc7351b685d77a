"""How busy this gateway keeps each engine."""

import math
from collections.abc import Sequence

from kvtier_gateway.routing.values import EngineId

_MEMORY_S = 60.0
_YOUNGEST_S = 1.0
_BUSIEST = 0.9
_LEAST_SHARE = 0.2
"""The share of the mean that an engine is expected to get to which nothing has been sent yet."""


class Demand:
    """Requests and seconds of computing sent per second, over the last minute or so."""

    def __init__(self) -> None:
        self._requests = self._compute_s = 0.0
        """Both are as of `_at_s`, and fade by a factor of e in `_MEMORY_S`."""
        self._by_engine: dict[EngineId, float] = {}
        """Each engine's share of `_compute_s`."""
        self._began_s: float | None = None
        self._at_s = 0.0

    def add(self, engine: EngineId, compute_s: float, now_s: float) -> None:
        """Counts a request that was sent, and the time to compute it. O(engines)."""
        if self._began_s is None:
            self._began_s = self._at_s = now_s
        fade = math.exp((self._at_s - now_s) / _MEMORY_S)
        self._at_s = now_s
        self._requests = self._requests * fade + 1
        self._compute_s = self._compute_s * fade + compute_s
        for name in self._by_engine:
            self._by_engine[name] *= fade
        self._by_engine[engine] = self._by_engine.get(engine, 0.0) + compute_s

    def forget(self, engine: EngineId) -> None:
        """Forgets an engine that is gone."""
        self._by_engine.pop(engine, None)

    def waiting(self, engines: Sequence[EngineId]) -> list[float]:
        """Returns how many requests come to each of the engines per second of work that it still has to do.

        A request of `work_s` behind a backlog of `backlog_s` delays by `work_s` each request that comes before the
        engine is idle, which are `waiting * (backlog_s + work_s)`, because the engine works off its backlog
        only as fast as new requests let it. Fewer requests come to an engine that was less busy than the mean, and
        fewest to a new one. A busier engine counts as the mean, because some of its requests can go elsewhere.
        """
        if self._began_s is None or not self._compute_s:
            return [0.0] * len(engines)
        # What has not faded yet was collected in so many seconds: fewer than 60 in the first minute.
        seen_s = _MEMORY_S * -math.expm1(-max(_YOUNGEST_S, self._at_s - self._began_s) / _MEMORY_S)
        requests, busy = self._requests / seen_s / len(engines), self._compute_s / seen_s / len(engines)
        mean = requests / (1 - min(_BUSIEST, busy))
        of_mean, computed = len(engines) / self._compute_s, self._by_engine
        shares = [computed.get(engine, 0.0) * of_mean for engine in engines]
        return [mean if share > 1.0 else mean * (share if share > _LEAST_SHARE else _LEAST_SHARE) for share in shares]
