"""ARC: two LRU lists, one of what was used once, one of what was used again, and a share between them that adapts."""

from collections import OrderedDict
from typing import Generic

from kvtier.policies.base import K, Use


class ARC(Generic[K]):
    """Evicts from the list that is longer than its share; a ghost that comes back makes its list's share larger.

    From Megiddo, Modha: ARC: a self-tuning, low overhead replacement cache (FAST 2003), figure 4. Two things differ, as
    a victim is chosen before its successor is known: the share adapts after the eviction that makes room for a ghost,
    not before, and a tie of list and share takes no notice of that ghost. The capacity is not told but seen: the most
    keys that there were.

    Every call is O(1), about 1 us; `coldest` is O(most).
    """

    def __init__(self) -> None:
        self._once: OrderedDict[K, None] = OrderedDict()
        """T1 of the paper, coldest first. All fields: guarded by the owner's lock."""
        self._again: OrderedDict[K, None] = OrderedDict()
        """T2."""
        self._once_ghosts: OrderedDict[K, None] = OrderedDict()
        """B1: evicted from T1. With T1 at most as many as the capacity."""
        self._again_ghosts: OrderedDict[K, None] = OrderedDict()
        """B2: evicted from T2. All four lists together have at most twice the capacity."""
        self._share = 0.0
        """p: how long T1 should be."""
        self._capacity = 0
        """c: the most keys at a time, less those discarded since."""

    def insert(self, key: K, use: Use[K]) -> None:
        num_once, num_again = len(self._once_ghosts), len(self._again_ghosts)
        self._capacity = max(self._capacity, len(self) + 1)
        if key in self._once_ghosts:
            self._share = min(self._capacity, self._share + max(1.0, num_again / num_once))
            del self._once_ghosts[key]
            self._again[key] = None
        elif key in self._again_ghosts:
            self._share = max(0.0, self._share - max(1.0, num_once / num_again))
            del self._again_ghosts[key]
            self._again[key] = None
        else:
            self._once[key] = None
            self._forget_ghosts()

    def touch(self, key: K, use: Use[K]) -> None:
        if key in self._again:
            self._again.move_to_end(key)
        else:
            del self._once[key]
            self._again[key] = None

    def remove(self, key: K, *, evicted: bool) -> None:
        was_once = key in self._once
        del (self._once if was_once else self._again)[key]
        if evicted:
            (self._once_ghosts if was_once else self._again_ghosts)[key] = None
        else:
            self._capacity -= 1
            self._share = min(self._share, self._capacity)

    def coldest(self, most: int) -> list[K]:
        once, again = iter(self._once), iter(self._again)
        num_once, num_again = len(self._once), len(self._again)
        keys: list[K] = []
        while len(keys) < most and (num_once or num_again):
            if num_once and (num_once > self._share or not num_again):
                keys.append(next(once))
                num_once -= 1
            else:
                keys.append(next(again))
                num_again -= 1
        return keys

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._again

    def _forget_ghosts(self) -> None:
        """Forgets the oldest ghosts until there are as many as the paper allows."""
        while self._once_ghosts and len(self._once) + len(self._once_ghosts) > self._capacity:
            self._once_ghosts.popitem(last=False)
        while self._again_ghosts and self._num_known() > 2 * self._capacity:
            self._again_ghosts.popitem(last=False)

    def _num_known(self) -> int:
        return len(self) + len(self._once_ghosts) + len(self._again_ghosts)
