"""What one client on this host holds of the pool's memory: leases to read from, slots to write to."""

import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from kvtier.clock import Clock
from kvtier.errors import InvalidInputError
from kvtier.identity.keys import StoreKey, TenantId
from kvtier.memory.slab_layout import SLAB_STRIDE, SharedSlab
from kvtier.store.store import Store
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.host.pins import PinnedSlots
from kvtier.tiers.host.slots import WriteSlot
from kvtier_pool.block.holdings import LEASE_ENTRY_BYTES, Holdings

NOTHING_HELD = 0
"""Id of a lease or write that holds nothing."""
PART_OF_SHARE = 2
"""All connections of a tenant hold at most this fraction of the memory that the tenant is owed."""
_MOST_OVERDUE = 1024
"""Writes of a connection that are remembered after their deadline; a commit of others ends the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What each client may hold, and for how long."""

    lease_s: float
    """How long a lease lasts."""
    max_held_bytes: int
    """Payload bytes under lease, and slabs with prepared slots; more is a MISS or FAILED."""
    max_prepared_s: float
    """How long a client may take to commit what was prepared for it."""


class _Lease(NamedTuple):
    held: PinnedSlots
    nbytes: int
    charged_bytes: int
    """Bytes that the tenant is charged for the lease."""
    until_s: float


class _Write(NamedTuple):
    slots: list[WriteSlot]
    until_s: float


