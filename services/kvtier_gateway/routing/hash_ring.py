"""Consistent hashing: engines at many points of a ring; one more or less moves few keys (Karger et al. 1997)."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import xxhash

from kvtier_gateway.routing.values import EngineId

VIRTUAL_NODES = 256


class HashRing:
    """Orders engines by the hash of a key. The ring is made anew only when the engines are others."""

    def __init__(self) -> None:
        self._engines: frozenset[EngineId] = frozenset()
        self._points: list[int] = []
        self._owners: list[EngineId] = []

    def walk(self, key: str, engines: Sequence[EngineId]) -> Iterator[EngineId]:
        """Yields all engines, each once, clockwise from the key."""
        if self._engines != frozenset(engines):
            self._place(engines)
        start, seen = (
            bisect_left(self._points, xxhash.xxh64_intdigest(key.encode(errors="surrogatepass"))),
            set[EngineId](),
        )
        for step in range(len(self._owners)):
            engine = self._owners[(start + step) % len(self._owners)]
            if engine not in seen:
                seen.add(engine)
                yield engine
                if len(seen) == len(self._engines):
                    return

    def _place(self, engines: Sequence[EngineId]) -> None:
        placed = sorted(
            (xxhash.xxh64_intdigest(f"{name}#{i}".encode()), name) for name in engines for i in range(VIRTUAL_NODES)
        )
        self._engines = frozenset(engines)
        self._points = [point for point, _ in placed]
        self._owners = [name for _, name in placed]
