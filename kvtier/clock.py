"""Time as a dependency, so that tests own it."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds. `MONOTONIC` in production, a counter in tests."""

MONOTONIC: Clock = time.monotonic


class NeverBehind:
    """The time of day, but never earlier than it was at the start and what has passed since. Any thread.

    A clock that is set back brings back nothing that has ended. One that was ahead for a while is believed again.
    """

    def __init__(self, day: Clock = time.time, monotonic: Clock = MONOTONIC) -> None:
        """:param day: gives seconds since 1970, and may jump."""
        self._day, self._monotonic = day, monotonic
        self._offset_s = day() - monotonic()

    def __call__(self) -> float:
        """Returns seconds since 1970."""
        return max(self._day(), self._monotonic() + self._offset_s)


WALL: Clock = NeverBehind()
"""Seconds since 1970, for what people name: it may jump, but not back."""
