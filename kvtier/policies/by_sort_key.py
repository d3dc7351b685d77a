"""Policies that are a sort key, as in SGLang's RadixAttention: whatever has the smallest key goes first."""

import heapq
from collections.abc import Callable, Mapping
from typing import Generic

from kvtier.policies.base import K, Use

_SLACK = 64
"""Stale entries that a heap may have beside as many as there are keys."""
_PROTECTED_HITS = 2


class Record:
    """What sort keys are made of. Times count calls: no two uses have the same."""

    __slots__ = ("accessed", "created", "hits", "priority", "sort_key")

    def __init__(self, now: int, priority: int) -> None:
        self.created = self.accessed = now
        self.hits = 1
        """Uses since the key was inserted, which counts as one of them."""
        self.priority = priority
        """The highest of all uses."""
        self.sort_key: SortKey = ()
        """The one that stands in the heap."""


SortKey = tuple[int, ...]

SORT_KEYS: Mapping[str, Callable[[Record], SortKey]] = {
    "lfu": lambda record: (record.hits, record.accessed),
    "slru": lambda record: (int(record.hits >= _PROTECTED_HITS), record.accessed),
    "fifo": lambda record: (record.created,),
    "mru": lambda record: (-record.accessed,),
    "filo": lambda record: (-record.created,),
    "priority": lambda record: (record.priority, record.accessed),
}
"""The sort keys of SGLang, `python/sglang/srt/mem_cache/evict_policy.py` (commit 008b79d2358b). Its `lru` is our `LRU`,
which needs no heap. SGLang sorts nodes of its tree, which are runs of blocks, and evicts leaves only; here each block
is by itself.
"""


class BySortKey(Generic[K]):
    """Evicts the key with the smallest sort key. A call is amortised O(log n): 2 to 4 us. `coldest` is O(most log n).

    A key whose sort key changes gets a new entry in the heap; the stale one is dropped when it is met, or when half of
    all entries are stale. So a single call may take some us for each key, where all were used since the last one: for
    caches of millions of blocks, `lru` and `default` have no such calls.
    """

    def __init__(self, sort_key: Callable[[Record], SortKey]) -> None:
        """`sort_key` differs between any two records, and for a record after each use that changes it."""
        self._sort_key = sort_key
        self._now = 0
        """Counts inserts and touches. All fields: guarded by the owner's lock."""
        self._records: dict[K, Record] = {}
        self._heap: list[tuple[SortKey, K]] = []
        """The entry of each record with its `sort_key`, and stale entries."""

    def insert(self, key: K, use: Use[K]) -> None:
        self._now += 1
        record = self._records[key] = Record(self._now, use.priority)
        record.sort_key = self._sort_key(record)
        self._push(record.sort_key, key)

    def touch(self, key: K, use: Use[K]) -> None:
        self._now += 1
        record = self._records[key]
        record.accessed = self._now
        record.hits += 1
        if use.priority > record.priority:
            record.priority = use.priority
        sort_key = self._sort_key(record)
        if sort_key != record.sort_key:
            record.sort_key = sort_key
            self._push(sort_key, key)

    def remove(self, key: K, *, evicted: bool) -> None:
        del self._records[key]

    def coldest(self, most: int) -> list[K]:
        entries: list[tuple[SortKey, K]] = []
        while self._heap and len(entries) < most:
            if self._is_stale(*self._heap[0]):
                heapq.heappop(self._heap)
            elif most == 1:
                return [self._heap[0][1]]
            else:
                entries.append(heapq.heappop(self._heap))
        for entry in entries:
            heapq.heappush(self._heap, entry)
        return [key for _, key in entries]

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: object) -> bool:
        return key in self._records

    def _push(self, sort_key: SortKey, key: K) -> None:
        heapq.heappush(self._heap, (sort_key, key))
        if len(self._heap) > 2 * len(self._records) + _SLACK:
            self._heap = [(record.sort_key, key) for key, record in self._records.items()]
            heapq.heapify(self._heap)

    def _is_stale(self, sort_key: SortKey, key: K) -> bool:
        record = self._records.get(key)
        return record is None or record.sort_key != sort_key