class ClientMemory:
    """One connection's leases and write slots. The connection's thread calls it, and `SharedClients` ends what is due.

    A lease ends by release, by its deadline, or with the connection: after the deadline its slots may hold other
    blocks, of another generation, which the client sees. A write ends by commit, abort, with the connection, or by its
    deadline. As a client that was stopped may still write to the slots then, nobody else ever gets them
    (`Store.abandon_writes`), and its commit is answered with FAILED.
    """

    def __init__(
        self, core: Store, tenant: TenantId, writer: int, holdings: Holdings, limits: ClientLimits, clock: Clock
    ) -> None:
        """:param holdings: of the tenant."""
        self._core = core
        self.tenant = tenant
        self._writer = writer
        self._holdings = holdings
        self._limits = limits
        self._clock = clock
        self._ids = itertools.count(NOTHING_HELD + 1)
        self._lock = threading.Lock()
        self._leases: dict[int, _Lease] = {}
        """Leases by id, the oldest first. Guarded by _lock."""
        self._writes: dict[int, _Write] = {}
        """Prepared write slots by the id of their write, the oldest first. Guarded by _lock."""
        self._overdue: dict[int, None] = {}
        """Ids of writes that ended by their deadline, a few of them. Guarded by _lock."""
        self._slots_in: Counter[int] = Counter()
        """Prepared slots by number of their slab; none of them 0. Guarded by _lock."""
        self._leased_bytes = 0
        """Guarded by _lock."""
        self._prepared_bytes = 0
        """The bytes of the slabs in `_slots_in`. Guarded by _lock."""
        self.lease_s = limits.lease_s
        """How long a lease lasts."""

    @property
    def held_bytes(self) -> int:
        """Payload bytes under lease, and bytes of slabs with prepared slots. Any thread."""
        return self._leased_bytes + self._prepared_bytes

    def acquire(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> tuple[int, bytes, bytes]:
        """Id of the lease, a status per key, and where the hits lie. Never waits for a tier below memory."""
        asked_bytes = sum(sizes)
        most_bytes = asked_bytes + LEASE_ENTRY_BYTES * len(keys)
        if not self._take(asked_bytes, most_bytes):
            return NOTHING_HELD, bytes([Status.MISS]) * len(keys), b""
        until_s = self._clock() + self.lease_s
        held = self._core.acquire_places(keys, sizes)
        nbytes = asked_bytes
        if held.num_held < len(keys):
            nbytes = sum(size for size, status in zip(sizes, held.statuses, strict=True) if status == Status.HIT)
        charged_bytes = nbytes + LEASE_ENTRY_BYTES * held.num_held
        self._holdings.give_back(most_bytes - charged_bytes)  # for what misses
        if not held.places:
            self._core.release_places(held)
            return NOTHING_HELD, held.statuses, b""
        lease_id = next(self._ids)
        with self._lock:
            self._leases[lease_id] = _Lease(held, nbytes, charged_bytes, until_s)
            self._leased_bytes += nbytes
        return lease_id, held.statuses, held.places

    def release(self, lease_id: int) -> None:
        """Ends a lease. One that is over already is not there any more, which is no error."""
        with self._lock:
            lease = self._leases.pop(lease_id, None)
            self._leased_bytes -= lease.nbytes if lease is not None else 0
        if lease is not None:
            self._holdings.give_back(lease.charged_bytes)
            self._core.release_places(lease.held)

    def end_leases(self, now_s: float) -> int:
        """Ends those that are due; returns how many. Any thread."""
        with self._lock:
            due = [lease_id for lease_id, _ in takewhile(lambda each: each[1].until_s <= now_s, self._leases.items())]
        for lease_id in due:
            self.release(lease_id)
        return len(due)

    def end_writes(self, now_s: float) -> int:
        """Gives up the slots of writes that are due; returns how many blocks they had. Any thread."""
        with self._lock:
            due = [write_id for write_id, _ in takewhile(lambda each: each[1].until_s <= now_s, self._writes.items())]
        slots = [slot for write_id in due for slot in self._forget(write_id, overdue=True)]
        if slots:
            self._core.abandon_writes(slots)
        return len(slots)

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> tuple[int, bytes, list[int]]:
        """Id of the write, a `WriteStatus` per key (STORED: prepared), and the slot ids of those that were prepared."""
        slots: list[WriteSlot] = []
        statuses = bytearray()
        try:
            for key, size in zip(keys, sizes, strict=True):
                outcome: WriteSlot | WriteStatus = WriteStatus.FAILED
                if self.held_bytes + size <= self._limits.max_held_bytes:
                    outcome = self._core.begin_write(self.tenant, key, size, self._writer)
                if isinstance(outcome, WriteSlot) and not self._charge(outcome):
                    outcome = self._core.abort_write(outcome)
                if isinstance(outcome, WriteSlot):
                    slots.append(outcome)
                    outcome = WriteStatus.STORED
                statuses.append(outcome)
        except BaseException:
            self._discharge(slots)
            self._abort(slots)
            raise
        if not slots:
            return NOTHING_HELD, bytes(statuses), []
        write_id = next(self._ids)
        with self._lock:
            self._writes[write_id] = _Write(slots, self._clock() + self._limits.max_prepared_s)
        return write_id, bytes(statuses), [slot.slot for slot in slots]

    def commit(self, write_id: int, checksums: Sequence[int]) -> list[WriteStatus]:
        """Makes the first blocks of a write readable, one for each checksum, and gives the others' slots back.

        FAILED after the write's deadline. Raises `InvalidInputError` for a write that is not there, or has fewer
        blocks: the client has lost count.
        """
        with self._lock:
            write = self._writes.get(write_id)
            overdue = write is None and write_id in self._overdue
        if write is not None and len(checksums) <= len(write.slots):
            slots = self._forget(write_id)  # nothing, if its deadline is over since
            self._abort(slots[len(checksums) :])
            overdue = not slots
        elif not overdue:
            raise InvalidInputError(f"commit of {len(checksums)} blocks of write {write_id}, which has not so many")
        if overdue:
            return [WriteStatus.FAILED] * len(checksums)
        return self._core.commit_all(slots[: len(checksums)], checksums)

    def abort(self, write_id: int) -> None:
        """Gives back the slots of a write. Ignores one that is not there."""
        self._abort(self._forget(write_id))

    def open_slab(self, number: int) -> SharedSlab | None:
        """Returns a descriptor of one of the tenant's slabs, for the caller to close; None when there is no such
        slab."""
        return self._core.open_slab(self.tenant, number, self._writer)

    def close(self) -> None:
        """Gives back everything; nobody writes to this client's slabs again, whatever it still does."""
        self.end_leases(float("inf"))
        for write_id in list(self._writes):
            self.abort(write_id)
        self._core.retire_writer(self._writer)

    def _abort(self, slots: Sequence[WriteSlot]) -> None:
        for slot in slots:
            self._core.abort_write(slot)

    def _take(self, nbytes: int, charged_bytes: int) -> bool:
        """Whether so much more may be held, by this connection and by all of its tenant; charges it to the tenant."""
        if self.held_bytes + nbytes > self._limits.max_held_bytes:
            return False
        return self._holdings.take(charged_bytes, self._core.owed_bytes(self.tenant) // PART_OF_SHARE)

    def _charge(self, slot: WriteSlot) -> bool:
        """Whether this slot may be held. What it holds is its slab, which cannot be dropped meanwhile."""
        number, nbytes = slot.slot // SLAB_STRIDE, slot.slab_bytes
        with self._lock:
            if number in self._slots_in:
                self._slots_in[number] += 1
                return True
        if not self._take(nbytes, nbytes):
            return False
        with self._lock:  # no other thread adds a slab
            self._slots_in[number] = 1
            self._prepared_bytes += nbytes
        return True

    def _forget(self, write_id: int, *, overdue: bool = False) -> list[WriteSlot]:
        """The slots of a write that is there, which are the caller's to end now."""
        with self._lock:
            write = self._writes.pop(write_id, None)
            if write is None:
                return []
            if overdue:
                self._overdue[write_id] = None
                if len(self._overdue) > _MOST_OVERDUE:
                    del self._overdue[next(iter(self._overdue))]
        self._discharge(write.slots)
        return write.slots

    def _discharge(self, slots: Sequence[WriteSlot]) -> None:
        """Undoes `_charge` of slots that end now."""
        freed_bytes = 0
        with self._lock:
            for slot in slots:
                number = slot.slot // SLAB_STRIDE
                self._slots_in[number] -= 1
                if not self._slots_in[number]:
                    del self._slots_in[number]
                    freed_bytes += slot.slab_bytes
            self._prepared_bytes -= freed_bytes
        self._holdings.give_back(freed_bytes)
