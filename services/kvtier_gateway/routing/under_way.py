"""Which prefixes are being computed or fetched, where, and until when."""

from collections.abc import Sequence
from typing import NamedTuple

from kvtier_gateway.routing.values import EngineId, Key, RequestId


class _Request(NamedTuple):
    engine: EngineId
    keys: Sequence[Key]
    ready_at_s: float


class UnderWay:
    """Blocks of requests without a first token. As large as what is under way."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, _Request] = {}
        self._by_key: dict[Key, dict[RequestId, None]] = {}

    def add(self, request: RequestId, engine: EngineId, keys: Sequence[Key], ready_at_s: float) -> None:
        """All these blocks will be on the engine's device at that time."""
        self._requests[request] = _Request(engine, keys, ready_at_s)
        for key in keys:
            self._by_key.setdefault(key, {})[request] = None

    def remove(self, request: RequestId) -> tuple[EngineId, Sequence[Key]] | None:
        """Where it was and its blocks; None: nothing is known of it."""
        told = self._requests.pop(request, None)
        if told is None:
            return None
        for key in told.keys:
            requests = self._by_key[key]
            del requests[request]
            if not requests:
                del self._by_key[key]
        return told.engine, told.keys

    def runs(self, keys: Sequence[Key]) -> dict[EngineId, tuple[int, float]]:
        """For each engine that will have some: how many leading blocks, and when."""
        found: dict[EngineId, tuple[int, float]] = {}
        for i, key in enumerate(keys):
            requests = self._by_key.get(key)
            if requests is None:
                break
            for request in requests:
                told = self._requests[request]
                run, ready_at_s = found.get(told.engine, (0, 0.0))
                if i + 1 > run:
                    found[told.engine] = (i + 1, told.ready_at_s)
                elif told.ready_at_s < ready_at_s:
                    found[told.engine] = (run, told.ready_at_s)
        return found

    def forget(self, engine: EngineId) -> None:
        """The engine is gone."""
        for request in [name for name, told in self._requests.items() if told.engine == engine]:
            self.remove(request)
