"""The cache pool's memory, mapped: blocks are copied straight out of it and into it, without the pool's doing.

Over one connection to a pool on this host go only messages: which blocks, where they lie, that they are released. A
lease lasts as long as the pool said; what was copied counts only when it still held after the copy, when the slot has
the generation that it had before, and when the checksum is the writer's. `docs/block-protocol.md` has the messages.
"""

import struct
from collections.abc import Callable, Iterator, Sequence

from kvtier.clock import MONOTONIC
from kvtier.codec import copy_in, copy_out
from kvtier.errors import CorruptBlockError
from kvtier.keys import StoreKey
from kvtier.tiers.base import ReadableBuffer, Status, WriteStatus
from kvtier.tiers.pool.connection import PoolConnection
from kvtier.tiers.pool.groups import group, require_count, windows
from kvtier.tiers.pool.memory_link import MemoryLink
from kvtier.tiers.slab import SLAB_STRIDE
from kvtier.wire.block import Fields, Verb
from kvtier.wire.shared_memory import PLACE

_SLOT = struct.Struct("<Q")
_WINDOWS = 4
"""Into how many parts a client divides what it may hold, so that several threads can hold blocks at a time."""


class PoolMemory:
    """Reads and writes blocks in the memory of a pool on this host. Any thread. Errors are those of `MemoryLink`.

    Reading has a connection of its own: a write may have to wait while the pool makes memory for it.
    """

    def __init__(self, connect: Callable[[float], PoolConnection]) -> None:
        """:param connect: opens a connection over a Unix socket by a deadline; called when one is needed."""
        self._reads = MemoryLink(connect)
        self._writes = MemoryLink(connect)

    def read(
        self, keys: Sequence[StoreKey], into: Sequence[memoryview], deadline: float
    ) -> Iterator[tuple[int, CorruptBlockError | None]]:
        """See `PoolTransport.read`. What is not in the pool's memory at this moment is not yielded."""
        sizes = [len(buffer) for buffer in into]
        for start, stop in self._windows(self._reads, sizes, deadline):
            for i, error in self._read(keys[start:stop], into[start:stop], deadline):
                yield start + i, error

    def write(self, items: Sequence[tuple[StoreKey, ReadableBuffer]], deadline: float) -> list[WriteStatus]:
        """See `PoolTransport.write`. FAILED: not tried any more, or not mapped."""
        statuses: list[WriteStatus] = []
        for start, stop in self._windows(self._writes, [len(payload) for _, payload in items], deadline):
            statuses += self._write(items[start:stop], deadline)
        return statuses

    def _read(
        self, keys: Sequence[StoreKey], into: Sequence[memoryview], deadline: float
    ) -> Iterator[tuple[int, CorruptBlockError | None]]:
        grouped = group(keys, [len(buffer) for buffer in into])
        asked_at = MONOTONIC()
        session, answer = self._reads.ask(Verb.ACQUIRE, {"groups": grouped.fields}, deadline)
        lease = answer.number("lease")
        try:
            held_until = asked_at + session.connection.lease_s
            hits = _hits(answer, grouped.order)
            self._reads.map(session, {slot // SLAB_STRIDE for _, (slot, _, _) in hits}, deadline)
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
                self._reads.tell(session, Verb.RELEASE, {"lease": lease}, deadline)

    def _write(self, items: Sequence[tuple[StoreKey, ReadableBuffer]], deadline: float) -> list[WriteStatus]:
        grouped = group([key for key, _ in items], [len(payload) for _, payload in items])
        session, answer = self._writes.ask(Verb.PREPARE, {"groups": grouped.fields}, deadline)
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
            self._writes.map(session, {slot // SLAB_STRIDE for slot in slots}, deadline)
            for i, slot in zip(prepared, slots, strict=True):
                slab = session.slabs.get(slot // SLAB_STRIDE)
                if slab is None or not slab.writable or MONOTONIC() > deadline:
                    break
                key, payload = items[i]
                checksums.append(copy_in(key, slab.slot(slot, len(payload)), payload))
        except BaseException:
            self._writes.tell(session, Verb.ABORT, {"write": write}, deadline)
            raise
        if write and not checksums:
            self._writes.tell(session, Verb.ABORT, {"write": write}, deadline)
        elif checksums:
            fields = {"write": write, "checksums": struct.pack(f"<{len(checksums)}Q", *checksums)}
            committed = self._writes.ask_in(session, Verb.COMMIT, fields, deadline).members("statuses", WriteStatus)
            require_count(len(committed), len(checksums))
            for i, status in zip(prepared, committed, strict=False):
                statuses[i] = status
        return statuses

    def acquire(self, keys: Sequence[StoreKey], sizes: Sequence[int], deadline: float) -> tuple[int, int]:
        """Holds blocks in place and copies nothing: (lease, how many are there). For measurements."""
        _, answer = self._reads.ask(Verb.ACQUIRE, {"groups": group(keys, sizes).fields}, deadline)
        return answer.number("lease"), len(answer.data("places")) // PLACE.size

    def release(self, lease: int, deadline: float) -> None:
        """Ends a lease of `acquire`."""
        self._reads.tell(self._reads.session_by(deadline), Verb.RELEASE, {"lease": lease}, deadline)

    def close(self) -> None:
        """Gives everything back to the pool and unmaps it. Idempotent."""
        self._reads.close()
        self._writes.close()

    def _windows(self, link: MemoryLink, sizes: Sequence[int], deadline: float) -> Iterator[tuple[int, int]]:
        """Ranges of a batch that leave other threads room to hold blocks, too."""
        return windows(sizes, link.session_by(deadline).connection.max_held_bytes // _WINDOWS, len(sizes))


def _hits(answer: Fields, order: Sequence[int]) -> list[tuple[int, tuple[int, int, int]]]:
    """Place in the batch and place in memory of each block that is held."""
    statuses = answer.data("statuses")
    require_count(len(statuses), len(order))
    found = [i for i, status in zip(order, statuses, strict=True) if status == Status.HIT]
    places = list(PLACE.iter_unpack(answer.data("places")))
    require_count(len(places), len(found))
    return list(zip(found, places, strict=True))
