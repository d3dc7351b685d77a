"""Whether the medium hangs: which of its operations are under way, and since when."""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import InvalidInputError

_LOOK_S = 0.25
"""Seconds between two looks of those who wait: the time that an operation may take can become shorter."""


class HangWatch:
    """The medium hangs from when one of its operations has taken longer than `timeout_s` until that one, and all that
    were under way with it, have ended.

    So nobody has to try whether it answers again: the operations that hung end, and that is the answer. Any thread. A
    hang is noticed by whoever waits for the medium, or asks. About 2 us per operation.
    """

    def __init__(self, timeout_s: float, on_change: Callable[[str | None], None], clock: Clock = MONOTONIC) -> None:
        """
        :param timeout_s: seconds for one operation, above 0.
        :param on_change: told why the medium hangs, and None when it answers again. Called without the lock, by one
            thread at a time, and in the order of the changes; must not block.
        """
        if not timeout_s > 0:
            raise InvalidInputError(f"timeout of {timeout_s} s for the medium: needs more than 0")
        self._timeout_s = timeout_s
        """Guarded by _lock."""
        self._on_change = on_change
        self._clock = clock
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._begun: dict[int, tuple[float, str]] = {}
        """When each operation under way began, and its name; the oldest first. Guarded by _lock."""
        self._hangs = False
        """Guarded by _lock."""
        self._first_after = 0
        """The medium hangs until every operation with a lower number has ended. Guarded by _lock."""
        self._telling = threading.Lock()
        """Held while `on_change` is told."""
        self._told = False
        """What `on_change` was last told. Guarded by _telling."""

    def hurry(self, timeout_s: float) -> None:
        """Lowers the time that an operation may take, from now on, to `timeout_s` if it is longer."""
        with self._lock:
            self._timeout_s = min(self._timeout_s, timeout_s)

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """One call of the system that may hang."""
        number = next(self._numbers)
        with self._lock:
            self._begun[number] = self._clock(), name
        try:
            yield
        finally:
            with self._lock:
                del self._begun[number]
                changed = self._hangs and not self._look()
            if changed:
                self._tell()

    def hangs(self) -> bool:
        """Whether the medium hangs at this moment."""
        if not self._begun:  # unlocked: an operation that has just begun does not hang yet
            return False
        with self._lock:
            before, now = self._hangs, self._look()
        if before != now:
            self._tell()
        return now

    def wait(self, futures: "list[Future[Any]]") -> "list[Future[Any]]":
        """Waits until all are done, or the medium hangs; which of them are not done then."""
        left = futures
        while left:
            left = list(wait(left, timeout=self._next_look_s()).not_done)
            if left and self.hangs():
                break
        return left

    def _look(self) -> bool:
        """Whether the medium hangs by the clock, which it also notes. The caller holds _lock."""
        if self._hangs and any(number < self._first_after for number in self._begun):
            return True
        oldest = next(iter(self._begun.values()), None)
        self._hangs = oldest is not None and self._clock() - oldest[0] >= self._timeout_s
        if self._hangs:
            self._first_after = next(self._numbers)
        return self._hangs

    def _next_look_s(self) -> float:
        """Seconds until an operation that is under way may be one that hangs."""
        with self._lock:
            oldest = next(iter(self._begun.values()), None)
            left_s = oldest[0] + self._timeout_s - self._clock() if oldest is not None else self._timeout_s
        return min(_LOOK_S, max(0.001, left_s))

    def _tell(self) -> None:
        with self._telling:
            with self._lock:
                hangs, oldest = self._hangs, next(iter(self._begun.values()), None)
                timeout_s = self._timeout_s
            if hangs == self._told:
                return
            self._told = hangs
            name = oldest[1] if oldest is not None else "an operation"
            self._on_change(f"its medium hangs: {name} takes more than {timeout_s:g} s" if hangs else None)
