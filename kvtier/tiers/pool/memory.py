"""The cache pool's memory, mapped: blocks are copied straight out of it and into it, without the pool's doing.

Over one connection to a pool on this host go only messages: which blocks, where they lie, that they are released. A
lease lasts as long as the pool said; what was copied counts only when it still held after the copy, when the slot has
the generation that it had before, and when the checksum is the writer's. `docs/block-protocol.md` has the messages.
"""

import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvtier.clock import MONOTONIC
from kvtier.codec import copy_in, copy_out
from kvtier.errors import ClosedError, CorruptBlockError, InvalidInputError, UnavailableError
from kvtier.keys import StoreKey
from kvtier.tiers.base import ReadableBuffer, Status, WriteStatus
from kvtier.tiers.pool.connection import PoolConnection
from kvtier.tiers.pool.groups import group, require_count, windows
from kvtier.tiers.pool.mapped_slab import MappedSlab
from kvtier.tiers.slab import SLAB_STRIDE
from kvtier.wire.block import Fields, Verb
from kvtier.wire.shared_memory import PLACE

_SLOT = struct.Struct("<Q")
_WINDOWS = 4
"""Into how many parts a client divides what it may hold, so that several threads can hold blocks at a time."""


class _Session:
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


class PoolMemory:
    """Reads and writes blocks in the memory of a pool on this host. Any thread.

    `OSError`: the pool is gone, or did not answer in time; the next call connects anew. `UnavailableError`: it does
    not share its memory, or this process cannot map it. What was held is the pool's again then, what was mapped is
    unmapped.
    """

    def __init__(self, connect: Callable[[float], PoolConnection]) -> None:
        """:param connect: opens a connection over a Unix socket by a deadline; called when one is needed."""
        self._connect = connect
        self._opening = threading.Lock()
        """Held while a connection is opened, so that threads that need one share it."""
        self._lock = threading.Lock()
        self._session: _Session | None = None
        """Changed under _lock."""
        self._closed = False
        """Guarded by _lock."""

    def read(
        self, keys: Sequence[StoreKey], into: Sequence[memoryview], deadline: float
    ) -> Iterator[tuple[int, CorruptBlockError | None]]:
        """See `PoolTransport.read`. What is not in the pool's memory at this moment is not yielded."""
        sizes = [len(buffer) for buffer in into]
        for start, stop in self._windows(sizes, deadline):
            for i, error in self._read(keys[start:stop], into[start:stop], deadline):
                yield start + i, error

    def write(self, items: Sequence[tuple[StoreKey, ReadableBuffer]], deadline: float) -> list[WriteStatus]:
        """See `PoolTransport.write`. FAILED: not tried any more, or not mapped."""
        statuses: list[WriteStatus] = []
        for start, stop in self._windows([len(payload) for _, payload in items], deadline):
            statuses += self._write(items[start:stop], deadline)
        return statuses

    def _windows(self, sizes: Sequence[int], deadline: float) -> Iterator[tuple[int, int]]:
        """Ranges of a batch that leave other threads room to hold blocks, too."""
        return windows(sizes, self._session_by(deadline).connection.max_held_bytes // _WINDOWS, len(sizes))

    def _read(
        self, keys: Sequence[StoreKey], into: Sequence[memoryview], deadline: float
    ) -> Iterator[tuple[int, CorruptBlockError | None]]:
        grouped = group(keys, [len(buffer) for buffer in into])
        asked_at = MONOTONIC()
        session, answer = self._ask(Verb.ACQUIRE, {"groups": grouped.fields}, deadline)
        lease = answer.number("lease")
        try:
            held_until = asked_at + session.connection.lease_s
            hits = _hits(answer, grouped.order)
            self._map(session, {slot // SLAB_STRIDE for _, (slot, _, _) in hits}, deadline)
            for i, (slot, generation, checksum) in hits:
                slab = session.slabs.get(slot // SLAB_STRIDE)
                if slab is None:
                    continue
                copied = copy_out(keys[i], into[i], slab.slot(slot, len(into[i])))
                now = MONOTONIC()
                if slab.generation(slot) == generation and now < held_until:
                    yield i, None if copied == checksum else CorruptBlockError("checksum mismatch in shared memory")
                if now > deadline:
                    raise TimeoutError("no time left to copy")
        finally:
            if lease:
                self._tell(session, Verb.RELEASE, {"lease": lease}, deadline)

    def _write(self, items: Sequence[tuple[StoreKey, ReadableBuffer]], deadline: float) -> list[WriteStatus]:
        grouped = group([key for key, _ in items], [len(payload) for _, payload in items])
        session, answer = self._ask(Verb.PREPARE, {"groups": grouped.fields}, deadline)
        write = answer.number("write")
        statuses = [WriteStatus.FAILED] * len(items)
        prepared: list[int] = []
        checksums: list[int] = []
        try:
            for i, status in zip(grouped.order, answer.members("statuses", WriteStatus), strict=True):
                if status is WriteStatus.STORED:
                    prepared.append(i)
                else:
                    statuses[i] = status
            slots = [slot for (slot,) in _SLOT.iter_unpack(answer.data("slots"))]
            require_count(len(slots), len(prepared))
            self._map(session, {slot // SLAB_STRIDE for slot in slots}, deadline)
            for i, slot in zip(prepared, slots, strict=True):
                slab = session.slabs.get(slot // SLAB_STRIDE)
                if slab is None or not slab.writable or MONOTONIC() > deadline:
                    break
                key, payload = items[i]
                checksums.append(copy_in(key, slab.slot(slot, len(payload)), payload))
        finally:
            if write and not checksums:
                self._tell(session, Verb.ABORT, {"write": write}, deadline)
        if checksums:
            fields = {"write": write, "checksums": struct.pack(f"<{len(checksums)}Q", *checksums)}
            committed = self._ask_in(session, Verb.COMMIT, fields, deadline).members("statuses", WriteStatus)
            require_count(len(committed), len(checksums))
            for i, status in zip(prepared, committed, strict=False):
                statuses[i] = status
        return statuses

    def acquire(self, keys: Sequence[StoreKey], sizes: Sequence[int], deadline: float) -> tuple[int, int]:
        """Holds blocks in place and copies nothing: (lease, how many are there). For measurements."""
        _, answer = self._ask(Verb.ACQUIRE, {"groups": group(keys, sizes).fields}, deadline)
        return answer.number("lease"), len(answer.data("places")) // PLACE.size

    def release(self, lease: int, deadline: float) -> None:
        """Ends a lease of `acquire`."""
        with self._lock:
            session = self._session
        if session is not None:
            self._tell(session, Verb.RELEASE, {"lease": lease}, deadline)

    def close(self) -> None:
        """Gives everything back to the pool and unmaps it. Idempotent."""
        with self._lock:
            self._closed = True
            session = self._session
        if session is not None:
            self._drop(session)
            if session.watcher is not None:
                session.watcher.join()

    def _ask(self, verb: Verb, fields: Mapping[str, object], deadline: float) -> tuple[_Session, Fields]:
        """Asks the pool, over a fresh connection if the one there was has ended, e.g. by a restart."""
        used = self._session_by(deadline)
        try:
            return used, self._ask_in(used, verb, fields, deadline)
        except ConnectionError:
            fresh = self._session_by(deadline)
            return fresh, self._ask_in(fresh, verb, fields, deadline)

    def _ask_in(self, session: _Session, verb: Verb, fields: Mapping[str, object], deadline: float) -> Fields:
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

    def _tell(self, session: _Session, verb: Verb, fields: Mapping[str, object], deadline: float) -> None:
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

    def _session_by(self, deadline: float) -> _Session:
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

    def _open(self, deadline: float) -> _Session:
        session = _Session(self._connect(deadline))
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

    def _watch(self, session: _Session) -> None:
        session.connection.wait_for_end()
        self._drop(session)
        with session.turn:
            session.connection.close()

    def _drop(self, session: _Session) -> None:
        """Ends a session; its watcher closes it."""
        with self._lock:
            if self._session is session:
                self._session = None
        session.connection.shut_down()
        session.slabs = {}

    def _map(self, session: _Session, numbers: set[int], deadline: float) -> None:
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

    def _fetch_slab(self, session: _Session, number: int, deadline: float) -> MappedSlab | None:
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


def _hits(answer: Fields, order: Sequence[int]) -> list[tuple[int, tuple[int, int, int]]]:
    """Place in the batch and place in memory of each block that is held."""
    statuses = answer.data("statuses")
    require_count(len(statuses), len(order))
    found = [i for i, status in zip(order, statuses, strict=True) if status == Status.HIT]
    places = list(PLACE.iter_unpack(answer.data("places")))
    require_count(len(places), len(found))
    return list(zip(found, places, strict=True))
