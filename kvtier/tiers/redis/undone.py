"""Discards that a server has not heard of yet: their blocks are hidden here until it has."""

import itertools
import threading
from collections.abc import Iterable, Sequence

from kvtier.identity.keys import StoreKey

_MAX_KEYS = 65_536
"""About 200 bytes each."""


class UndoneDiscards:
    """Keys that this process wants forgotten and could not tell the server. Any thread.

    The oldest are given up where there are too many: their blocks are found again when the server is. So are those of a
    process that ends first, and other processes see what the server has.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[StoreKey, None] = {}
        """Oldest first. Guarded by _lock."""

    def __bool__(self) -> bool:
        return bool(self._keys)

    def add(self, keys: Iterable[StoreKey]) -> int:
        """Hides these keys from now on. Returns how many older ones were given up for them."""
        with self._lock:
            self._keys.update(dict.fromkeys(keys))
            surplus = list(itertools.islice(self._keys, max(0, len(self._keys) - _MAX_KEYS)))
            for key in surplus:
                del self._keys[key]
            return len(surplus)

    def done(self, keys: Iterable[StoreKey]) -> None:
        """The server has heard of these."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def oldest(self, most: int) -> list[StoreKey]:
        """The next to tell it, at most so many. They stay hidden."""
        with self._lock:
            return list(itertools.islice(self._keys, most))

    def among(self, keys: Sequence[StoreKey]) -> list[int]:
        """The places of those of `keys` that are hidden."""
        with self._lock:
            return [place for place, key in enumerate(keys) if key in self._keys]
