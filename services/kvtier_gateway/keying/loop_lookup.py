"""Lookups that the event loop sends and receives itself, so that no thread has to wake up for them."""

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from kvtier.clock import MONOTONIC
from kvtier.errors import KvtierError
from kvtier.identity.keys import StoreKey
from kvtier.protocol.block import Verb
from kvtier.protocol.groups import Grouped, group
from kvtier.tiers.base import Status
from kvtier.tiers.common.metered import TimedCalls
from kvtier.tiers.pool.calls import PoolCalls
from kvtier.tiers.pool.connection import PoolConnection

_MOST_KEYS = 1024
"""The most keys that are asked for and not answered yet. Their 32 KiB fit into the buffers of any socket, so that
sending them never waits for the pool."""
_REST_S = 0.005
"""Seconds for which the loop waits for the rest of an answer whose first bytes are there. Answers are some hundred
bytes, which come at once; a pool that takes longer loses the connection."""


class _Asked(NamedTuple):
    """A lookup without an answer."""

    statuses: "asyncio.Future[list[Status] | None]"
    grouped: Grouped
    sent_s: float


class LoopLookup:
    """One tenant's lookups, over a connection of their own on which many may be under way. Event loop only.

    For small batches, over a connection in the clear. Where it has no room, or fails, the caller asks in a thread
    instead, whose breaker also says whether the pool is there at all.
    """

    def __init__(self, calls: PoolCalls, threads: Executor, counts: TimedCalls, *, timeout_s: float) -> None:
        """Connects to nobody yet.

        :param calls: opens the connection; owned from now on.
        :param threads: where it is opened, as that may block.
        :param timeout_s: how long the pool may take for an answer, and a connection to be opened.
        """
        self._calls, self._threads, self._counts, self._timeout_s = calls, threads, counts, timeout_s
        self._connection: PoolConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop that waits for the connection. It may be closed before `close` is called."""
        self._is_opening = self._is_closed = False
        self._asked: deque[_Asked] = deque()
        """In the order of their answers."""
        self._num_keys = 0
        """The number of keys in `_asked`."""

    def open(self) -> None:
        """Connects in the background, unless there is a connection or will be one.

        To be called when the pool has just answered otherwise.
        """
        if self._connection is None and not self._is_opening and not self._is_closed:
            self._is_opening = True
            loop = asyncio.get_running_loop()
            opening = loop.run_in_executor(self._threads, self._calls.open_connection, MONOTONIC() + self._timeout_s)
            opening.add_done_callback(self._opened)

    def has_room(self, num_keys: int) -> bool:
        """Whether so many keys can be asked for now: there is a connection, and not too much is under way on it."""
        if self._asked and MONOTONIC() - self._asked[0].sent_s > self._timeout_s:
            self._drop()
        return self._connection is not None and self._num_keys + num_keys <= _MOST_KEYS

    def ask(self, keys: Sequence[StoreKey]) -> "asyncio.Future[list[Status] | None]":
        """Sends a lookup, for which there must be room. Does not block.

        :return: will be a status per key, in order; None when the connection has failed meanwhile.
        """
        assert self._connection is not None, "there is no room without a connection"
        asked = _Asked(asyncio.get_running_loop().create_future(), group(keys), MONOTONIC())
        self._asked.append(asked)
        self._num_keys += len(keys)
        try:
            self._connection.send(Verb.LOOKUP, {"groups": asked.grouped.fields}, (), asked.sent_s + _REST_S)
        except OSError:
            self._drop()
        return asked.statuses

    def close(self) -> None:
        """Ends the connection. Idempotent."""
        self._is_closed = True
        self._drop()
        self._calls.close()

    def _opened(self, opening: "asyncio.Future[PoolConnection]") -> None:
        self._is_opening = False
        if opening.cancelled() or opening.exception() is not None:
            return  # the lookups in threads meet the same pool, and log what is wrong with it
        if self._is_closed:
            opening.result().close()
            return
        self._connection = opening.result()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection.descriptor, self._receive)

    def _receive(self) -> None:
        """Takes the answers that are there."""
        connection = self._connection
        assert connection is not None, "the descriptor of a dropped connection is not watched"
        try:
            while self._asked:
                answer = connection.receive_answer(MONOTONIC() + _REST_S)
                asked = self._asked[0]
                statuses = asked.grouped.in_batch_order(answer.members("statuses", Status))
                connection.require_end()
                self._asked.popleft()
                self._num_keys -= len(statuses)
                self._counts.note_lookup(statuses, MONOTONIC() - asked.sent_s)
                if not asked.statuses.done():  # as it is when nobody waits any longer
                    asked.statuses.set_result(statuses)
                if not connection.has_more:
                    return
        except (OSError, KvtierError):
            pass
        self._drop()  # it failed, or the pool has ended it, or says what nobody has asked

    def _drop(self) -> None:
        """Ends the connection, and every lookup that it still owes an answer."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(connection.descriptor)
        connection.close()
        self._num_keys = 0
        while self._asked:
            statuses = self._asked.popleft().statuses
            if not statuses.done():
                statuses.set_result(None)
