"""How busy engines are kept, as far as this gateway keeps them busy."""

import math

from kvtier_gateway.routing.values import EngineId

_MEMORY_S = 60.0
_YOUNGEST_S = 1.0
_BUSIEST = 0.9
_LEAST_SHARE = 0.2
"""Of the mean: this much will come to an engine to which nobody has come yet."""


class Demand:
    """Requests and seconds of computing sent per second, over the last minute or so."""

    def __init__(self) -> None:
        self._requests = self._compute_s = 0.0
        """Both fade by e in a minute, and are those of `_at_s`."""
        self._by_engine: dict[EngineId, float] = {}
        """Each engine's share of `_compute_s`."""
        self._began_s: float | None = None
        self._at_s = 0.0

    def add(self, engine: EngineId, compute_s: float, now_s: float) -> None:
        """A request that takes so long was sent. O(engines)."""
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
        """The engine is gone."""
        self._by_engine.pop(engine, None)

    def harm(self, engine: EngineId, work_s: float, backlog_s: float, num_engines: int) -> float:
        """Seconds that all who come while the engine is still busy wait longer for this request's work.

        :param work_s: of computing or of fetching: both are done one after the other.
        :param backlog_s: of the same kind, before it.

        Those are as many as arrive, at one of so many engines, until it is idle: it works off its backlog as fast as
        what still comes lets it. Fewer come to an engine that has been kept less busy than the mean, and fewest
        to a new one. Of those that would come to a busier one, some can go elsewhere: for it the mean counts.
        """
        if self._began_s is None or not self._compute_s:
            return 0.0
        # As many seconds as what has not faded yet was collected in: fewer than 60 in the first minute.
        seen_s = _MEMORY_S * -math.expm1(-max(_YOUNGEST_S, self._at_s - self._began_s) / _MEMORY_S)
        requests, busy = self._requests / seen_s / num_engines, self._compute_s / seen_s / num_engines
        share = min(1.0, max(_LEAST_SHARE, self._by_engine.get(engine, 0.0) * num_engines / self._compute_s))
        return work_s * requests * share * (backlog_s + work_s) / (1 - min(_BUSIEST, busy))
