"""Which engines are computing or fetching which prefixes, and until when."""

from collections.abc import Sequence
from typing import NamedTuple

from kvtier_gateway.routing.values import EngineId, Key, RequestId


class _Request(NamedTuple):
    engine: EngineId
    keys: Sequence[Key]
    ready_at_s: float


class UnderWay:
    """Blocks of requests without a first token.

    A key stands for all before it, so that two prompts are compared in as many steps as their length has binary digits.
    Looking up takes time with the number of requests under way that have the same first block.
    """

    def __init__(self) -> None:
        self._requests: dict[RequestId, _Request] = {}
        self._by_first: dict[Key, set[RequestId]] = {}
        """The requests that have at least one block, by its key."""

    def add(self, request: RequestId, engine: EngineId, keys: Sequence[Key], ready_at_s: float) -> None:
        """Notes that all these blocks will be on the engine's device at `ready_at_s`."""
        self._requests[request] = _Request(engine, keys, ready_at_s)
        if keys:
            self._by_first.setdefault(keys[0], set()).add(request)

    def remove(self, request: RequestId) -> tuple[EngineId, Sequence[Key]] | None:
        """Forgets a request. Returns its engine and blocks; None: the request is unknown."""
        told = self._requests.pop(request, None)
        if told is None:
            return None
        if told.keys:
            same = self._by_first[told.keys[0]]
            same.remove(request)
            if not same:
                del self._by_first[told.keys[0]]
        return told.engine, told.keys

    def runs(self, keys: Sequence[Key]) -> dict[EngineId, tuple[int, float]]:
        """Returns how many leading blocks each engine will have, and when; engines that will have none are left out."""
        found: dict[EngineId, tuple[int, float]] = {}
        for request in self._by_first.get(keys[0], ()) if keys else ():
            told = self._requests[request]
            run, ready_at_s = _common(keys, told.keys), told.ready_at_s
            known, known_at_s = found.get(told.engine, (0, 0.0))
            if run > known or (run == known and ready_at_s < known_at_s):
                found[told.engine] = (run, ready_at_s)
        return found

    def forget(self, engine: EngineId) -> None:
        """Forgets the requests of an engine that is gone."""
        for request in [name for name, told in self._requests.items() if told.engine == engine]:
            self.remove(request)


def _common(some: Sequence[Key], others: Sequence[Key]) -> int:
    """Returns how many leading keys are equal. The first ones must be."""
    same, end = 1, min(len(some), len(others))
    while same < end:
        middle = (same + end + 1) // 2
        if some[middle - 1] == others[middle - 1]:
            same = middle
        else:
            end = middle - 1
    return same
