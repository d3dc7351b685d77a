"""Turns of requests while several tenants ask: many connections buy a tenant no more of the processor."""

import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvtier.clock import MONOTONIC, Clock
from kvtier.identity.keys import StoreKey, TenantId
from kvtier.system.interpreter_time import interpreter_s, note_spent
from kvtier.system.short_lock import ShortLock
from kvtier_pool.interpreter_load import InterpreterLoad
from kvtier_pool.one_at_a_time import OneAtATime, Piece

_AT_ONCE = 2
"""Requests of a tenant that are handled at a time. More: others wait longer for the interpreter's lock (measured: with
8, hardly better than without turns). Fewer: one core, and the time between two turns, is all that a tenant gets."""
_TURN_S = 0.01
"""How long a turn counts. A request that takes longer waits for a disk or a network, which costs others nothing."""
_LATE_TURN_S = 0.03
"""How long a turn counts while threads are late: one longer than `_TURN_S` may be waiting for the interpreter."""
_CREDIT_S = 0.02
"""What a tenant has of the interpreter beyond its share when it was quiet: its first requests wait for nothing."""
_MOST_OWED_S = 0.5
"""The longest that a tenant waits for what it has had."""
_PART_KEYS = 256
"""Keys of a turn: about a millisecond, where there is a disk and a Redis. More: others wait as long, several times in
a read. Fewer: the time between two turns counts for more, and so does each exchange with a Redis."""
_LATE_PART_KEYS = 64
"""Keys of a turn that is a piece of `OneAtATime`: others wait longest for what computes without a pause."""
_SEVERAL_S = 1.0
"""How long after requests of two tenants there are turns. No turn: about 0.2 us a request."""


@dataclass(eq=False, slots=True)
class Turn:
    """The turn of one request. The lock of its `FairTurns` guards it, but for `may_begin`."""

    tenant: TenantId
    until_s: float
    """When it does not count any more; set anew when it begins. Infinite while it waits for its piece."""
    may_begin: "threading.Lock | None" = None
    """Released when it begins, or is to look again how long it waits; None: it began at once."""
    looks_s: float = 0.0
    """When it looks next whether it may begin, if nobody lets it."""
    began_s: float = 0.0
    """`interpreter_s` of its thread when it began. That thread's only, as what follows."""
    piece: Piece | None = None
    """What others wait for until its end; None: nobody does."""


@dataclass(eq=False, slots=True)
class _Turns:
    """Turns of one tenant. The lock of their `FairTurns` guards them."""

    running: list[Turn] = field(default_factory=list)
    """Turns that count, the oldest first."""
    waiting: deque[Turn] = field(default_factory=deque)


