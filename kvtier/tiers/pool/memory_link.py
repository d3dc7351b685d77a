"""A connection to a pool on this host, and the pool's memory that is mapped by it.

Over the connection go only messages: which blocks, where they lie, that they are released.
"""

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtier.clock import MONOTONIC
from kvtier.errors import ClosedError, InvalidInputError, UnavailableError
from kvtier.tiers.pool.connection import PoolConnection
from kvtier.tiers.pool.mapped_slab import MappedSlab
from kvtier.wire.block import Fields, Verb


class Session:
    """One connection, and what is mapped by it: slabs are its as long as it lives. Any thread.

    Requests of several threads travel one after the other, each thread waits for its own answers, and whoever waits
    receives for all: nobody holds the connection while blocks are copied. Errors are those of `PoolConnection`.
    """

    def __init__(self, connection: PoolConnection) -> None:
        self.connection = connection
        self.slabs: dict[int, MappedSlab] = {}
        """By number. Changed by single operations only, which need no lock."""
        self.watcher: threading.Thread | None = None
        self._sending = threading.Lock()
        self._unanswered: deque[Request] = deque()
        """In the order in which they were sent: added to under _sending, taken from by the thread that receives."""
        self._lock = threading.Lock()
        self._received = threading.Condition(self._lock)
        """Notified when somebody waits, and an answer has come or nobody receives any more."""
        self._num_waiting = 0
        """Threads that wait for it. Guarded by _lock."""
        self._receiving = False
        """A thread receives, for all. Guarded by _lock."""
        self._broken = False
        """Bytes of an answer may be missing or left over. Guarded by _lock."""

    def send(self, verb: Verb, fields: Mapping[str, object], deadline: float) -> "Request":
        """Sends a request; its answer is had by `receive`."""
        request = Request(self, verb, fields)
        with self._sending:  # never for long: messages are small, and the pool answers them as they come
            self._unanswered.append(request)
            self.connection.send(verb, fields, (), deadline)
        return request

    def tell(self, verb: Verb, fields: Mapping[str, object], deadline: float) -> None:
        """Sends a request that has no answer."""
        with self._sending:
            self.connection.tell(verb, fields, deadline)

    def receive(self, request: "Request", deadline: float) -> Fields:
        """Waits for the answer, and takes those that come before it to whom they belong."""
        while request.answer is None:
            with self._lock:
                if request.answer is not None:
                    break
                if self._receiving:
                    self._wait(deadline)
                    continue
                if self._broken:
                    raise ConnectionResetError("another call to the pool has failed")
                self._receiving = self._broken = True
            try:
                self._receive_next(deadline)
                self._broken = False
            finally:
                with self._lock:
                    self._receiving = False
                    if self._num_waiting:
                        self._received.notify_all()
        return request.answer

    def close(self) -> None:
        """When it was shut down: waits for those who use the connection, which is not for long."""
        with self._sending, self._lock:
            while self._receiving:
                self._wait(math.inf)
            self._broken = True
            self.connection.close()

    def _wait(self, deadline: float) -> None:
        """Until another thread has received an answer. Caller holds _lock."""
        self._num_waiting += 1
        try:
            if not self._received.wait(min(max(0.0, deadline - MONOTONIC()), threading.TIMEOUT_MAX)):
                raise TimeoutError("other calls to the pool took all the time")
        finally:
            self._num_waiting -= 1

    def _receive_next(self, deadline: float) -> None:
        """Only the thread that has set _receiving."""
        answer = self.connection.receive_answer(deadline)
        self.connection.require_end()
        request = self._unanswered.popleft()
        if request.verb == Verb.MAP and answer.number("num_slots"):
            request.descriptor = self.connection.take_descriptor()
        request.answer = answer


@dataclass(slots=True)
class Request:
    """What was asked over a session."""

    session: Session
    verb: Verb
    fields: Mapping[str, object]
    answer: Fields | None = None
    """Set by the thread that received it."""
    descriptor: int | None = None
    """Came with the answer; closed by the thread that asked."""


