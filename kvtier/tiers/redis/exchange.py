"""Talking to one server of a Redis on a thread of its own, cut off when the caller's time is up."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

import redis

from kvtier.clock import MONOTONIC
from kvtier.errors import UnavailableError
from kvtier.system.interpreter_time import note_spent
from kvtier.tiers.redis.commands import Command

T = TypeVar("T")
Take = Callable[[int, Any], None]
"""Takes the answer to the command at a position: int, bytes, None, or a `redis.ResponseError`."""
Accepts = Callable[[Any], bool]
"""Whether an answer is a refusal that `take` wants to see."""
_PACKED_BYTES = 128 << 10
"""Commands are packed and sent together up to this size."""
_MOVED = (redis.exceptions.AskError, redis.exceptions.TryAgainError)
"""A Cluster says that the key is with another server, or on its way there. MOVED is a kind of AskError."""
_REFUSALS = {
    redis.exceptions.OutOfMemoryError: "OOM",
    redis.exceptions.ReadOnlyError: "READONLY",
    redis.exceptions.NoPermissionError: "NOPERM",
}
_OTHER_REFUSALS = frozenset(("NOREPLICAS", "MISCONF"))
"""Codes that redis-py has no exceptions for."""


class Conversation:
    """One connection while an exchange has it. One thread at a time."""

    def __init__(self, connection: Any, *, in_cluster: bool) -> None:
        """:param connection: a connected `redis.Connection` of any kind."""
        self._connection = connection
        self.in_cluster = in_cluster
        """Whether the server has some of the names of a Cluster: no command may name two of them."""

    def ask(self, commands: Iterable[Command], take: Take, accepts: Accepts = lambda answer: False) -> list[int]:
        """Sends all commands, then hands each answer to `take` as it arrives.

        Gives the positions of commands whose keys are said to be with another server of the Cluster. Raises the
        first refusal that `accepts` is false for, after all answers were taken.
        """
        count, moved, failure = 0, list[int](), None
        for batch in _batches(commands):
            packed = self._connection.pack_commands(batch)
            # redis-py makes pieces of 6 KB, each of which would be sent by a system call of its own, and each of these
            # gives up the interpreter, which a thread of a busy pool gets back after milliseconds.
            self._connection.send_packed_command(packed if len(packed) == 1 else [b"".join(packed)])
            count += len(batch)
        for position in range(count):
            try:
                answer: Any = self._connection.read_response()
            except _MOVED:
                moved.append(position)
                continue
            except redis.ResponseError as error:
                answer = error
            if isinstance(answer, redis.ResponseError) and not accepts(answer):
                failure = failure or answer
            else:
                take(position, answer)
        if not self.in_cluster and (moved or isinstance(failure, redis.exceptions.ClusterCrossSlotError)):
            raise UnavailableError("this server is part of a Cluster: use a URL of redis+cluster")
        if failure is not None:
            raise failure
        return moved


class Exchange(Generic[T]):
    """One server's part of a call. `work` may use the caller's memory, but only until `result` returns."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        pool: redis.ConnectionPool,
        work: Callable[[Conversation], T],
        in_cluster: bool,
    ) -> None:
        """Begins at once, on one of `threads`, with a connection of `pool`; fails where the process may have no thread
        for it."""
        self._lock = threading.Lock()
        self._cut_off = False
        """Whether the caller has given up. Guarded by _lock."""
        self._connection: Any = None
        """The connection that `work` is using. Guarded by _lock."""
        self._spent_s = 0.0
        """What `work` has computed. Written before it is over."""
        self._future = Future[T]()
        with self._lock:
            try:
                self._future = threads.submit(self._run, pool, work, in_cluster)
            except RuntimeError as error:  # it is queued all the same, and is to touch nothing when it is its turn
                self._cut_off = True
                self._future.set_exception(UnavailableError(f"no thread to ask a Redis with: {error}"))

    def result(self, deadline: float) -> T:
        """What `work` returns or raises; `TimeoutError` at the deadline (monotonic), when its connection is cut."""
        wait([self._future], timeout=max(0.0, deadline - MONOTONIC()))
        is_late = not self._future.done()
        self.close()  # what is late fails now, for another reason
        note_spent(self._spent_s)
        if is_late:
            raise TimeoutError("no answer in time")
        return self._future.result()

    def close(self) -> None:
        """Cuts the connection if `work` is not over. Afterwards it does not use the caller's memory any more."""
        if self._future.done() or self._future.cancel():
            return
        with self._lock:
            self._cut_off = True
            if (connection := self._connection) is not None:
                _shut_down(connection)
        if connection is not None:  # it is sending, receiving or verifying, and ends now
            wait([self._future])

    def _run(self, pool: redis.ConnectionPool, work: Callable[[Conversation], T], in_cluster: bool) -> T:
        began_s = time.thread_time()
        connection: Any = pool.get_connection()
        try:
            with self._lock:
                if self._cut_off:
                    raise TimeoutError("no connection in time")
                self._connection = connection
            return work(Conversation(connection, in_cluster=in_cluster))
        except redis.ResponseError:
            raise  # all answers were received: the connection is as good as before
        except BaseException:
            connection.disconnect()  # a late answer must never be taken for another's
            raise
        finally:
            with self._lock:
                self._connection = None
            pool.release(connection)
            self._spent_s = time.thread_time() - began_s


def is_wrong_type(answer: object) -> bool:
    """Whether the server says that the value is no string."""
    return isinstance(answer, redis.ResponseError) and str(answer).startswith("WRONGTYPE")


def is_full(answer: object) -> bool:
    """Whether the server says that it has no room."""
    return isinstance(answer, redis.exceptions.OutOfMemoryError)


def refusal_of_writes(answer: object) -> str | None:
    """The code of a refusal to write by a server that can be read all the same: it has no room, is a replica, has too
    few replicas, cannot save, or lets this user write nothing. None: the answer is none."""
    if not isinstance(answer, redis.ResponseError):
        return None
    for kind, code in _REFUSALS.items():
        if isinstance(answer, kind):
            return code
    code = str(answer).partition(" ")[0]
    return code if code in _OTHER_REFUSALS else None


def takes_no_writes(answer: object) -> bool:
    """Whether the server refuses to write, and can be read all the same: see `refusal_of_writes`."""
    return refusal_of_writes(answer) is not None


def _shut_down(connection: Any) -> None:
    """Ends whatever another thread does with the connection's socket.

    `disconnect` would let that thread connect anew. redis-py has no public way to the socket.
    """
    if (connected := connection._sock) is not None:
        with contextlib.suppress(OSError):  # closed already
            socket.socket.shutdown(connected, socket.SHUT_RDWR)


def _batches(commands: Iterable[Command]) -> Iterator[list[Command]]:
    """Small commands together, large ones one by one: they are packed just before they are sent."""
    batch: list[Command] = []
    nbytes = 0
    for command in commands:
        batch.append(command)
        nbytes += sum(len(word) for word in command if isinstance(word, bytes))
        if nbytes >= _PACKED_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
