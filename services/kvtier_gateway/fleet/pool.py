"""The simulated pool."""

from collections.abc import Sequence

from kvtier_gateway.fleet.hardware import PoolModel
from kvtier_gateway.fleet.kv_store import LruStore
from kvtier_gateway.routing.values import Key


class SimPool:
    """Blocks of all engines, and the bandwidth that they share."""

    def __init__(self, model: PoolModel, num_engines: int, block_bytes: int) -> None:
        self.model = model
        self.is_there = model.link_bytes_per_s > 0
        self._total = model.link_bytes_per_s * max(1.0, num_engines / model.oversubscription)
        self._store = LruStore(model.capacity_bytes // block_bytes)
        self._fetching = 0

    def run(self, keys: Sequence[Key], start: int = 0) -> int:
        """The end of the leading run of `keys` from `start` on."""
        return self._store.run(keys, start) if self.is_there else start

    def put(self, keys: Sequence[Key]) -> None:
        """These are there from now on, or used."""
        self._store.put(keys)

    def bandwidth(self) -> float:
        """Bytes per second for one engine more that fetches."""
        return min(self.model.link_bytes_per_s, self._total / (self._fetching + 1))

    def begin_fetch(self) -> float:
        """The bandwidth that this fetch has until it ends: a change in between is not followed."""
        bandwidth = self.bandwidth()
        self._fetching += 1
        return bandwidth

    def end_fetch(self) -> None:
        """One engine less fetches."""
        self._fetching -= 1
