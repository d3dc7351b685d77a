"""S3-FIFO: three queues, so that what is used once leaves soon."""

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic

from kvtier.policies.base import K, Use

_SMALL_SHARE = 10
"""The small queue is a tenth of the cache."""
_MOST_USES = 3
_PROMOTING_USES = 2
_MOST_STAYING = 1024
"""Keys that stay which `coldest` of several walks past, beside two for each key that is asked for."""


class S3FIFO(Generic[K]):
    """Evicts from a small queue what was used but once since it came, and from the main queue what was not used lately.

    From Yang, Zhang, Qiu, Yue, Rashmi: FIFO queues are all you need for cache eviction (SOSP 2023), algorithm 1. Three
    things differ. The capacity is not told but seen: the most keys that there were. After a promotion from the small
    queue it is decided again which queue is too long, so that an eviction takes one key and no more. Ghosts are as many
    as the cache has keys; the paper has a tenth less.

    Every call is O(1), amortised for `coldest(1)`. `coldest` of more is O(most): it moves no key that stays, and gives
    fewer where it would have to walk past too many of these.
    """

    def __init__(self) -> None:
        self._small: OrderedDict[K, int] = OrderedDict()
        """Keys and their uses since they came, at most `_MOST_USES`; oldest first. All fields: guarded by the owner's
        lock."""
        self._main: OrderedDict[K, int] = OrderedDict()
        """Keys and their uses as in `_small`, oldest first; a use keeps a key for another round."""
        self._ghosts: OrderedDict[K, None] = OrderedDict()
        """Evicted from the small queue, oldest first."""
        self._capacity = 0
        """The most keys at a time, less those discarded since: how many ghosts there may be."""

    def insert(self, key: K, use: Use[K]) -> None:
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0
        self._capacity = max(self._capacity, len(self))

    def touch(self, key: K, use: Use[K]) -> None:
        queue = self._small if key in self._small else self._main
        if (uses := queue[key]) < _MOST_USES:
            queue[key] = uses + 1

    def remove(self, key: K, *, evicted: bool) -> None:
        if not evicted:
            self._capacity -= 1
        if key in self._main:
            del self._main[key]
            return
        del self._small[key]
        if evicted:
            self._ghosts[key] = None
            while len(self._ghosts) > self._capacity:
                self._ghosts.popitem(last=False)

    def coldest(self, most: int) -> list[K]:
        if most == 1:
            return self._first()
        return list(itertools.islice(self._in_order(2 * most + _MOST_STAYING), most))

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, key: object) -> bool:
        return key in self._small or key in self._main

    def _first(self) -> list[K]:
        """Moves what has earned to stay, until a key is met that has not."""
        small, main = self._small, self._main
        while small or main:
            if _is_too_long(len(small), len(main)):
                key, uses = next(iter(small.items()))
                if uses < _PROMOTING_USES:
                    return [key]
                del small[key]
                main[key] = 0
            else:
                key, uses = next(iter(main.items()))
                if not uses:
                    return [key]
                main[key] = uses - 1
                main.move_to_end(key)
        return []

    def _in_order(self, most_staying: int) -> Iterator[K]:
        """The keys as `_first` and `remove` would give them in turn, without moving any.

        :param most_staying: it ends before one more that stays.
        """
        moved: deque[tuple[K, int]] = deque()
        small = iter(self._small.items())
        main = itertools.chain(self._main.items(), iter(moved.popleft, None))
        num_small, num_main = len(self._small), len(self._main)
        while (num_small or num_main) and most_staying >= 0:
            if _is_too_long(num_small, num_main):
                key, uses = next(small)
                num_small -= 1
                if uses < _PROMOTING_USES:
                    yield key
                else:
                    moved.append((key, 0))
                    num_main += 1
                    most_staying -= 1
            else:
                key, uses = next(main)
                if uses:
                    moved.append((key, uses - 1))
                    most_staying -= 1
                else:
                    num_main -= 1
                    yield key


def _is_too_long(num_small: int, num_main: int) -> bool:
    """Whether the small queue gives up a key, rather than the main one."""
    return num_small > 0 and (not num_main or _SMALL_SHARE * num_small >= num_small + num_main)
