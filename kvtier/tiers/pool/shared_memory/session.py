"""A connection to a pool on this host that threads share: whose answer is whose, and what a failure means for others.

Requests of several threads travel one after the other, each thread waits for its own answers, and one that waits
receives for all: nobody holds the connection while blocks are copied.
"""

import math
import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from kvtier.clock import MONOTONIC
from kvtier.errors import InvalidInputError, KvtierError
from kvtier.memory.mapped_slab import MappedSlab
from kvtier.protocol.block import Fields, Verb
from kvtier.tiers.pool.connection import PoolConnection

_MAX_ASKED = 2048
"""Blocks in requests that have no answer yet, unless it is a single one. Requests and answers of so many fit into the
sockets' buffers, where they are smallest: neither side ever waits for the other one to read."""
_UNDO = {Verb.ACQUIRE: (Verb.RELEASE, "lease"), Verb.PREPARE: (Verb.ABORT, "write")}
"""What gives back an answer that nobody waits for any more, and by which number."""
_GRACE_S = 0.1
"""Seconds for giving back something when there is no time left: many times what it takes, and less than to connect anew
costs all who share the session."""


@dataclass(slots=True)
class Request:
    """What was asked over a session. Its fields change under the session's lock."""

    session: "Session"
    verb: Verb
    fields: Mapping[str, object]
    num_blocks: int
    answer: Fields | None = None
    error: KvtierError | None = None
    """Instead of an answer."""
    descriptor: int | None = None
    """Came with the answer; closed by the thread that asked."""
    is_abandoned: bool = False
    """The thread that asked has gone: the thread that receives the answer gives back what it brings."""


