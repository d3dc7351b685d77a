"""A thread that looks after something every now and then, and sleeps while there is nothing to look after."""

import threading
from collections.abc import Callable


class TickingThread:
    """Calls `look` every `tick_s` seconds as long as that says that there is more to come, then sleeps until `wake`.

    Any thread may call its methods. It is a daemon. What `look` raises ends it.
    """

    def __init__(self, name: str, tick_s: float, look: Callable[[], bool]) -> None:
        """:param look: called by the thread, and not before `start`."""
        self._tick_s = tick_s
        self._look = look
        self._stopping = threading.Event()
        self._awake = threading.Event()
        """Set while there may be something to look after, and to end the thread."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread. Once."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """There is something to look after, from the next tick on. 0.1 us while it is awake."""
        self._awake.set()

    def stop(self) -> None:
        """Ends the thread, and waits for a `look` under way. Idempotent; allowed without `start`."""
        self._stopping.set()
        self._awake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._awake.wait() and not self._stopping.wait(self._tick_s):
            self._awake.clear()  # before the look: what it does not see yet sets it again
            if self._look() or self._stopping.is_set():
                self._awake.set()
