"""Keeps a dead neighbour from being asked, and waited for, again and again."""

import threading

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import InvalidInputError


class CircuitBreaker:
    """Closed: everybody may call. After `threshold` failures in a row it opens: nobody may, except one
    probe every `open_s` seconds. The first success closes it.

    Any thread; nothing blocks. A caller that was allowed reports `success` or `failure`; a probe that never
    reports is replaced by the next one.
    """

    def __init__(self, threshold: int, open_s: float, clock: Clock = MONOTONIC) -> None:
        """
        :param threshold: failures in a row that open it, from 1.
        :param open_s: seconds between probes, above 0.
        """
        if threshold < 1 or open_s <= 0:
            raise InvalidInputError(f"breaker with threshold {threshold} and open_s {open_s}: need >= 1 and > 0")
        self._threshold = threshold
        self.open_s = open_s
        """Seconds between probes. Not changed."""
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        """The number of failures in a row. Guarded by _lock."""
        self._probe_at: float | None = None
        """When the next probe may go; None while closed. Guarded by _lock."""

    def another(self) -> "CircuitBreaker":
        """A closed one with the same settings, for another neighbour."""
        return CircuitBreaker(self._threshold, self.open_s, self._clock)

    @property
    def is_open(self) -> bool:
        """Whether the neighbour is left alone, but for probes."""
        with self._lock:
            return self._probe_at is not None

    def allow(self) -> bool:
        """Whether the caller may try now."""
        with self._lock:
            if self._probe_at is None:
                return True
            now = self._clock()
            if now < self._probe_at:
                return False
            self._probe_at = now + self.open_s
            return True

    def success(self) -> bool:
        """The neighbour answered. True when that closed the breaker."""
        with self._lock:
            was_open = self._probe_at is not None
            self._failures = 0
            self._probe_at = None
            return was_open

    def failure(self) -> bool:
        """The neighbour did not answer. True when that opened the breaker."""
        with self._lock:
            was_open = self._probe_at is not None
            self._failures += 1
            if was_open or self._failures >= self._threshold:
                self._probe_at = self._clock() + self.open_s
            return not was_open and self._probe_at is not None