class FairTurns:
    """Lets two requests of each tenant be handled at a time, in the order in which they came, while several tenants
    ask; and while threads are late, none of a tenant that has had more than its share of the interpreter's time, and
    one of all tenants that soon have, or whose requests wait for each other (`InterpreterLoad`, `OneAtATime`). Any
    thread.

    Each connection and each call of gRPC has a thread, and threads compete for the interpreter's lock as equals:
    without turns, whoever has 60 connections has 60 parts of it. A tenant waits for its own requests alone, so no
    tenant's slow request or client keeps another one's: of a hundred connections the last one begins after half a
    second, if all others are stuck.
    """

    def __init__(self, clock: Clock = MONOTONIC) -> None:
        """`load.start` has it see how late threads are."""
        self._clock = clock
        self.load = InterpreterLoad(clock)
        self.one_at_a_time = OneAtATime(self.load, clock)
        """For requests of tenants that ask for more than they are given, and for other work that can wait."""
        self._last: TenantId | None = None
        """The tenant that has asked last. Written whole, by any thread: a lost change is made up for by the next."""
        self._several_until_s = float("-inf")
        """When turns end for want of a second tenant. Written as `_last` is."""
        self._lock = ShortLock()
        self._of: dict[TenantId, _Turns] = {}
        """Tenants that have turns running or waiting. Guarded by _lock."""
        self._paid_s: dict[TenantId, float] = {}
        """When each tenant has waited for what it has had of the interpreter. Guarded by _lock."""

    def begin(self, tenant: TenantId) -> Turn | None:
        """Waits for a turn, which `end` takes back, on the same thread. None: nobody else asks, and none is needed."""
        now_s = self._clock()
        if tenant != self._last:
            if self._last is not None:
                self._several_until_s = now_s + _SEVERAL_S
            self._last = tenant
        if now_s >= self._several_until_s:
            return None
        self.load.watch_until(self._several_until_s)
        turn = Turn(tenant, now_s)
        self._wait(turn, now_s)
        return turn

    def end(self, turn: Turn) -> None:
        """The request is over, or failed."""
        spent_s = interpreter_s() - turn.began_s
        note_spent(-spent_s)
        self.one_at_a_time.end(turn.piece)
        turn.piece = None
        with self._lock:
            self._charge(turn.tenant, spent_s)
            turns = self._of.get(turn.tenant)
            if turns is None:  # it counted no longer, and those that began after it have ended
                return
            if turn in turns.running:
                turns.running.remove(turn)
            self._let_begin(turns)
            if not turns.running and not turns.waiting:
                del self._of[turn.tenant]

    def parts(self, keys: Sequence[StoreKey], turn: Turn | None) -> Iterator[Sequence[StoreKey]]:
        """The keys of a request in parts, each of which has a turn of its own: all others wait for a part at most.

        :param turn: of the request, which is that of its last part in the end. None: there are no parts.
        """
        if turn is None:
            yield keys
            return
        start = 0
        while True:
            end = start + (_PART_KEYS if turn.piece is None else _LATE_PART_KEYS)
            yield keys[start:end]
            if end >= len(keys):
                return
            start = end
            self.end(turn)
            self._wait(turn, self._clock())

    def charge(self, tenant: TenantId, spent_s: float) -> None:
        """Notes that the tenant has had so much of the interpreter's time: its next turns wait for it."""
        with self._lock:
            self._charge(tenant, spent_s)

    @contextmanager
    def charged(self, tenant: TenantId, began_s: float) -> Iterator[None]:
        """Charges the tenant with what this thread computes inside, but for what its turns are charged with.

        :param began_s: `interpreter_s` of this thread when it began to work for the tenant.
        """
        try:
            yield
        finally:
            if self._clock() < self._several_until_s:
                self.charge(tenant, interpreter_s() - began_s)

    @contextmanager
    def of(self, tenant: TenantId) -> Iterator[Turn | None]:
        """Waits for a turn, which is over at the end of the context."""
        turn = self.begin(tenant)
        try:
            yield turn
        finally:
            if turn is not None:
                self.end(turn)

    def _charge(self, tenant: TenantId, spent_s: float) -> None:
        """Caller holds the lock."""
        now_s = self._clock()
        paid_s = max(self._paid_s.get(tenant, 0.0), now_s - _CREDIT_S) + spent_s / self.load.share
        self._paid_s[tenant] = min(paid_s, now_s + _MOST_OWED_S)

    def _wait(self, turn: Turn, now_s: float) -> None:
        """Waits until the turn may begin."""
        turn.until_s, turn.may_begin = now_s + self._turn_s, None
        with self._lock:
            turns = self._of.setdefault(turn.tenant, _Turns())
            at_once = self._at_once(turn.tenant, now_s)
            if not turns.waiting and len(turns.running) < at_once:
                turns.running.append(turn)
            else:
                turn.may_begin = threading.Lock()
                turn.may_begin.acquire()
                turns.waiting.append(turn)
                most_s = self._most_s(turns, turn)
        while turn.may_begin is not None:
            turn.may_begin.acquire(timeout=most_s)
            with self._lock:
                turn.looks_s = 0.0
                self._let_begin(turns)
                if turn not in turns.waiting:
                    break
                most_s = self._most_s(turns, turn)
        asks_for_much = turn.may_begin is not None or at_once < _AT_ONCE
        if asks_for_much and self.load.share < 1.0:
            turn.until_s = math.inf  # it counts while it waits for its piece, or more and more turns would wait for one
            try:
                turn.piece = self.one_at_a_time.begin()
            finally:
                turn.until_s = self._clock() + self._turn_s
        turn.began_s = interpreter_s()

    def _most_s(self, turns: _Turns, turn: Turn) -> float:
        """How long it takes at most until the turn may begin, or the tenant has paid: then it looks again. Caller holds
        the lock."""
        now_s = self._clock()
        most_s = self._until_it_may_begin_s(turns, turn, now_s)
        turn.looks_s = now_s + most_s
        return most_s

    def _until_it_may_begin_s(self, turns: _Turns, turn: Turn, now_s: float) -> float:
        """Caller holds the lock."""
        owed_s = self._paid_s.get(turn.tenant, 0.0) - now_s
        place = turns.waiting.index(turn) if turn in turns.waiting else 0
        if place:  # those before it begin first, and let it begin
            return max(0.0, owed_s) + self._turn_s * (1 + place // max(1, self._at_once(turn.tenant, now_s)))
        if owed_s > 0:
            return owed_s
        if not turns.running:
            return 0.0
        return min(self._turn_s, max(0.0, turns.running[0].until_s - now_s))

    def _at_once(self, tenant: TenantId, now_s: float) -> int:
        """How many requests of the tenant may be handled at a time: while threads are late, one if it has used half of
        its credit, and none if it has had more than its share. Caller holds the lock."""
        credit_s = now_s - self._paid_s.get(tenant, float("-inf"))
        if self.load.share == 1.0 or credit_s > _CREDIT_S / 2:
            return _AT_ONCE
        return 1 if credit_s >= 0 else 0

    @property
    def _turn_s(self) -> float:
        return _TURN_S if self.load.share == 1.0 else _LATE_TURN_S

    def _let_begin(self, turns: _Turns) -> None:
        """Lets those begin that may. Caller holds the lock."""
        if not turns.waiting:
            return
        now_s = self._clock()
        turns.running = [turn for turn in turns.running if turn.until_s > now_s]
        while turns.waiting and len(turns.running) < self._at_once(turns.waiting[0].tenant, now_s):
            turn = turns.waiting.popleft()
            turn.until_s = now_s + self._turn_s
            turns.running.append(turn)
            _wake(turn)
        if turns.waiting and not turns.running:  # the next one waits for the end of turns that are over
            turn = turns.waiting[0]
            if turn.looks_s > self._paid_s.get(turn.tenant, 0.0):
                _wake(turn)


def _wake(turn: Turn) -> None:
    """Caller holds the lock of its `FairTurns`."""
    assert turn.may_begin is not None, "whoever waits has something to wait for"
    if turn.may_begin.locked():
        turn.may_begin.release()
