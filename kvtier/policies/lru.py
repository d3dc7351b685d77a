"""Least recently used first: what memory evicts by."""

import itertools
from collections import OrderedDict
from typing import Generic

from kvtier.policies.base import K, Use


class LRU(Generic[K]):
    """Evicts what was used longest ago. Every call is O(1), below 1 us; `coldest` is O(most)."""

    def __init__(self) -> None:
        self._keys: OrderedDict[K, None] = OrderedDict()
        """Coldest first. Guarded by the owner's lock."""

    def insert(self, key: K, use: Use[K]) -> None:
        self._keys[key] = None

    def touch(self, key: K, use: Use[K]) -> None:
        self._keys.move_to_end(key)

    def remove(self, key: K, *, evicted: bool) -> None:
        del self._keys[key]

    def coldest(self, most: int) -> list[K]:
        return list(itertools.islice(self._keys, most))

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys
