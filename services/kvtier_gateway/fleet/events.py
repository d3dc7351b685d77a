"""What happens next: the clock of a simulation."""

import heapq
from collections.abc import Callable
from typing import Any


class Events:
    """Calls in the order of their times; those of one time in the order in which they were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.now_s = 0.0

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> None:
        """Calls `call(*args)` at that time."""
        self._count += 1
        heapq.heappush(self._heap, (time_s, self._count, call, args))

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Calls `call(*args)` so much later than now."""
        self.at(self.now_s + delay_s, call, *args)

    def run(self) -> None:
        """Makes the calls in the order of their times, until none is left."""
        while self._heap:
            self.now_s, _, call, args = heapq.heappop(self._heap)
            call(*args)
