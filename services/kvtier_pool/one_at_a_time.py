"""Work that can wait is done one piece at a time while the threads of a pool are late."""

import threading
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvtier.clock import MONOTONIC, Clock
from kvtier.system.short_lock import ShortLock
from kvtier_pool.interpreter_load import InterpreterLoad

_Item = TypeVar("_Item")
_COUNTS_S = 0.01
"""How long a piece keeps the next one waiting. A piece that takes longer waits for a disk or a network."""
_PART_BLOCKS = 2
"""Blocks that are written down in a piece that has not waited as long as one counts. More: a request waits longer for
its piece. Fewer: more calls of a tier."""


@dataclass(eq=False, slots=True)
class Piece:
    """A piece of work. The lock of its `OneAtATime` guards it, but for `may_begin`."""

    until_s: float = 0.0
    """When the next piece begins though this one is not done; set when this one begins."""
    may_begin: threading.Lock = field(default_factory=threading.Lock)
    """Released when it begins."""


class OneAtATime:
    """While threads are late, lets one piece of work begin when the one before it is done, in the order in which they
    came. The work is that of tenants that ask for more than they are given (`FairTurns`), and all that is written down.
    Any thread.

    A thread gives the interpreter up with each system call, and has it back before a thread that wakes up for it has
    reached a core. So a request waits for several steps of each thread that computes, and here there are few of them
    (docs/adr/0031-fair-scheduling.md). Requests of tenants that ask for little go past all this, as packets of sparse
    flows do (FQ-CoDel, RFC 8290).
    """

    def __init__(self, load: InterpreterLoad, clock: Clock = MONOTONIC) -> None:
        """:param load: says whether threads are late; the caller's."""
        self._load = load
        self._clock = clock
        self._lock = ShortLock()
        self._running: Piece | None = None
        """The piece that others wait for. Guarded by _lock, as what follows."""
        self._waiting: deque[Piece] = deque()

    def begin(self) -> Piece | None:
        """Waits until a piece of work may begin, which `end` ends. None: threads are in time, and it
        need not wait."""
        if self._load.share == 1.0:
            return None
        piece = Piece()
        piece.may_begin.acquire()
        with self._lock:
            self._waiting.append(piece)
            most_s = self._begin_next(piece)
        while not piece.may_begin.acquire(timeout=most_s):
            with self._lock:
                most_s = self._begin_next(piece)
        return piece

    def end(self, piece: Piece | None) -> None:
        """The piece is done, or failed."""
        if piece is None:
            return
        with self._lock:
            if self._running is piece:
                self._running = None
            self._begin_next(piece)

    def blocks(self, items: Sequence[_Item]) -> Generator[Sequence[_Item], None, None]:
        """The blocks to write down in parts, each of which is a piece of work until the next one is asked for. All of
        them at once while threads are in time, or where the piece has waited for long: slow clients, each piece of
        which counts for as long as any may, do not slow down what others have written.

        The caller closes the generator."""
        start = 0
        while start < len(items):
            asked_s = self._clock()
            piece = self.begin()
            is_small = piece is not None and self._clock() < asked_s + _COUNTS_S
            end = start + _PART_BLOCKS if is_small else len(items)
            try:
                yield items[start:end]
            finally:
                self.end(piece)
            start = end

    def _begin_next(self, piece: Piece) -> float:
        """Lets the next piece begin if it may. Returns how long it takes at most until `piece` may. Caller holds the
        lock."""
        now_s = self._clock()
        if self._waiting and (self._running is None or self._running.until_s <= now_s):
            self._running = self._waiting.popleft()
            self._running.until_s = now_s + _COUNTS_S
            self._running.may_begin.release()
        if self._running is None or piece not in self._waiting:
            return 0.0
        return max(0.0, self._running.until_s - now_s) + self._waiting.index(piece) * _COUNTS_S
