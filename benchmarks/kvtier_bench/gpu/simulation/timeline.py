"""Virtual time that real threads share.

Threads that take part are called actors. Time stands still while one of them runs, and jumps to the next thing that
happens as soon as all of them wait here. Where several could go on at the same time, a seed chooses the one that goes
first: a run with the same seed takes the same course.
"""

import contextlib
import heapq
import itertools
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_PATIENCE_S = 60.0
"""The real time after which an actor that does not come back is taken to wait for something outside."""


class SimulationError(AssertionError):
    """The simulation cannot go on: nothing can happen any more, or its rules were broken. Its user has to change."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A thread that waits. Guarded by the timeline's lock."""

    is_due: Callable[[], bool]
    is_actor: bool
    what: str
    goes_on: bool = False


class Timeline:
    """The clock of a simulation. Any thread may call it. Without actors, time moves on whenever a thread waits."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 0.0
        """The present time in seconds. Changed under the lock."""
        self.random = random.Random(seed)
        """It is used under the lock, so that its numbers come in the same order each time."""
        self.lock = threading.Condition(threading.RLock())
        """The lock of everything here and of the devices that live in this time."""
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        """What happens when, as a heap. Guarded by the lock."""
        self._order = itertools.count()
        self._waiters: list[_Waiter] = []
        """The actors that wait here. Guarded by the lock."""
        self._num_running = 0
        """The number of actors that do not wait here. Guarded by the lock."""
        self._is_actor = threading.local()

    def clock(self) -> float:
        """The present time, for whoever takes a `kvtier.clock.Clock`."""
        return self.now

    def at(self, seconds: float, happens: Callable[[], None]) -> None:
        """Has `happens` called when so many seconds have passed, under the lock and in any thread."""
        with self.lock:
            heapq.heappush(self._due, (self.now + seconds, next(self._order), happens))

    def sleep(self, seconds: float) -> None:
        """Blocks for so long, in which other threads go on."""
        done: list[None] = []
        with self.lock:
            self.at(seconds, lambda: done.append(None))
            self.wait_for(lambda: bool(done), f"sleeps {seconds} s")

    def wait_for(self, is_due: Callable[[], bool], what: str) -> None:
        """Blocks until `is_due`, which is asked under the lock.

        :raises SimulationError: that will never be, or an actor waits for something outside.
        """
        with self.lock:
            me = _Waiter(is_due, self.is_actor, what)
            self._waiters.append(me)
            self._num_running -= me.is_actor
            try:
                while not me.goes_on:
                    if self._num_running == 0:
                        self._move()
                    elif not self.lock.wait(_PATIENCE_S):
                        raise SimulationError(f"an actor does not come back: {self._where_all_are()}")
            except BaseException:
                self._num_running += me.is_actor
                raise
            finally:
                self._waiters.remove(me)

    @property
    def is_actor(self) -> bool:
        """Whether the calling thread is an actor."""
        return getattr(self._is_actor, "here", False)

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """The calling thread is an actor within the context."""
        self.begin_acting()
        self._is_actor.here = True
        try:
            yield
        finally:
            self._is_actor.here = False
            self.end_acting()

    @contextlib.contextmanager
    def taking_over(self) -> Iterator[None]:
        """The calling thread is, within the context, the actor that `begin_acting` has announced."""
        self._is_actor.here = True
        try:
            yield
        finally:
            self._is_actor.here = False

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """The calling thread is no actor within the context: it waits for other actors by a lock, or for their end."""
        was_actor = self.is_actor
        if was_actor:
            self._is_actor.here = False
            self.end_acting()
        try:
            yield
        finally:
            if was_actor:
                self.begin_acting()
                self._is_actor.here = True

    def begin_acting(self) -> None:
        """Counts one more actor. Time waits for it even if its thread has not started yet."""
        with self.lock:
            self._num_running += 1

    def end_acting(self) -> None:
        """Counts one actor less."""
        with self.lock:
            self._num_running -= 1
            self.lock.notify_all()

    def _move(self) -> None:
        """Lets one thread go on; where none can, the next thing happens. The caller holds the lock."""
        due = [waiter for waiter in self._waiters if not waiter.goes_on and waiter.is_due()]
        if due:
            chosen = self.random.choice(due)
            chosen.goes_on = True
            self._num_running += chosen.is_actor
            self.lock.notify_all()
            return
        if not self._due:
            raise SimulationError(f"nothing can happen any more: {[waiter.what for waiter in self._waiters]}")
        self.now, _, happens = heapq.heappop(self._due)
        happens()

    def _where_all_are(self) -> str:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        stacks = {names.get(i): "".join(traceback.format_stack(frame)[-6:]) for i, frame in frames.items()}
        return "\n".join(f"{name}:\n{stack}" for name, stack in stacks.items())
