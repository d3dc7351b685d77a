"""Lookups that the event loop sends and receives itself, so that no thread has to wake up for them."""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from typing import NamedTuple

from kvtier.clock import MONOTONIC
from kvtier.errors import KvtierError, UnavailableError
from kvtier.identity.keys import BlockKey, NamespaceId
from kvtier.protocol.block import Verb
from kvtier.protocol.groups import Grouped, group_of_rank
from kvtier.system.quiet_log import QuietLog
from kvtier.tiers.base import Status
from kvtier.tiers.common.metered import TimedCalls
from kvtier.tiers.pool.calls import PoolCalls
from kvtier.tiers.pool.connection import PoolConnection
from kvtier.tiers.pool.pause import Pause

MOST_KEYS = 1024
"""The most keys that are asked for at a time: larger prompts keep the loop for too long."""
_MOST_REQUESTS = 128
"""The most lookups without an answer. With `MOST_KEYS` keys in all they fit into the buffers of any socket."""
_log = logging.getLogger(__name__)


class _Asked(NamedTuple):
    """A lookup without an answer."""

    statuses: "asyncio.Future[list[Status] | None]"
    grouped: Grouped
    sent_s: float


class LoopLookup:
    """One tenant's lookups over a connection of the tenant's own, on which many may be under way. Event loop only.

    It has room for small batches only. When it has none, or an answer is None, the caller asks in a thread, whose
    breaker also says whether the pool is there at all. No method blocks.
    """

    def __init__(
        self, tenant: str, ways: Sequence[PoolCalls], threads: Executor, counts: TimedCalls, *, timeout_s: float
    ) -> None:
        """Connects to nobody yet.

        :param tenant: the tenant's name, for the log.
        :param ways: open the connection, the best first; owned from now on.
        :param threads: where it is opened, as that blocks.
        :param timeout_s: how long the pool may take for an answer before the connection is given up.
        """
        self._tenant, self._ways, self._threads = tenant, ways, threads
        self._counts, self._timeout_s = counts, timeout_s
        self._connection: PoolConnection | None = None
        self._descriptor = -1
        """The descriptor of `_connection`, at which `_loop` waits."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: Future[PoolConnection] | None = None
        self._has_answered = self._is_closed = False
        """Whether the connection has given any answer; whether `close` was called."""
        self._asked: deque[_Asked] = deque()
        """The lookups in the order of their answers."""
        self._num_keys = 0
        """The number of keys in `_asked`."""
        self._pause, self._failed = Pause(MONOTONIC), QuietLog(_log)

    def open(self) -> None:
        """Connects in the background, unless there is a connection, or will be, or none could be had of late."""
        if self._connection is None and self._opening is None and not self._is_closed and self._pause.is_over:
            loop = self._loop = asyncio.get_running_loop()
            opening = self._opening = self._threads.submit(_opened, self._ways)

            def tell(_: object) -> None:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._take, opening)

            opening.add_done_callback(tell)

    def end_if_late(self) -> None:
        """Ends the connection when the pool owes an answer for too long."""
        if self._asked and MONOTONIC() - self._asked[0].sent_s > self._timeout_s:
            self._drop(f"no answer for {self._timeout_s:g} s")

    def has_room(self, num_keys: int) -> bool:
        """Whether so many keys can be asked for now."""
        is_full = len(self._asked) >= _MOST_REQUESTS or self._num_keys + num_keys > MOST_KEYS
        return self._connection is not None and not is_full

    def ask(self, keys: Sequence[BlockKey], namespace: NamespaceId) -> "asyncio.Future[list[Status] | None]":
        """Sends a lookup in one namespace, for which there must be room.

        :return: will be a status per key, in order; None when the connection has failed meanwhile.
        """
        assert self._connection is not None, "there is no room without a connection"
        asked = _Asked(asyncio.get_running_loop().create_future(), group_of_rank(keys, namespace), MONOTONIC())
        self._asked.append(asked)
        self._num_keys += len(keys)
        try:
            self._connection.send(Verb.LOOKUP, {"groups": asked.grouped.fields}, (), asked.sent_s)
        except (OSError, KvtierError) as error:
            self._drop(str(error))
        return asked.statuses

    def close(self) -> None:
        """Ends the connection. Idempotent. Waits for one that is being opened."""
        self._is_closed = True
        self._drop()
        opening, self._opening = self._opening, None
        if opening is not None and not opening.cancel():
            wait([opening])
            if opening.exception() is None:
                opening.result().close()
        for way in self._ways:
            way.close()

    def _take(self, opening: "Future[PoolConnection]") -> None:
        """Uses the connection that has been opened."""
        if opening is not self._opening:
            return  # `close` ends it
        self._opening = None
        if (error := opening.exception()) is not None:
            self._pause.begin()
            self._failed.warning(f"lookups of tenant {self._tenant} take threads, no connection for them: {error}")
            return
        assert self._loop is not None, "it was opened for this loop"
        self._connection, self._has_answered = opening.result(), False
        self._descriptor = self._connection.for_event_loop()
        self._loop.add_reader(self._descriptor, self._receive)

    def _receive(self) -> None:
        """Takes the answers that are there."""
        connection = self._connection
        assert connection is not None, "the descriptor of a dropped connection is not watched"
        try:
            is_there = connection.has_answer()
            while is_there:
                if not self._asked:
                    self._drop("an answer that nobody has asked for")
                    return
                answer = connection.receive_answer(MONOTONIC())
                asked = self._asked[0]
                statuses = asked.grouped.in_batch_order(answer.members("statuses", Status))
                connection.require_end()
                self._asked.popleft()
                self._num_keys -= len(statuses)
                self._has_answered = True
                self._counts.note_lookup(statuses, MONOTONIC() - asked.sent_s)
                if not asked.statuses.done():  # as it is when nobody waits any longer
                    asked.statuses.set_result(statuses)
                is_there = connection.has_answer(looks=False)
        except (OSError, KvtierError) as error:
            self._drop(str(error))

    def _drop(self, reason: str = "") -> None:
        """Ends the connection, and every lookup that it still owes an answer.

        :param reason: why it has failed.
        """
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        connection.close()
        if reason and self._asked:
            self._failed.warning(f"the connection for lookups of tenant {self._tenant} has failed: {reason}")
        if not self._has_answered:
            self._pause.begin()
        self._num_keys = 0
        while self._asked:
            statuses = self._asked.popleft().statuses
            if not statuses.done():
                statuses.set_result(None)


def _opened(ways: Sequence[PoolCalls]) -> PoolConnection:
    """A connection by the first way that works. In a thread. Raises as `PoolCalls.open_new` does."""
    failure: KvtierError = UnavailableError("no way to the pool that an event loop can wait at")
    for way in ways:
        try:
            return way.open_new()
        except KvtierError as error:
            failure = error
    raise failure
