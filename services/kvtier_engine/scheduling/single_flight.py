"""Which blocks are being computed, and for whom: so that requests with the same prefix compute it once."""

from collections.abc import Iterable

from kvtier.identity.keys import BlockKey
from kvtier_engine.scheduling.request import Request


class SingleFlight:
    """Blocks of prompts that a running request will compute. Scheduler thread only.

    A request that has begun goes on to compute, gives its blocks up, or ends, so that whoever waits for it waits for
    computing alone, and never for another request that waits.
    """

    def __init__(self) -> None:
        self._by_key: dict[BlockKey, Request] = {}

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._by_key

    def begin(self, request: Request, keys: Iterable[BlockKey]) -> None:
        """The request computes these blocks, but for those that another one is at already."""
        for key in keys:
            self._by_key.setdefault(key, request)

    def done(self, keys: Iterable[BlockKey]) -> None:
        """These blocks are on the device."""
        for key in keys:
            self._by_key.pop(key, None)

    def end(self, request: Request) -> None:
        """The request computes nothing any more."""
        for key in request.keys:
            if self._by_key.get(key) is request:
                del self._by_key[key]

    def clear(self) -> None:
        """Forgets all: nothing that is being computed will be found."""
        self._by_key.clear()
