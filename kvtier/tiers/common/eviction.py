"""Which block goes first when room is needed. Policies know keys and their uses, nothing else."""

import itertools
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

K = TypeVar("K", bound=bytes)


class EvictionPolicy(Protocol[K]):
    """Orders keys from the first to evict to the last. Not thread-safe: the owner's lock guards it.

    Every call is O(1), amortised. A key may be inserted again after `remove` or `pop`.
    """

    def insert(self, key: K) -> None:
        """Adds a key that is not there, as used just now."""

    def touch(self, key: K) -> None:
        """Notes a use of a key that is there."""

    def remove(self, key: K) -> None:
        """Takes out a key that is there."""

    def pop(self) -> K | None:
        """Takes out and returns the first to evict, None when there is none."""

    def coldest(self, most: int) -> list[K]:
        """The first to evict, at most so many, in order. They stay. O(most)."""

    def __len__(self) -> int: ...

    def __contains__(self, key: object) -> bool: ...


class LRU(Generic[K]):
    """Evicts what was used longest ago.

    A block is worth nothing without the blocks before it in its chain, so whoever inserts or touches
    the blocks of one request does so from the last to the first: then tails are evicted before heads.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[K, None] = OrderedDict()
        """Coldest first. Guarded by the owner's lock."""

    def insert(self, key: K) -> None:
        self._keys[key] = None

    def touch(self, key: K) -> None:
        self._keys.move_to_end(key)

    def remove(self, key: K) -> None:
        del self._keys[key]

    def pop(self) -> K | None:
        return self._keys.popitem(last=False)[0] if self._keys else None

    def coldest(self, most: int) -> list[K]:
        return list(itertools.islice(self._keys, most))

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys
