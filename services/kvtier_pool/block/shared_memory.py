"""What clients on this host hold of the pool's memory: leases to read from, slots to write to."""

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import InvalidInputError
from kvtier.identity.keys import StoreKey, TenantId
from kvtier.memory.slab_layout import SLAB_STRIDE, SharedSlab
from kvtier.store.store import Store
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.host.pins import PinnedSlots
from kvtier.tiers.host.slots import WriteSlot
from kvtier_pool.metrics import PoolMetrics

_log = logging.getLogger(__name__)
_TICK_S = 0.25
"""Seconds between two looks for leases that are over."""
NOTHING_HELD = 0
"""Id of a lease or write that holds nothing."""


class _Lease(NamedTuple):
    held: PinnedSlots
    nbytes: int
    until_s: float


class ClientMemory:
    """One connection's leases and write slots. The connection's thread calls it, and `SharedClients` ends leases.

    A lease ends by release, by its deadline, or with the connection: after the deadline its slots may hold other
    blocks, of another generation, which the client sees. A write slot ends by commit, abort, or with the connection,
    and never by a deadline: a client that was stopped may still write to it.
    """

    def __init__(
        self, core: Store, tenant: TenantId, writer: int, *, lease_s: float, max_held_bytes: int, clock: Clock
    ) -> None:
        """:param max_held_bytes: payload bytes under lease, and slabs with prepared slots; more is a MISS or FAILED."""
        self._core = core
        self._tenant = tenant
        self._writer = writer
        self._max_held_bytes = max_held_bytes
        self._clock = clock
        self._ids = itertools.count(NOTHING_HELD + 1)
        self._lock = threading.Lock()
        self._leases: dict[int, _Lease] = {}
        """Leases by id, the oldest first. Guarded by _lock."""
        self._writes: dict[int, list[WriteSlot]] = {}
        """Prepared write slots by the id of their write. Connection's thread only."""
        self._slots_in: Counter[int] = Counter()
        """Prepared slots by number of their slab; none of them 0. Connection's thread only."""
        self._leased_bytes = 0
        """Guarded by _lock."""
        self._prepared_bytes = 0
        """The bytes of the slabs in `_slots_in`. Connection's thread only, but for reading."""
        self.lease_s = lease_s
        """How long a lease lasts."""

    @property
    def held_bytes(self) -> int:
        """Payload bytes under lease, and bytes of slabs with prepared slots. Any thread."""
        return self._leased_bytes + self._prepared_bytes

    def acquire(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> tuple[int, bytes, bytes]:
        """Id of the lease, a status per key, and where the hits lie. Never waits for a tier below memory."""
        nbytes = sum(sizes)
        if self.held_bytes + nbytes > self._max_held_bytes:
            return NOTHING_HELD, bytes([Status.MISS]) * len(keys), b""
        until_s = self._clock() + self.lease_s
        held = self._core.acquire_places(keys, sizes)
        if not held.places:
            self._core.release_places(held)
            return NOTHING_HELD, held.statuses, b""
        lease_id = next(self._ids)
        with self._lock:
            self._leases[lease_id] = _Lease(held, nbytes, until_s)
            self._leased_bytes += nbytes
        return lease_id, held.statuses, held.places

    def release(self, lease_id: int) -> None:
        """Ends a lease. One that is over already is not there any more, which is no error."""
        with self._lock:
            lease = self._leases.pop(lease_id, None)
            self._leased_bytes -= lease.nbytes if lease is not None else 0
        if lease is not None:
            self._core.release_places(lease.held)

    def end_leases(self, now_s: float) -> int:
        """Ends those that are due; returns how many. Any thread."""
        due: list[int] = []
        with self._lock:
            for lease_id, lease in self._leases.items():
                if lease.until_s > now_s:
                    break
                due.append(lease_id)
        for lease_id in due:
            self.release(lease_id)
        return len(due)

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> tuple[int, bytes, list[int]]:
        """Id of the write, a `WriteStatus` per key (STORED: prepared), and the slot ids of those that were prepared."""
        slots: list[WriteSlot] = []
        statuses = bytearray()
        for key, size in zip(keys, sizes, strict=True):
            outcome: WriteSlot | WriteStatus = WriteStatus.FAILED
            if self.held_bytes + size <= self._max_held_bytes:
                outcome = self._core.begin_write(self._tenant, key, size, self._writer)
            if isinstance(outcome, WriteSlot) and not self._charge(outcome):
                outcome = self._core.abort_write(outcome)
            if isinstance(outcome, WriteSlot):
                slots.append(outcome)
                outcome = WriteStatus.STORED
            statuses.append(outcome)
        if not slots:
            return NOTHING_HELD, bytes(statuses), []
        write_id = next(self._ids)
        self._writes[write_id] = slots
        return write_id, bytes(statuses), [slot.slot for slot in slots]

    def commit(self, write_id: int, checksums: Sequence[int]) -> list[WriteStatus]:
        """Makes the first blocks of a write readable, one for each checksum, and gives the others' slots back.

        Raises `InvalidInputError` for a write that is not there, or has fewer blocks: the client has lost count.
        """
        slots = self._writes.get(write_id)
        if slots is None or len(checksums) > len(slots):
            raise InvalidInputError(f"commit of {len(checksums)} blocks of write {write_id}, which has not so many")
        self._forget(write_id)
        self._abort(slots[len(checksums) :])
        return self._core.commit_all(slots[: len(checksums)], checksums)

    def abort(self, write_id: int) -> None:
        """Gives back the slots of a write. Ignores one that is not there."""
        self._abort(self._forget(write_id))

    def open_slab(self, number: int) -> SharedSlab | None:
        """Returns a descriptor of one of the tenant's slabs, for the caller to close; None when there is no such
        slab."""
        return self._core.open_slab(self._tenant, number, self._writer)

    def close(self) -> None:
        """Gives back everything; nobody writes to this client's slabs again, whatever it still does."""
        self.end_leases(float("inf"))
        for write_id in list(self._writes):
            self.abort(write_id)
        self._core.retire_writer(self._writer)

    def _abort(self, slots: Sequence[WriteSlot]) -> None:
        for slot in slots:
            self._core.abort_write(slot)

    def _charge(self, slot: WriteSlot) -> bool:
        """Whether this slot may be held. What it holds is its slab, which cannot be dropped meanwhile."""
        number = slot.slot // SLAB_STRIDE
        if number not in self._slots_in and self.held_bytes + slot.slab_bytes > self._max_held_bytes:
            return False
        if not self._slots_in[number]:
            self._prepared_bytes += slot.slab_bytes
        self._slots_in[number] += 1
        return True

    def _forget(self, write_id: int) -> list[WriteSlot]:
        slots = self._writes.pop(write_id, [])
        for slot in slots:
            number = slot.slot // SLAB_STRIDE
            self._slots_in[number] -= 1
            if not self._slots_in[number]:
                del self._slots_in[number]
                self._prepared_bytes -= slot.slab_bytes
        return slots


class SharedClients:
    """All clients that share memory, and the thread that ends their leases in time. Any thread."""

    def __init__(
        self,
        core: Store,
        metrics: PoolMetrics,
        *,
        lease_s: float,
        max_held_bytes: int,
        clock: Clock = MONOTONIC,
    ) -> None:
        """`start` starts the thread. For the limits see `ClientMemory`."""
        self._core = core
        self._metrics = metrics
        self.lease_s = lease_s
        self.max_held_bytes = max_held_bytes
        self._clock = clock
        self._writers = itertools.count(1)
        self._lock = threading.Lock()
        self._clients: set[ClientMemory] = set()
        """Guarded by _lock."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-leases", daemon=True)
        metrics.shared_bytes.set_function(self._held_bytes)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def open(self, tenant: TenantId) -> ClientMemory:
        """Gives a new connection its memory, which goes back by `end`."""
        client = ClientMemory(
            self._core,
            tenant,
            next(self._writers),
            lease_s=self.lease_s,
            max_held_bytes=self.max_held_bytes,
            clock=self._clock,
        )
        with self._lock:
            self._clients.add(client)
        return client

    def end(self, client: ClientMemory) -> None:
        """The connection is gone."""
        with self._lock:
            self._clients.discard(client)
        client.close()

    def stop(self) -> None:
        """Ends the thread. Idempotent."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(_TICK_S):
            now_s = self._clock()
            for client in self._snapshot():
                num_ended = client.end_leases(now_s)
                if num_ended:
                    self._metrics.expired_leases.inc(num_ended)
                    _log.info("%d leases ended by their deadline: a client was stopped, or is very slow", num_ended)

    def _snapshot(self) -> list[ClientMemory]:
        with self._lock:
            return list(self._clients)

    def _held_bytes(self) -> int:
        return sum(client.held_bytes for client in self._snapshot())
