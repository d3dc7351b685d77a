"""Tokens of one request on their way from the engine's thread to the event loop."""

import asyncio
import contextlib
import threading

from kvtier_engine.scheduling.request import Completion


class TokenFeed:
    """Holds what nobody has taken yet: at most the tokens of one answer, however slow the reader is.

    `put` and `end` are for the engine's thread and cost one lock, and a wake-up of the loop unless one is under way.
    Everything else is for the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._tokens: list[int] = []  # guarded by _lock
        self._completion: Completion | None = None  # guarded by _lock
        self._waking = False  # guarded by _lock; the loop has been told and has not looked yet
        self._news = asyncio.Event()  # event loop only

    def put(self, token_id: int) -> None:
        """One more token."""
        with self._lock:
            self._tokens.append(token_id)
            waking, self._waking = self._waking, True
        if not waking:
            self._wake()

    def end(self, completion: Completion) -> None:
        """No more tokens."""
        with self._lock:
            self._completion = completion
            waking, self._waking = self._waking, True
        if not waking:
            self._wake()

    def interrupt(self) -> None:
        """Ends the present `wait`, or else the next one."""
        self._news.set()

    async def wait(self) -> None:
        """Waits until there is something to take, or an interruption."""
        await self._news.wait()

    def take(self) -> tuple[list[int], Completion | None]:
        """The tokens that came since the last time; the completion once there is one."""
        self._news.clear()
        with self._lock:
            tokens, self._tokens = self._tokens, []
            self._waking = False
            return tokens, self._completion

    def _wake(self) -> None:
        # The loop may be closed already when a long step ends after the grace period of a stop: nobody waits then.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._news.set)
