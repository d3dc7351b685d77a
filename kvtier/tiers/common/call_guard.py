"""How a tier closes: new calls are refused, calls in flight end first."""

import threading
from types import TracebackType

from kvtier.errors import ClosedError


class CallGuard:
    """Every public call of a tier runs inside `with gate:`, entered once per call. Any thread."""

    def __init__(self, name: str) -> None:
        """:param name: who is closed, for the message of `ClosedError`."""
        self._name = name
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        """Notified when the last call ends and somebody waits for it."""
        self._num_calls = 0
        """Calls in flight. Guarded by _lock."""
        self._closed = False
        """Guarded by _lock."""

    def __enter__(self) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._name} is closed")
            self._num_calls += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._num_calls -= 1
            if self._closed and not self._num_calls:
                self._idle.notify_all()

    def close(self) -> bool:
        """Refuses new calls and waits for those in flight. True for the one caller who closed it.

        Never call it from inside the gate, event sinks included: it would wait for itself.
        """
        with self._idle:
            first = not self._closed
            self._closed = True
            self._idle.wait_for(lambda: not self._num_calls)
            return first
