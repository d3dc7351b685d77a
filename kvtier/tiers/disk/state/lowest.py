"""Which of many keys has the lowest value, as values change: a heap whose overtaken entries are passed over."""

import heapq
import math
from collections.abc import Callable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=int | bytes)


class Lowest(Generic[_Key]):
    """Keys, a value each. Not thread-safe: the tier's lock guards it. About 1 us a call, however many there are."""

    def __init__(self) -> None:
        self._values: dict[_Key, int] = {}
        self._heap: list[tuple[int, _Key]] = []
        """Value and key; an entry that is not in `_values` was overtaken."""

    def __len__(self) -> int:
        return len(self._values)

    def put(self, key: _Key, value: int) -> None:
        """The key has this value from now on."""
        if self._values.get(key) != value:
            self._values[key] = value
            heapq.heappush(self._heap, (value, key))
            if len(self._heap) > 2 * len(self._values) + 8:
                self._heap = [(value, key) for key, value in self._values.items()]
                heapq.heapify(self._heap)

    def drop(self, key: _Key) -> None:
        """The key has no value, if it had one."""
        self._values.pop(key, None)

    def first(
        self, skip: Callable[[_Key], bool] = lambda key: False, *, below: float = math.inf
    ) -> tuple[int, _Key] | None:
        """Lowest value, if it is less than `below`, and its key; without those that `skip` says, which cost as much."""
        passed: list[tuple[int, _Key]] = []
        found: tuple[int, _Key] | None = None
        while self._heap and found is None:
            value, key = self._heap[0]
            if self._values.get(key) != value:
                heapq.heappop(self._heap)
            elif value >= below:
                break
            elif skip(key):
                passed.append(heapq.heappop(self._heap))
            else:
                found = value, key
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found
