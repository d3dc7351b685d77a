"""How long a way to the cache pool is left alone after it failed, while another one works.

How often a pool is asked that no way leads to is for the tier's breaker to say (`kvtier.tiers.common.deadlines`). A
connection that has ended, as by a restart of the pool, is replaced at once: that is no failure of its way.
"""

from kvtier.clock import Clock

PAUSE_S = 10.0
"""Small: many calls wait for a way that does not work. Large: one that works again is found late."""


class Pause:
    """A pause in the use of one way to the pool. Any thread: it is a single number, written whole."""

    __slots__ = ("_clock", "_ends_at_s")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends_at_s = float("-inf")

    @property
    def is_over(self) -> bool:
        """The way has not failed of late: it may be tried."""
        return self._clock() >= self._ends_at_s

    def begin(self) -> None:
        """The way has failed, now."""
        self._ends_at_s = self._clock() + PAUSE_S
