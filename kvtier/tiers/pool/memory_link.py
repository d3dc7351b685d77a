"""A connection to a pool on this host, and the pool's memory that is mapped by it.

Over the connection go only messages: which blocks, where they lie, that they are released.
"""

import os
import threading
from collections.abc import Callable, Mapping

from kvtier.clock import MONOTONIC
from kvtier.errors import ClosedError, InvalidInputError, UnavailableError
from kvtier.tiers.pool.connection import PoolConnection
from kvtier.tiers.pool.mapped_slab import MappedSlab
from kvtier.wire.block import Fields, Verb


class Session:
    """One connection, and what is mapped by it: slabs are its as long as it lives."""

    def __init__(self, connection: PoolConnection) -> None:
        self.connection = connection
        self.turn = threading.Lock()
        """Held by the thread that uses the connection: for a message and its answer, never while blocks are copied."""
        self.slabs: dict[int, MappedSlab] = {}
        """By number. Changed by single operations only, which need no lock."""
        self.watcher: threading.Thread | None = None

    def take_turn(self, deadline: float) -> None:
        """The connection is the caller's until it releases `turn`. `TimeoutError`: others kept it for too long."""
        if not self.turn.acquire(blocking=False) and not self.turn.acquire(timeout=max(0.0, deadline - MONOTONIC())):
            raise TimeoutError("other calls to the pool took all the time")


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
        used = self.session_by(deadline)
        try:
            return used, self.ask_in(used, verb, fields, deadline)
        except ConnectionError:
            fresh = self.session_by(deadline)
            return fresh, self.ask_in(fresh, verb, fields, deadline)

    def ask_in(self, session: Session, verb: Verb, fields: Mapping[str, object], deadline: float) -> Fields:
        session.take_turn(deadline)
        try:
            answer = session.connection.ask(verb, fields, (), deadline)
            session.connection.require_end()
            return answer
        except BaseException:
            self._drop(session)
            raise
        finally:
            session.turn.release()

    def tell(self, session: Session, verb: Verb, fields: Mapping[str, object], deadline: float) -> None:
        """Gives something back. Where that fails the connection ends, which gives back everything."""
        try:
            session.take_turn(deadline)
        except TimeoutError:
            self._drop(session)
            return
        try:
            session.connection.tell(verb, fields, deadline)
        except OSError:
            self._drop(session)
        finally:
            session.turn.release()

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
        self._drop(session)
        with session.turn:
            session.connection.close()

    def _drop(self, session: Session) -> None:
        """Ends a session; its watcher closes it."""
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
        session.take_turn(deadline)
        try:
            answer = session.connection.ask(Verb.MAP, {"slab": number}, (), deadline)
            descriptors = session.connection.take_descriptors()
        except BaseException:
            self._drop(session)
            raise
        finally:
            session.turn.release()
        num_slots = answer.number("num_slots")
        if not num_slots:
            return None
        if len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            raise InvalidInputError(f"garbled answer of the pool: {len(descriptors)} descriptors for one slab")
        slot_bytes, writable = answer.number("slot_bytes"), bool(answer.number("writable"))
        try:
            return MappedSlab.map(descriptors[0], slot_bytes, num_slots, writable=writable)
        except OSError as error:
            raise UnavailableError(f"a slab of the pool cannot be mapped: {error}") from error

    def close(self) -> None:
        """Gives everything back to the pool and unmaps it. Idempotent."""
        with self._lock:
            self._closed = True
            session = self._session
        if session is not None:
            self._drop(session)
            if session.watcher is not None:
                session.watcher.join()
