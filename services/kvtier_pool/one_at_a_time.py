"""Work that can wait is done one piece at a time while the threads of a pool are late."""

import threading
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from kvtier.clock import MONOTONIC, Clock
from kvtier.memory.buffers import ReadableBuffer
from kvtier.system.short_lock import ShortLock
from kvtier.tiers.base import Item
from kvtier_pool.interpreter_load import InterpreterLoad

_COUNTS_S = 0.003
"""How long a piece keeps the next one waiting. A piece that takes longer mostly waits for a disk or for its client.
More: who lets the pool wait in each piece holds up others for as long. Less: more threads compute side by side."""
_LONG_WAIT_S = 0.01
"""The longest that a piece waits. It begins beside others then, and a batch is written whole: however many clients let
the pool wait, nobody is kept for longer, and no tier falls behind."""
_PART_BYTES = 512 << 10
"""Payload that is written down in a piece, or the block that exceeds it. More: a request waits longer for its piece.
Less: more calls of a tier, by which it falls behind."""


@dataclass(eq=False, slots=True)
class Piece:
    """A piece of work. The lock of its `OneAtATime` guards it, but for `may_begin`."""

    until_s: float = 0.0
    """When the next piece begins though this one is not done; set when this one begins."""
    may_begin: threading.Lock = field(default_factory=threading.Lock)
    """Released when it begins."""


class OneAtATime:
    """While threads are late, lets one piece of work begin when the one before it is done. The work is that of tenants
    that ask for more than they are given (`FairTurns`), and all that is written down. Each kind begins in the order in
    which it came, and the two take turns, so what tenants ask keeps nobody's blocks from a disk. Any thread.

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
        self._requests: deque[Piece] = deque()
        """The pieces that wait, the oldest first: few of each tenant, whose turns count meanwhile."""
        self._writes: deque[Piece] = deque()
        """The pieces of what is written down, likewise: one of each writer's thread at most."""
        self._is_turn_of_writes = False
        """Whether the next piece is one of `_writes`, if any waits."""

    def begin(self) -> Piece | None:
        """Waits until a piece of a request may begin, 10 ms at most; `end` ends it. None: threads are in time, and it
        need not wait."""
        return self._begin(self._requests)

    def end(self, piece: Piece | None) -> None:
        """The piece is done, or failed."""
        if piece is None:
            return
        with self._lock:
            if self._running is piece:
                self._running = None
            self._begin_next()

    def parts(self, items: Sequence[Item[ReadableBuffer]]) -> Generator[Sequence[Item[ReadableBuffer]], None, None]:
        """The blocks to write down in parts, each of which is a piece of work until the next one is asked for. All of
        them at once while threads are in time, and all that are left where the piece has waited for as long as any may.

        The caller closes the generator."""
        start = 0
        while start < len(items):
            asked_s = self._clock()
            piece = self._begin(self._writes)
            is_small = piece is not None and self._clock() < asked_s + _LONG_WAIT_S
            end = _end_of_part(items, start) if is_small else len(items)
            try:
                yield items[start:end]
            finally:
                self.end(piece)
            start = end

    def _begin(self, waiting: deque[Piece]) -> Piece | None:
        """`begin` of a piece that waits among others of its kind."""
        if self._load.share == 1.0:
            return None
        piece, until_s = Piece(), self._clock() + _LONG_WAIT_S
        piece.may_begin.acquire()
        with self._lock:
            waiting.append(piece)
            self._begin_next()
            looks_s = self._looks_s(piece, waiting, until_s)
        while not piece.may_begin.acquire(timeout=looks_s):
            with self._lock:
                self._begin_next()
                looks_s = self._looks_s(piece, waiting, until_s)
                if piece in waiting and self._clock() >= until_s:
                    waiting.remove(piece)
                    break
        return piece

    def _begin_next(self) -> None:
        """Lets the next piece begin if it may. Caller holds the lock."""
        now_s = self._clock()
        if not (self._requests or self._writes) or (self._running is not None and self._running.until_s > now_s):
            return
        are_writes = bool(self._writes) and (self._is_turn_of_writes or not self._requests)
        self._running = (self._writes if are_writes else self._requests).popleft()
        self._is_turn_of_writes = not are_writes
        self._running.until_s = now_s + _COUNTS_S
        self._running.may_begin.release()

    def _looks_s(self, piece: Piece, waiting: Sequence[Piece], until_s: float) -> float:
        """After how many seconds a piece that waits until `until_s` looks whether the next one may begin: the first one
        when the running one counts no longer, each later one a piece later. Caller holds the lock."""
        if self._running is None or piece not in waiting:
            return 0.0
        now_s = self._clock()
        counts_s = max(0.0, self._running.until_s - now_s) + waiting.index(piece) * _COUNTS_S
        return max(0.0, min(counts_s, until_s - now_s))


def _end_of_part(items: Sequence[Item[ReadableBuffer]], start: int) -> int:
    """Where the part ends that begins at `start`."""
    end, nbytes = start, 0
    while end < len(items) and nbytes < _PART_BYTES:
        nbytes += len(items[end][1])
        end += 1
    return end
