"""Which block goes first when room is needed. A policy knows keys and their uses, nothing else.

`kvtier.tiers.host.slot_index.SlotIndex` is where the policy is chosen, for host memory and for the pool's. Another one
has the methods of `LRU`, with the same promises.
"""

import itertools
from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K", bound=bytes)


class LRU(Generic[K]):
    """Evicts what was used longest ago. Not thread-safe: the owner's lock guards it. O(1) unless said otherwise.

    A block is worth nothing without the blocks before it in its chain, so whoever inserts or touches
    the blocks of one request does so from the last to the first: then tails are evicted before heads.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[K, None] = OrderedDict()
        """Coldest first. Guarded by the owner's lock."""

    def insert(self, key: K) -> None:
        """Adds a key that is not there, as used just now. It may have been there before."""
        self._keys[key] = None

    def touch(self, key: K) -> None:
        """Notes a use of a key that is there."""
        self._keys.move_to_end(key)

    def remove(self, key: K) -> None:
        """Takes out a key that is there."""
        del self._keys[key]

    def coldest(self, most: int) -> list[K]:
        """The first to evict, at most so many, in order. They stay. O(most)."""
        return list(itertools.islice(self._keys, most))

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys
