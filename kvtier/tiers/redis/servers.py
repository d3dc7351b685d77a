"""Connections to the servers behind one Redis address, and exchanges with those that have the keys."""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import redis

from kvtier.clock import MONOTONIC
from kvtier.errors import ClosedError, KvtierError, UnavailableError
from kvtier.memory.buffers import ReadableBuffer
from kvtier.net.address import Address
from kvtier.tiers.redis.address import Kind, RedisAddress
from kvtier.tiers.redis.answers import ReplyError
from kvtier.tiers.redis.connection import RedisConnection
from kvtier.tiers.redis.dialer import Dialer
from kvtier.tiers.redis.layout import Layout, discover

_MAX_IDLE = 8
"""Connections kept for each server; more threads than that at a time connect anew."""
_NUM_TRIES = 2
"""With the layout as it was known, and with a fresh one after a key was found to have moved."""

Pack = Callable[[Sequence[int]], Sequence[ReadableBuffer]]
"""The commands for the names at these places."""
Receive = Callable[[RedisConnection, Sequence[int]], list[int]]
"""Takes all answers for these places; gives the places whose keys are said to be on another server."""

REDIRECTS = frozenset({"MOVED", "ASK", "TRYAGAIN"})
"""A Cluster says that the key is with another server, or on its way there."""


class RedisServers:
    """One connection for each thread and server in an exchange, kept for the next. Any thread.

    An exchange that fails or is late closes its connection. Everything raised is a `KvtierError` and shows no
    password. Nothing is retried, but for keys that a Cluster has moved.
    """

    def __init__(
        self, address: RedisAddress, *, username: str | None, password: str | None, connect_timeout_s: float
    ) -> None:
        """Connects to nobody yet.

        :param connect_timeout_s: for finding out who to ask, and for each connection with its greeting.
        """
        self._address = address
        self._connect_timeout_s = connect_timeout_s
        self._dialer = Dialer(address, username=username, password=password, connect_timeout_s=connect_timeout_s)
        self._lock = threading.Lock()
        self._layout: Layout | None = None
        """None: to be found out. Guarded by _lock."""
        self._known: tuple[Address, ...] = ()
        """Nodes of the layout before. Guarded by _lock."""
        self._idle: dict[Address, list[RedisConnection]] = {}
        """Ready for an exchange, the one used last at the end. Guarded by _lock."""
        self._closed = False
        """Guarded by _lock."""

    def exchange(self, names: Sequence[bytes], pack: Pack, receive: Receive, timeout_s: float) -> list[int]:
        """Asks for each name the server that has it: all are sent to before the first is waited for.

        Gives the places whose keys are on the move between servers, or nobody's: they were not answered for.
        What was received before an exception counts.
        """
        with self._dialer.translated():
            deadline = MONOTONIC() + timeout_s
            places: Sequence[int] = range(len(names))
            for _ in range(_NUM_TRIES):
                groups, orphans = self._layout_now(deadline).grouped(names, places)
                places = orphans + self._ask_groups(groups, pack, receive, deadline)
                if not places:
                    break
                self._forget()
            if places and self._address.kind is not Kind.CLUSTER:
                raise UnavailableError(f"{self._address} is part of a Cluster: use a URL of redis+cluster")
            return list(places)

    def ask_all(self, packed: bytes, num_answers: int, timeout_s: float) -> list[list[object]]:
        """The answers of each server to the same commands."""
        answers: list[list[object]] = []

        def receive(connection: RedisConnection, places: Sequence[int]) -> list[int]:
            answers.append(connection.receive_answers(num_answers))
            return []

        with self._dialer.translated():
            deadline = MONOTONIC() + timeout_s
            groups = [(node, [0]) for node in self._layout_now(deadline).nodes]
            self._ask_groups(groups, lambda _: [packed], receive, deadline)
        return answers

    def close(self) -> None:
        """Closes what is idle now, and the connections of exchanges in flight when they end. Idempotent."""
        with self._lock:
            self._closed = True
            dropped, self._idle = self._idle, {}
        for connection in chain.from_iterable(dropped.values()):
            connection.close()

    def _ask_groups(
        self, groups: Sequence[tuple[Address, list[int]]], pack: Pack, receive: Receive, deadline: float
    ) -> list[int]:
        """One failure does not keep the other servers' answers from being taken; it is raised after them."""
        failures: list[Exception] = []
        asked: list[tuple[Address, Generator[list[int], None, None]]] = []
        moved: list[int] = []
        try:
            for node, places in groups:
                asking = self._ask(node, places, pack, receive, deadline)
                with self._noted(node, failures):
                    next(asking)
                    asked.append((node, asking))
            for node, asking in asked:
                with self._noted(node, failures):
                    moved += next(asking)
                    next(asking, None)
        finally:
            for _, asking in asked:
                asking.close()
        if failures:
            raise failures[0]
        return moved

    def _ask(
        self, node: Address, places: list[int], pack: Pack, receive: Receive, deadline: float
    ) -> Generator[list[int], None, None]:
        """In two steps: what is yielded first says that all is sent, what is yielded second is what moved."""
        connection = self._take(node) or self._dialer.connect(node, deadline)
        try:
            connection.send(pack(places), deadline)
            yield []
            moved = receive(connection, places)
            connection.require_end()
        except BaseException:
            connection.close()
            raise
        self._give_back(node, connection)
        yield moved

    @contextmanager
    def _noted(self, node: Address, failures: list[Exception]) -> Iterator[None]:
        """Keeps a failure of `node` for later, and forgets what was known by it."""
        try:
            yield
        except (OSError, redis.RedisError, KvtierError) as error:
            failures.append(UnavailableError(f"{node}: {error}") if isinstance(error, OSError) else error)
            self._forget()
            with self._lock:
                dropped = self._idle.pop(node, [])
            for connection in dropped:  # of the same age, so most likely of no use as well
                connection.close()

    def _layout_now(self, deadline: float) -> Layout:
        with self._lock:
            layout, known = self._layout, self._known
        if layout is None:
            deadline = min(deadline, MONOTONIC() + self._connect_timeout_s)
            layout = discover(self._address, known, self._ask_one, deadline)
            with self._lock:
                self._layout, self._known = layout, layout.nodes
                gone = [self._idle.pop(node) for node in self._idle.keys() - set(layout.nodes)]
            for connection in chain.from_iterable(gone):
                connection.close()
        return layout

    def _ask_one(self, node: Address, packed: bytes, deadline: float) -> object:
        connection = self._dialer.connect(node, deadline, of_data=self._address.kind is Kind.CLUSTER)
        try:
            connection.send([packed], deadline)
            return connection.receive_answers(1)[0]
        finally:
            connection.close()

    def _forget(self) -> None:
        """Who has what is to be found out again."""
        with self._lock:
            self._layout = None

    def _take(self, node: Address) -> RedisConnection | None:
        """An idle connection that the server has not closed."""
        while True:
            with self._lock:
                if self._closed:
                    raise ClosedError("the connection to the Redis is closed")
                idle = self._idle.get(node)
                if not idle:
                    return None
                connection = idle.pop()
            if connection.is_quiet():
                return connection
            connection.close()

    def _give_back(self, node: Address, connection: RedisConnection) -> None:
        with self._lock:
            idle = self._idle.setdefault(node, [])
            kept = not self._closed and len(idle) < _MAX_IDLE
            if kept:
                idle.append(connection)
        if not kept:
            connection.close()


def each(take: Callable[[int, object], None], accepted: frozenset[str] = frozenset()) -> Receive:
    """A `Receive` that hands every short answer to `take`, with the place that it is for.

    :param accepted: codes of refusals that `take` wants to see; others are raised.
    """

    def receive(connection: RedisConnection, places: Sequence[int]) -> list[int]:
        moved: list[int] = []
        for place, answer in zip(places, connection.receive_answers(len(places)), strict=True):
            if isinstance(answer, ReplyError):
                if answer.code in REDIRECTS:
                    moved.append(place)
                    continue
                if answer.code not in accepted:
                    raise answer.translated()
            take(place, answer)
        return moved

    return receive
