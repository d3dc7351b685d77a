"""Turns of requests while several tenants ask: many connections buy a tenant no more of the processor."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvtier.clock import MONOTONIC, Clock
from kvtier.identity.keys import TenantId

_AT_ONCE = 2
"""Requests of a tenant that are handled at a time. More: others wait longer for the interpreter's lock (measured: with
8, hardly better than without turns). Fewer: one core, and the time between two turns, is all that a tenant gets."""
_TURN_S = 0.01
"""How long a turn counts. A request that takes longer waits for a disk or a network, which costs others nothing."""
_SEVERAL_S = 1.0
"""How long after requests of two tenants there are turns. No turn: about 0.2 us a request."""


@dataclass(eq=False, slots=True)
class Turn:
    """The turn of one request. The lock of its `FairTurns` guards it, but for `may_begin`."""

    tenant: TenantId
    until_s: float
    """When it does not count any more; set anew when it begins."""
    may_begin: "threading.Lock | None" = None
    """Released when it begins; None: at once."""


@dataclass(eq=False, slots=True)
class _Turns:
    """Turns of one tenant. The lock of their `FairTurns` guards them."""

    running: list[Turn] = field(default_factory=list)
    """Turns that count, the oldest first."""
    waiting: deque[Turn] = field(default_factory=deque)


class FairTurns:
    """Lets two requests of each tenant be handled at a time, in the order in which they came, while several tenants
    ask. Any thread.

    Each connection and each call of gRPC has a thread, and threads compete for the interpreter's lock as equals:
    without turns, whoever has 60 connections has 60 parts of it. A tenant waits for its own requests alone, so no
    tenant's slow request or client keeps another one's: of a hundred connections the last one begins after half a
    second, if all others are stuck.
    """

    def __init__(self, clock: Clock = MONOTONIC) -> None:
        self._clock = clock
        self._last: TenantId | None = None
        """The tenant that has asked last. Written whole, by any thread: a lost change is made up for by the next."""
        self._several_until_s = float("-inf")
        """When turns end for want of a second tenant. Written as `_last` is."""
        self._lock = threading.Lock()
        self._of: dict[TenantId, _Turns] = {}
        """Tenants that have turns running or waiting. Guarded by _lock."""

    def begin(self, tenant: TenantId) -> Turn | None:
        """Waits for a turn, which `end` takes back. None: nobody else asks, and none is needed."""
        now_s = self._clock()
        if tenant != self._last:
            if self._last is not None:
                self._several_until_s = now_s + _SEVERAL_S
            self._last = tenant
        if now_s >= self._several_until_s:
            return None
        turn = Turn(tenant, now_s + _TURN_S)
        with self._lock:
            turns = self._of.setdefault(tenant, _Turns())
            if len(turns.running) < _AT_ONCE and not turns.waiting:
                turns.running.append(turn)
                return turn
            may_begin = turn.may_begin = threading.Lock()
            may_begin.acquire()
            turns.waiting.append(turn)
            most_s = self._most_s(turns, turn)
        while not may_begin.acquire(timeout=most_s):
            with self._lock:
                self._let_begin(turns)
                most_s = self._most_s(turns, turn)
        return turn

    def end(self, turn: Turn) -> None:
        """The request is over, or failed."""
        with self._lock:
            turns = self._of[turn.tenant]
            if turn in turns.running:
                turns.running.remove(turn)
            self._let_begin(turns)
            if not turns.running and not turns.waiting:
                del self._of[turn.tenant]

    @contextmanager
    def of(self, tenant: TenantId) -> Iterator[None]:
        """Waits for a turn, which is over at the end of the context."""
        turn = self.begin(tenant)
        try:
            yield
        finally:
            if turn is not None:
                self.end(turn)

    def _most_s(self, turns: _Turns, turn: Turn) -> float:
        """How long it takes at most until the turn may begin. Caller holds the lock."""
        place = turns.waiting.index(turn) if turn in turns.waiting else 0
        return _TURN_S * (1 + place // _AT_ONCE)

    def _let_begin(self, turns: _Turns) -> None:
        """Lets those begin that may. Caller holds the lock."""
        if not turns.waiting:
            return
        now_s = self._clock()
        turns.running = [turn for turn in turns.running if turn.until_s > now_s]
        while turns.waiting and len(turns.running) < _AT_ONCE:
            turn = turns.waiting.popleft()
            turn.until_s = now_s + _TURN_S
            turns.running.append(turn)
            assert turn.may_begin is not None, "whoever waits has something to wait for"
            turn.may_begin.release()
