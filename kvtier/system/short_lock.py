"""A lock for sections of some microseconds that dozens of threads pass through."""

import os
import threading
import time

_NUM_YIELDS = 8
"""How often a thread lets the others run before it sleeps: whoever holds the lock needs the interpreter, not time."""
_FIRST_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 1e-3


class ShortLock:
    """Instead of `threading.Lock`, also under a `threading.Condition`. Any thread; not reentrant, and in no order.

    A thread that blocks on a `threading.Lock` is given it while it has not got the interpreter (the GIL), and holds it
    for as long as it waits for that, up to 5 ms beside each thread that computes. All others come to the lock in this
    time: once a few threads wait for it, every thread does. Here a thread takes the lock only while it has the
    interpreter, and lets others run in between. So the lock is nearly always free whenever somebody looks.

    Not for sections that wait for anything: threads that find the lock taken look again and again, at first at once
    and then every millisecond.
    """

    __slots__ = ("_lock", "release")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.release = self._lock.release
        """Gives the lock back; `RuntimeError` where nobody has it."""

    def acquire(self, blocking: bool = True) -> bool:
        """Takes the lock, and waits for it unless `blocking` is False. False: it is taken."""
        if self._lock.acquire(False):
            return True
        if not blocking:
            return False
        self._wait()
        return True

    def __enter__(self) -> None:
        if not self._lock.acquire(False):
            self._wait()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _wait(self) -> None:
        for _ in range(_NUM_YIELDS):
            os.sched_yield()
            if self._lock.acquire(False):
                return
        sleep_s = _FIRST_SLEEP_S
        while not self._lock.acquire(False):
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
