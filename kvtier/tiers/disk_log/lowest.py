"""Which of many numbers has the lowest value, as values change: a heap whose overtaken entries are passed over."""

import heapq
from collections.abc import Callable


class Lowest:
    """Numbers, a value each. Not thread-safe: the tier's lock guards it. About 1 us a call, however many there are."""

    def __init__(self) -> None:
        self._values: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        """Value and number; an entry that is not in `_values` was overtaken."""

    def __len__(self) -> int:
        return len(self._values)

    def put(self, number: int, value: int) -> None:
        """The number has this value from now on."""
        if self._values.get(number) != value:
            self._values[number] = value
            heapq.heappush(self._heap, (value, number))
            if len(self._heap) > 2 * len(self._values) + 8:
                self._heap = [(value, number) for number, value in self._values.items()]
                heapq.heapify(self._heap)

    def drop(self, number: int) -> None:
        """The number has no value, if it had one."""
        self._values.pop(number, None)

    def first(self, skip: Callable[[int], bool] = lambda number: False) -> tuple[int, int] | None:
        """Lowest value and its number, without those that `skip` says: these cost as much each."""
        passed: list[tuple[int, int]] = []
        found: tuple[int, int] | None = None
        while self._heap and found is None:
            value, number = self._heap[0]
            if self._values.get(number) != value:
                heapq.heappop(self._heap)
            elif skip(number):
                passed.append(heapq.heappop(self._heap))
            else:
                found = value, number
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found