class Session:
    """One connection, and what is mapped by it: slabs are its as long as it lives. Any thread.

    `ConnectionError`: the connection has ended, under this call or before it. `TimeoutError`: no answer in time.
    `KvtierError`: the pool refuses this request, or what it said makes no sense. The last ends the session, and so
    does an answer that is late for the thread that receives; one that is late for a thread that waits does not.
    """

    def __init__(self, connection: PoolConnection) -> None:
        """:param connection: owned from now on; `end` and then `close`."""
        self.connection = connection
        self.slabs: dict[int, MappedSlab] = {}
        """The mapped slabs by number. Changed by single operations only, which need no lock."""
        self.watcher: threading.Thread | None = None
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        """Notified when somebody waits, and an answer has come, nobody receives any more, or there is an end."""
        self._unanswered: deque[Request] = deque()
        """Requests without an answer, in the order in which they were sent. Guarded by _lock."""
        self._num_asked = 0
        """Blocks of all requests without an answer. Guarded by _lock."""
        self._num_waiting = 0
        """Threads that wait for _changed. Guarded by _lock."""
        self._receiving = False
        """A thread receives, for all. Guarded by _lock."""
        self.has_ended = False
        """Set under _lock, for good."""

    def send(self, verb: Verb, fields: Mapping[str, object], num_blocks: int, deadline: float) -> Request:
        """Sends a request; its answer is had by `receive`, and must be either received or abandoned.

        :param num_blocks: that it is about.
        """
        request = Request(self, verb, fields, num_blocks)
        while not self._send_if_room(request, deadline):
            self._receive_some(None, deadline)
        return request

    def tell(self, verb: Verb, fields: Mapping[str, object], deadline: float) -> None:
        """Gives something back, which has no answer. Where that fails the session ends, which gives back everything."""
        deadline = max(deadline, MONOTONIC() + _GRACE_S)
        try:
            self._take_sending(deadline)
        except TimeoutError:
            self.end()
            return
        try:
            if not self.has_ended:
                self.connection.tell(verb, fields, deadline)
        except OSError:
            self.end()
        finally:
            self._sending.release()

    def receive(self, request: Request, deadline: float) -> Fields:
        """Waits for the answer, and takes those that come before it to whom they belong."""
        while request.answer is None:
            if request.error is not None:
                raise request.error
            self._receive_some(request, deadline)
        return request.answer

    def abandon(self, request: Request, deadline: float) -> None:
        """Gives back what this answer brings, now or when it comes: its caller asks for it no more."""
        with self._lock:
            request.is_abandoned = True
            is_answered = request.answer is not None
        if is_answered:
            self._give_back(request, deadline)

    def end(self) -> None:
        """The pool takes back all that is held here, and what was mapped is unmapped. Any thread; does not block."""
        with self._lock:
            self.has_ended = True
            self._wake()
        self.connection.shut_down()
        self.slabs = {}

    def close(self) -> None:
        """Waits for those who use the connection, which is not for long after `end`, and closes it."""
        with self._sending, self._lock:
            while self._receiving:
                self._wait(math.inf)
            self.connection.close()

    def _send_if_room(self, request: Request, deadline: float) -> bool:
        """False, and nothing sent, when too much was asked already: answers must be received first."""
        self._take_sending(deadline)
        try:
            with self._lock:
                self._require_alive()
                if self._unanswered and self._num_asked + request.num_blocks > _MAX_ASKED:
                    return False
                header = self.connection.header_of(request.verb, request.fields)
                self._unanswered.append(request)  # whoever sees it may receive its answer
                self._num_asked += request.num_blocks
            try:
                self.connection.send_with(header, (), deadline)
            except BaseException:  # nobody knows how much of it was sent
                self.end()
                raise
        finally:
            self._sending.release()
        return True

    def _receive_some(self, wanted: Request | None, deadline: float) -> None:
        """Takes in the next answer, or waits until another thread has taken in one."""
        with self._lock:
            if wanted is not None and (wanted.answer is not None or wanted.error is not None):
                return
            self._require_alive()
            if self._receiving:
                if not self._wait(deadline):
                    raise TimeoutError("other calls to the pool took all the time")
                return
            if not self._unanswered:
                return
            self._receiving = True
            request = self._unanswered[0]
        answer: Fields | None = None
        error: KvtierError | None = None
        try:
            answer = self.connection.receive_answer(deadline)
            self.connection.require_end()
            descriptor = self._descriptor_with(answer, request)
        except KvtierError as refusal:  # is for the thread that asked
            answer, error, descriptor = None, refusal, None
        except BaseException:
            with self._lock:
                self._receiving = False
            self.end()
            raise
        with self._lock:
            self._receiving = False
            self._unanswered.popleft()
            self._num_asked -= request.num_blocks
            request.answer, request.error, request.descriptor = answer, error, descriptor
            is_abandoned = request.is_abandoned
            self._wake()
        if error is not None:
            self.end()
        elif is_abandoned:
            self._give_back(request, deadline)

    def _descriptor_with(self, answer: Fields, request: Request) -> int | None:
        """They come in the order of the answers; one may come with an answer before its own, but not for none."""
        num_due = int(request.verb == Verb.MAP and answer.number("num_slots") > 0)
        if num_here := self.connection.num_descriptors:
            with self._lock:
                num_to_come = sum(later.verb == Verb.MAP for later in islice(self._unanswered, 1, None))
            if num_here > num_due + num_to_come:
                raise InvalidInputError(f"garbled answer of the pool: {num_here} descriptors that nobody asked for")
        return self.connection.take_descriptor() if num_due else None

    def _give_back(self, request: Request, deadline: float) -> None:
        assert request.answer is not None
        if request.descriptor is not None:
            os.close(request.descriptor)
            request.descriptor = None
        if request.verb in _UNDO:
            verb, field = _UNDO[request.verb]
            if number := request.answer.number(field):
                self.tell(verb, {field: number}, deadline)

    def _wake(self) -> None:
        """Caller holds _lock."""
        if self._num_waiting:
            self._changed.notify_all()

    def _wait(self, deadline: float) -> bool:
        """Waits until another thread has received an answer; False: it has not. Caller holds _lock."""
        self._num_waiting += 1
        try:
            return self._changed.wait(min(max(0.0, deadline - MONOTONIC()), threading.TIMEOUT_MAX))
        finally:
            self._num_waiting -= 1

    def _take_sending(self, deadline: float) -> None:
        if self._sending.acquire(False):
            return
        if not self._sending.acquire(timeout=min(max(0.0, deadline - MONOTONIC()), threading.TIMEOUT_MAX)):
            raise TimeoutError("other calls to the pool took all the time")

    def _require_alive(self) -> None:
        """Caller holds _lock."""
        if self.has_ended:
            raise ConnectionResetError("the connection to the pool has ended")
