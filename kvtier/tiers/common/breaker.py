"""Keeps a dead neighbour from being asked, and waited for, again and again."""

import threading

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import InvalidInputError


class CircuitBreaker:
    """Closed: everybody may call. After `threshold` failures in a row it opens: nobody may, except one caller of
    `allow` every `open_s` seconds, or whom `Probes` admit. The first success closes it.

    Any thread; nothing blocks. A caller that was allowed reports `success` or `failure`; one that never reports is
    followed by the next one.
    """

    def __init__(self, threshold: int, open_s: float, clock: Clock = MONOTONIC) -> None:
        """
        :param threshold: failures in a row that open it, from 1.
        :param open_s: seconds between callers while it is open, above 0.
        """
        if threshold < 1 or open_s <= 0:
            raise InvalidInputError(f"breaker with threshold {threshold} and open_s {open_s}: need >= 1 and > 0")
        self._threshold = threshold
        self.open_s = open_s
        """Seconds between callers while it is open, or between probes. Not changed."""
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        """The number of failures in a row. Guarded by _lock."""
        self._next_at: float | None = None
        """When the next caller may go; None while closed. Guarded by _lock."""

    def another(self) -> "CircuitBreaker":
        """A closed one with the same settings, for another neighbour."""
        return CircuitBreaker(self._threshold, self.open_s, self._clock)

    @property
    def is_open(self) -> bool:
        """Whether the neighbour is left alone."""
        with self._lock:
            return self._next_at is not None

    def allow(self) -> bool:
        """Whether the caller may try now."""
        with self._lock:
            if self._next_at is None:
                return True
            now = self._clock()
            if now < self._next_at:
                return False
            self._next_at = now + self.open_s
            return True

    def success(self) -> bool:
        """The neighbour answered. True when that closed the breaker."""
        with self._lock:
            was_open = self._next_at is not None
            self._failures = 0
            self._next_at = None
            return was_open

    def failure(self) -> bool:
        """The neighbour did not answer. True when that opened the breaker."""
        with self._lock:
            was_open = self._next_at is not None
            self._failures += 1
            if was_open or self._failures >= self._threshold:
                self._next_at = self._clock() + self.open_s
            return not was_open and self._next_at is not None
