"""Log lines that a failing medium or network cannot turn into a flood."""

import logging
import threading

from kvtier.clock import MONOTONIC, Clock


class QuietLog:
    """Passes at most one warning per `interval_s` and says how many it held back. Any thread."""

    def __init__(
        self,
        log: logging.Logger | logging.LoggerAdapter[logging.Logger],
        *,
        interval_s: float = 30.0,
        clock: Clock = MONOTONIC,
    ) -> None:
        self._log = log
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._next_s: float | None = None
        """When the next line may pass; None before the first. Guarded by _lock."""
        self._num_held_back = 0
        """The number of messages held back since the last line. Guarded by _lock."""

    def warning(self, message: str) -> None:
        """Logs `message`, or counts it until a line may pass again."""
        with self._lock:
            now = self._clock()
            if self._next_s is not None and now < self._next_s:
                self._num_held_back += 1
                return
            self._next_s = now + self._interval_s
            held_back, self._num_held_back = self._num_held_back, 0
        if held_back:
            message = f"{message} ({held_back} more since the last line)"
        self._log.warning("%s", message)
