"""Tokens of one request on their way from the engine's thread to the event loop."""

import asyncio
import contextlib
import threading

from kvtier_engine.scheduling.completion import Completion, NewToken


class TokenFeed:
    """Holds what nobody has taken yet: at most the tokens of all answers, however slow the reader is.

    `put` and `end` are for the engine's thread and cost one lock, and a wake-up of the loop unless one is under way.
    Everything else is for the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._tokens: list[NewToken] = []  # guarded by _lock
        self._ended: list[Completion] = []  # guarded by _lock
        self._waking = False  # guarded by _lock; the loop has been told and has not looked yet
        self._news = asyncio.Event()  # event loop only

    def put(self, token: NewToken) -> None:
        """One more token."""
        with self._lock:
            self._tokens.append(token)
            waking, self._waking = self._waking, True
        if not waking:
            self._wake()

    def end(self, completion: Completion) -> None:
        """Ends the tokens of this branch."""
        with self._lock:
            self._ended.append(completion)
            waking, self._waking = self._waking, True
        if not waking:
            self._wake()

    def interrupt(self) -> None:
        """Ends the present `wait`, or else the next one."""
        self._news.set()

    async def wait(self) -> None:
        """Waits until there is something to take, or an interruption."""
        await self._news.wait()

    def take(self) -> tuple[list[NewToken], list[Completion]]:
        """The tokens that came since the last time, and the branches that ended with them."""
        self._news.clear()
        with self._lock:
            tokens, self._tokens = self._tokens, []
            ended, self._ended = self._ended, []
            self._waking = False
            return tokens, ended

    def _wake(self) -> None:
        # The loop may be closed already when a long step ends after the grace period of a stop: nobody waits then.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._news.set)
