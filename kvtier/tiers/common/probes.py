"""Asks a neighbour that is left alone whether it is back, so that no call waits for one that is not."""

import threading
from collections.abc import Callable

from kvtier.tiers.common.breaker import CircuitBreaker


class Probes:
    """While a breaker is open, a thread asks the neighbour for a sign of life every `open_s` seconds. After each sign
    one call may try the neighbour: its success closes the breaker, and its failure costs no other call anything. So a
    neighbour that answers probes and nothing else keeps one call waiting every `open_s` seconds.

    Any thread. Only the probes' own one blocks.
    """

    def __init__(self, name: str, breaker: CircuitBreaker, shows_life: Callable[[], bool]) -> None:
        """
        :param name: the neighbour's, for the thread.
        :param shows_life: asks the neighbour for anything, by a deadline of its own.
        """
        self._name = name
        self._breaker = breaker
        self._shows_life = shows_life
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._has_sign = False
        """Whether one call may try the neighbour. Guarded by _lock, as what follows."""
        self._thread: threading.Thread | None = None

    def may_call(self) -> bool:
        """Whether the neighbour may be called now. Whoever may reports to the breaker how it went."""
        if not self._breaker.is_open:
            return True
        with self._lock:
            has_sign, self._has_sign = self._has_sign, False
        if not has_sign:
            self.begin()
        return has_sign

    def begin(self) -> None:
        """Has the thread run unless it does: when the breaker has opened, or the thread could not start or failed."""
        with self._lock:
            if self._closing.is_set() or (self._thread is not None and self._thread.is_alive()):
                return
            self._has_sign = False
            thread = threading.Thread(target=self._run, name=f"kvtier-probe-{self._name}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread is to be had: the next call tries again
                return
            self._thread = thread

    def close(self) -> None:
        """Ends the thread, after the probe that it makes, if any. Does not wait for it."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(self._breaker.open_s):
            if self._is_over():
                return
            shows_life = self._shows_life()
            with self._lock:
                self._has_sign = shows_life

    def _is_over(self) -> bool:
        """Whether the breaker is closed. Another thread runs when it opens again."""
        with self._lock:
            if self._breaker.is_open:
                return False
            self._thread = None
            return True
