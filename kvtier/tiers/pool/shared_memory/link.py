"""A connection to a pool on this host, opened when one is needed, and the pool's memory that is mapped by it.

Over the connection go only messages: which blocks, where they lie, that they are released.
"""

import os
import threading
from collections.abc import Callable, Mapping

from kvtier.clock import MONOTONIC
from kvtier.errors import ClosedError, InvalidInputError, UnavailableError
from kvtier.memory.mapped_slab import MappedSlab
from kvtier.memory.slab_layout import SharedSlab
from kvtier.protocol.block import Fields, Verb
from kvtier.tiers.pool.connection import PoolConnection
from kvtier.tiers.pool.shared_memory.session import Request, Session


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

    def ask(self, verb: Verb, fields: Mapping[str, object], num_blocks: int, deadline: float) -> tuple[Session, Fields]:
        """Asks the pool, over a fresh connection if the one there was has ended, e.g. by a restart."""
        return self.receive_first(self.send(verb, fields, num_blocks, deadline), deadline)

    def send(self, verb: Verb, fields: Mapping[str, object], num_blocks: int, deadline: float) -> Request:
        """Asks the pool for something that any session may give; the answer is had by `receive_first`.

        :param num_blocks: that it is about.
        """
        try:
            return self.session_by(deadline).send(verb, fields, num_blocks, deadline)
        except ConnectionError:
            return self.session_by(deadline).send(verb, fields, num_blocks, deadline)

    def receive_first(self, request: Request, deadline: float) -> tuple[Session, Fields]:
        """The answer, if need be of a fresh session, and the session that it is of."""
        try:
            return request.session, self._receive(request, deadline)
        except ConnectionError:
            again = self.send(request.verb, request.fields, request.num_blocks, deadline)
            return again.session, self._receive(again, deadline)

    def session_by(self, deadline: float) -> Session:
        """The session there is, or a fresh one."""
        session = self._session  # a glance without the lock: whoever uses a session must expect that it has ended
        if session is not None and not session.has_ended:
            return session
        if not self._opening.acquire(timeout=min(max(0.0, deadline - MONOTONIC()), threading.TIMEOUT_MAX)):
            raise TimeoutError("no connection to the pool in time")
        try:
            with self._lock:
                session = self._session
            return session if session is not None and not session.has_ended else self._open(deadline)
        finally:
            self._opening.release()

    def _open(self, deadline: float) -> Session:
        session = Session(self._connect(deadline))
        if not session.connection.lease_s:
            session.connection.close()
            raise UnavailableError("this pool does not share its memory")
        # A pool that ended takes its memory along only when nobody maps it any more, and an idle engine would not know.
        watcher = threading.Thread(target=self._watch, args=(session,), name="kvtier-pool-end", daemon=True)
        try:
            watcher.start()
        except RuntimeError as error:
            session.connection.close()
            raise UnavailableError(f"no thread to watch the connection to the pool with: {error}") from error
        session.watcher = watcher
        with self._lock:
            closed = self._closed
            self._session = None if closed else session
        if closed:
            session.end()
            raise ClosedError("the connection to the pool is closed")
        return session

    def _watch(self, session: Session) -> None:
        session.connection.wait_for_end()
        session.end()
        session.close()

    def map(self, session: Session, numbers: set[int], deadline: float) -> None:
        """Maps what is not mapped yet. A slab that is gone meanwhile stays unmapped: its blocks are misses."""
        missing = numbers - session.slabs.keys()
        if not missing:
            return
        # A copy is made in one step; a garbage collection within a list of pairs would let other threads map slabs.
        for number, slab in session.slabs.copy().items():
            if not slab.in_use:
                session.slabs.pop(number, None)
        for number in missing:
            fetched = self.fetch(session, number, deadline)
            if fetched is not None:
                session.slabs.setdefault(number, _map(fetched))  # another thread may have been faster

    def fetch(self, session: Session, number: int, deadline: float) -> SharedSlab | None:
        """A slab to map, its descriptor the caller's to close. None: it is gone."""
        request = session.send(Verb.MAP, {"slab": number}, 0, deadline)
        answer = self._receive(request, deadline)
        num_slots = answer.number("num_slots")
        if not num_slots:
            return None
        if request.descriptor is None:
            raise InvalidInputError("garbled answer of the pool: a slab without a descriptor")
        try:
            return SharedSlab(
                request.descriptor, bool(answer.number("writable")), answer.number("slot_bytes"), num_slots
            )
        except InvalidInputError:
            os.close(request.descriptor)
            raise

    def close(self) -> None:
        """Gives everything back to the pool and unmaps it. Idempotent."""
        with self._lock:
            self._closed = True
            session = self._session
        if session is not None:
            session.end()
            if session.watcher is not None:
                session.watcher.join()

    def _receive(self, request: Request, deadline: float) -> Fields:
        """The answer, or an error that leaves nothing behind."""
        try:
            return request.session.receive(request, deadline)
        except BaseException:
            request.session.abandon(request, deadline)
            raise


def _map(slab: SharedSlab) -> MappedSlab:
    """Closes the descriptor. `UnavailableError`: no room for it."""
    try:
        return MappedSlab.map(slab)
    except OSError as error:
        raise UnavailableError(f"a slab of the pool cannot be mapped: {error}") from error