class MemoryLink:
    """Messages to the pool, over a connection that is opened when one is needed, and shared by threads. Any thread.

    `OSError`: the pool is gone, or did not answer in time; the next call connects anew. `UnavailableError`: it does
    not share its memory, or this process cannot map it. What was held is the pool's again then, what was mapped is
    unmapped.
    """

    def __init__(self, connect: Callable[[float], PoolConnection]) -> None:
        """:param connect: opens a connection over a Unix socket by a deadline."""
        self._connect = connect
        self._opening = threading.Lock()
        """Held while a connection is opened, so that threads that need one share it."""
        self._lock = threading.Lock()
        self._session: Session | None = None
        """Changed under _lock."""
        self._closed = False
        """Guarded by _lock."""

    def ask(self, verb: Verb, fields: Mapping[str, object], deadline: float) -> tuple[Session, Fields]:
        """Asks the pool, over a fresh connection if the one there was has ended, e.g. by a restart."""
        return self.receive_first(self.send(verb, fields, deadline), deadline)

    def send(self, verb: Verb, fields: Mapping[str, object], deadline: float) -> Request:
        """Asks the pool for something that any session may give; the answer is had by `receive_first`."""
        return self.send_in(self.session_by(deadline), verb, fields, deadline)

    def receive_first(self, request: Request, deadline: float) -> tuple[Session, Fields]:
        """The answer, if need be of a fresh session, and the session that it is of."""
        try:
            return request.session, self.receive(request, deadline)
        except ConnectionError:
            again = self.send(request.verb, request.fields, deadline)
            return again.session, self.receive(again, deadline)

    def send_in(self, session: Session, verb: Verb, fields: Mapping[str, object], deadline: float) -> Request:
        """Asks for something that has to do with what this session has."""
        try:
            return session.send(verb, fields, deadline)
        except BaseException:
            self.drop(session)
            raise

    def receive(self, request: Request, deadline: float) -> Fields:
        """The answer."""
        try:
            return request.session.receive(request, deadline)
        except BaseException:
            self.drop(request.session)
            raise

    def tell(self, session: Session, verb: Verb, fields: Mapping[str, object], deadline: float) -> None:
        """Gives something back. Where that fails the connection ends, which gives back everything."""
        try:
            session.tell(verb, fields, deadline)
        except OSError:
            self.drop(session)

    def session_by(self, deadline: float) -> Session:
        """The session there is, or a fresh one."""
        session = self._session  # a glance without the lock: whoever uses a session must expect that it has ended
        if session is not None:
            return session
        if not self._opening.acquire(timeout=max(0.0, deadline - MONOTONIC())):
            raise TimeoutError("no connection to the pool in time")
        try:
            with self._lock:
                session = self._session
            return session if session is not None else self._open(deadline)
        finally:
            self._opening.release()

    def _open(self, deadline: float) -> Session:
        session = Session(self._connect(deadline))
        if not session.connection.lease_s:
            session.connection.close()
            raise UnavailableError("this pool does not share its memory")
        with self._lock:
            closed = self._closed
            self._session = None if closed else session
        if closed:
            session.connection.close()
            raise ClosedError("the connection to the pool is closed")
        # A pool that ended takes its memory along only when nobody maps it any more, and an idle engine would not know.
        session.watcher = threading.Thread(target=self._watch, args=(session,), name="kvtier-pool-end", daemon=True)
        session.watcher.start()
        return session

    def _watch(self, session: Session) -> None:
        session.connection.wait_for_end()
        self.drop(session)
        session.close()

    def drop(self, session: Session) -> None:
        """Ends a session, which gives back to the pool all that it holds; its watcher closes it."""
        with self._lock:
            if self._session is session:
                self._session = None
        session.connection.shut_down()
        session.slabs = {}

    def map(self, session: Session, numbers: set[int], deadline: float) -> None:
        """Maps what is not mapped yet. A slab that is gone meanwhile stays unmapped: its blocks are misses."""
        missing = numbers - session.slabs.keys()
        if not missing:
            return
        for number, slab in list(session.slabs.items()):
            if not slab.in_use:
                session.slabs.pop(number, None)
        for number in missing:
            fetched = self._fetch_slab(session, number, deadline)
            if fetched is not None:
                session.slabs[number] = fetched

    def _fetch_slab(self, session: Session, number: int, deadline: float) -> MappedSlab | None:
        request = self.send_in(session, Verb.MAP, {"slab": number}, deadline)
        answer = self.receive(request, deadline)
        num_slots = answer.number("num_slots")
        if not num_slots:
            return None
        if request.descriptor is None:
            raise InvalidInputError("garbled answer of the pool: a slab without a descriptor")
        try:
            slot_bytes, writable = answer.number("slot_bytes"), bool(answer.number("writable"))
        except InvalidInputError:
            os.close(request.descriptor)
            raise
        try:
            return MappedSlab.map(request.descriptor, slot_bytes, num_slots, writable=writable)
        except OSError as error:
            raise UnavailableError(f"a slab of the pool cannot be mapped: {error}") from error

    def close(self) -> None:
        """Gives everything back to the pool and unmaps it. Idempotent."""
        with self._lock:
            self._closed = True
            session = self._session
        if session is not None:
            self.drop(session)
            if session.watcher is not None:
                session.watcher.join()
