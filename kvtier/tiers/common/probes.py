"""Asks a neighbour that is left alone whether it is back, so that no call waits for one that is not."""

import enum
import threading
from collections.abc import Callable

from kvtier.tiers.common.breaker import CircuitBreaker


class Admission(enum.Enum):
    """Whether a call may be made."""

    CALL = enum.auto()
    """It may: the breaker is closed."""
    TRIAL = enum.auto()
    """It may, as the only one: the breaker is open, and the neighbour has answered a probe. `end_trial` follows."""
    NONE = enum.auto()
    """The neighbour is left alone."""


class Probes:
    """While a breaker is open, a thread asks the neighbour for a sign of life every `open_s` seconds. After a sign one
    call may try the neighbour, and its success closes the breaker. While it does, and for `open_s` seconds after, there
    is no other one: a neighbour that answers probes and nothing else keeps one call at a time waiting.

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
        """Whether a call may try the neighbour. Guarded by _lock, as what follows."""
        self._tries = False
        """Whether a call does."""
        self._rests = False
        """Whether one has ended since the thread was last awake."""
        self._thread: threading.Thread | None = None

    def admit(self) -> Admission:
        """Says whether a call may be made; the breaker is to be told how it went."""
        if not self._breaker.is_open:
            return Admission.CALL
        with self._lock:
            self._tries = self._tries or self._has_sign
            has_sign, self._has_sign = self._has_sign, False
        if has_sign:
            return Admission.TRIAL
        self.begin()
        return Admission.NONE

    def end_trial(self) -> None:
        """The call that tried the neighbour is over, and the breaker knows how it went."""
        with self._lock:
            self._tries, self._rests = False, True

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

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    def close(self) -> None:
        """Ends the thread, after the probe that it makes, if any. Does not wait for it."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(self._breaker.open_s):
            with self._lock:
                if not self._breaker.is_open:
                    self._thread = None  # another one runs when the breaker opens again
                    return
                rests, self._rests = self._tries or self._rests, False
            if not rests:
                shows_life = self._shows_life()
                with self._lock:
                    self._has_sign = shows_life and not (self._tries or self._rests)
