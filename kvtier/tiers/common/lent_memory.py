"""Memory of a call that its medium may go on using when the call is over, because the medium hangs."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any


class LentMemory:
    """The buffers of a call, or of a batch in several calls, which the caller of a tier lends it until `when_done`. The
    caller need not wait for a medium that hangs in the middle of a call.

    It serves those calls, then `when_done` or `wait` once, by the same thread. For a call without one, the tier makes
    its own, and waits.
    """

    def __init__(self) -> None:
        self._users: list[Future[Any]] = []
        """Work that uses the buffers still. The calling thread only."""

    def keep(self, users: "Iterable[Future[Any]]") -> None:
        """Called by the tier: notes work that goes on using the buffers."""
        self._users += users

    @property
    def is_in_use(self) -> bool:
        """Whether the call is over and something went on using the buffers."""
        return bool(self._users)

    def when_done(self, give_back: Callable[[], object]) -> None:
        """Calls `give_back` when nobody uses the buffers any more: now, as a rule, or on the thread of the last one
        that does."""
        if not self._users:
            give_back()
            return
        lock, left = threading.Lock(), len(self._users)

        def note(_: "Future[Any]") -> None:
            nonlocal left
            with lock:
                left -= 1
                last = not left
            if last:
                give_back()

        for user in self._users:
            user.add_done_callback(note)

    def wait(self) -> None:
        """Returns when nobody uses the buffers any more: at once, as a rule, or when the medium answers."""
        wait(self._users)
