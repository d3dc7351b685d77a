"""Memory of a call that its medium may go on using when the call is over, because the medium hangs."""

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from kvtier.tiers.common.call_guard import CallGuard


class LentMemory:
    """Who calls a tier with one of these lends it the buffers of that call until `when_done`, which saves a copy.

    One call, then `when_done` once, by the same thread. Without it, a tier that may hang copies.
    """

    def __init__(self) -> None:
        self._users: list[Future[Any]] = []
        """Work that uses the buffers still. The calling thread only."""

    def keep(self, users: "Iterable[Future[Any]]") -> None:
        """For the tier: these go on using the buffers."""
        self._users += users

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


def memory_of_call(lent: LentMemory | None) -> AbstractContextManager[CallGuard | None]:
    """For the tier: what the buffers of a call are used inside of, never after the call. None: they are lent."""
    return contextlib.nullcontext() if lent is not None else contextlib.closing(CallGuard("a call"))
