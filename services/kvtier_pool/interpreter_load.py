"""How late the threads of a pool are, and what part of the interpreter's time a tenant may have therefore."""

from kvtier.clock import MONOTONIC, Clock
from kvtier.system.ticking_thread import TickingThread

_TICK_S = 0.005
_NUM_TICKS = 20
"""Ticks between two decisions."""
_LATE_S = 0.0003
"""Threads that wake up later than that on average wait for each other. A small number slows tenants that do no harm,
a large one leaves the others waiting."""
_LEAST_SHARE = 0.15
"""What a tenant may have however late threads are: enough for some hundred requests a second."""
_SLOWED, _GROWTH = 0.7, 0.03
"""The share is multiplied by the one while threads are late, and grows by the other while they are not: it falls in
some tenths of a second and comes back in some seconds."""
_FIRST_GROWTH = 2.0
"""The share begins at the least, later where it was when several tenants asked before, and is multiplied by this until
threads are late for the first time: who does no harm has all of it after three decisions, and keeps it. If it began at
1, a flood would have its way for as long as it takes to fall."""


class InterpreterLoad:
    """Looks, while somebody wants to know, how late a thread is that sleeps for a moment: it waits for a core, and then
    for the interpreter, as all do whose request has come. Any thread may call its methods."""

    def __init__(self, clock: Clock = MONOTONIC) -> None:
        """`start` starts the thread; without, the share stays 1."""
        self._clock = clock
        self.share = 1.0
        """Seconds of the interpreter that each tenant may have in a second. Written by the thread alone."""
        self._asked_until_s = float("-inf")
        """The time until which somebody wants to know. Written whole, by any thread."""
        self._is_watching = False
        """Whether the thread looks. Written whole; a change that is lost is made up for by the next request."""
        self._looked_s = 0.0
        """When the thread looked last. That thread only, as all below."""
        self._is_first = False
        """Whether threads have not been late since it began to look."""
        self._last_share = _LEAST_SHARE
        """The share when it looked last."""
        self._late_s = 0.0
        self._num_ticks = 0
        self._thread = TickingThread("kvtier-load", _TICK_S, self._look)

    def start(self) -> None:
        """Starts the thread. Once."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; the share is 1. Idempotent; allowed without `start`."""
        self._thread.stop()
        self.share = 1.0

    def watch_until(self, until_s: float) -> None:
        """Looks from now on until then. 0.1 us."""
        self._asked_until_s = until_s
        if not self._is_watching:
            self._is_watching = True
            self._thread.wake()

    def note(self, late_s: float) -> None:
        """Takes in how late the thread was once. That thread only."""
        self._late_s += max(0.0, late_s)
        self._num_ticks += 1
        if self._num_ticks < _NUM_TICKS:
            return
        if self._late_s > _LATE_S * self._num_ticks:
            self.share, self._is_first = max(_LEAST_SHARE, self.share * _SLOWED), False
        else:
            self.share = min(1.0, self.share * _FIRST_GROWTH if self._is_first else self.share + _GROWTH)
        self._late_s, self._num_ticks = 0.0, 0

    def _look(self) -> bool:
        now_s = self._clock()
        if self._looked_s:
            self.note(now_s - self._looked_s - _TICK_S)
        else:
            self.share, self._is_first = self._last_share, True
        if now_s < self._asked_until_s:
            self._looked_s = self._clock()
            return True
        self._is_watching = False
        self._last_share, self.share = self.share, 1.0
        self._looked_s = self._late_s = 0.0
        self._num_ticks = 0
        return False
