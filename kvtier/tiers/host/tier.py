"""The host tier: blocks in this process's memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvtier.clock import MONOTONIC, Clock
from kvtier.errors import InvalidInputError
from kvtier.events import EventSink, ignore_event
from kvtier.identity.keys import StoreKey, TenantId
from kvtier.memory.buffers import ReadableBuffer
from kvtier.memory.pages import PAGE_BYTES, copy_bytes
from kvtier.memory.slab_layout import SharedSlab
from kvtier.metrics import Metrics
from kvtier.policies.base import EvictionPolicy
from kvtier.policies.lru import LRU
from kvtier.tiers.base import Item, Status, Usage, WriteStatus, require_pairs
from kvtier.tiers.common.call_guard import CallGuard
from kvtier.tiers.common.event_queue import EventQueue
from kvtier.tiers.common.shares import Share
from kvtier.tiers.host.pins import PinnedSlots, Pins, ReadPin, SlabPin
from kvtier.tiers.host.slab import OWN_PROCESS
from kvtier.tiers.host.slab_memory import SlabMemory
from kvtier.tiers.host.slab_sizes import SlabSizes
from kvtier.tiers.host.slots import HostSlots, WriteSlot
from kvtier.tiers.host.tenant_removal import keys_of, retire_tenant

BLOCK_OVERHEAD_BYTES = 768
"""What a block takes of this process besides its slot: its key, its entry, its place in the order of eviction, when
their tables have just grown."""


class HostTier:
    """Blocks in slabs of memory, each slab of one tenant, one slot size and one writer.

    Slabs are made on demand until `capacity_bytes`. Then blocks are evicted, in one order for each tenant, whatever
    their size, their writer and their slab: memory goes from sizes and writers with cold blocks to those that need it,
    by copying the blocks that a slab is left with to others of its kind (`kvtier.tiers.host.reclaim`). Tenants
    share the memory by what each is owed (`set_shares`): equal parts, if nothing else was said. What one does not
    use others have, until it asks for it. A slab that somebody reads from or writes to stays, and so does one with
    pins. All slabs together never exceed the capacity, but by the one that the blocks of a dead writer are
    copied to. A payload larger than `slab_bytes` gets a slab of its own; one larger than the capacity is FULL.

    With `shared`, slabs lie in memory that other processes may map: they read what `acquire_places` holds for
    them, and write to slots that were prepared for them as `writer`.

    Any thread. Copies run outside the lock, the slot pinned, and release the GIL. About 3 us per block
    besides the copy, but a new slab takes 0.1 to 0.4 ms per MiB to prefault.
    """

    def __init__(  # noqa: PLR0913 - what may be set, by keyword
        self,
        capacity_bytes: int,
        *,
        slab_bytes: int = 64 * 2**20,
        name: str = "host",
        prefault: bool = True,
        shared: bool = False,
        block_overhead_bytes: int = 0,
        make_policy: Callable[[], EvictionPolicy[StoreKey]] = LRU,
        min_residency_s: float = 0.0,
        is_kept_elsewhere: Callable[[TenantId], bool] = lambda tenant: False,
        on_event: EventSink = ignore_event,
        metrics: Metrics | None = None,
        clock: Clock = MONOTONIC,
    ) -> None:
        """
        :param capacity_bytes: memory for slabs and for what is kept of their blocks, rounded down to whole pages.
        :param slab_bytes: the most memory that is taken at a time; a tenant's first slabs are smaller. Limited to an
            eighth of the capacity.
        :param prefault: touch new memory before use. Off only where start-up counts more than speed.
        :param shared: in memory that other processes may map; Linux only.
        :param block_overhead_bytes: what a block takes of the capacity besides its slot: `BLOCK_OVERHEAD_BYTES` where
            the capacity is all that the process may take.
        :param make_policy: makes the order in which a tenant's blocks are evicted.
        :param min_residency_s: a block is not evicted before: writers hear FULL instead. Except for writers of its own
            tenant that have no memory at all yet, else a client that writes without a pause would keep all others
            out; and for tenants that have less than they are owed.
        :param is_kept_elsewhere: whether `min_residency_s` does not count for a tenant's writes at this moment, because
            what is evicted can be had from somewhere else. Called with a lock: must not block.
        :param on_event: called from the threads that use the tier; must not call `close`.
        :param metrics: counts evictions.
        """
        if capacity_bytes < PAGE_BYTES or slab_bytes < 1:
            raise InvalidInputError(f"host tier of {capacity_bytes} bytes in slabs of {slab_bytes}: too small")
        self._name = name
        self._guard = CallGuard(f"tier {name}")
        self._events = EventQueue(name, on_event)
        self._slots = HostSlots(
            name,
            SlabMemory(
                SlabSizes(capacity_bytes, slab_bytes, shared=shared, block_overhead_bytes=block_overhead_bytes),
                make_policy,
                shared=shared,
                prefault=prefault,
            ),
            self._events,
            residency_s=lambda tenant: 0.0 if is_kept_elsewhere(tenant) else min_residency_s,
            num_evicted=(metrics or Metrics()).evicted_blocks.labels(name),
            clock=clock,
        )
        self._holds = Pins(self._slots)

    @property
    def name(self) -> str:
        return self._name

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        """Looks keys up in memory; a status per key, in order. Does not count as a use for eviction."""
        with self._guard:
            return self._slots.lookup(keys)

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[Status]:
        """Copies the payload of `keys[i]` over all of `into[i]`; a status per key, in order. The batch's last block
        becomes the coldest of it, as tails should."""
        require_pairs(keys, into)
        with self._guard:
            leases = self._holds.acquire(keys)
            try:
                return [_copy_out(lease, buffer) for lease, buffer in zip(leases, into, strict=True)]
            finally:
                self._holds.release(leases)

    def write(self, items: Sequence[Item[ReadableBuffer]]) -> list[WriteStatus]:
        """Stores payloads; a status per block, in order. The batch's last block becomes the coldest of it, as tails
        should."""
        with self._guard:
            slots: list[WriteSlot | WriteStatus] = []
            checksums: dict[WriteSlot, int] = {}
            try:
                for key, payload, _ in items:
                    slots.append(self._slots.prepare(key, len(payload)))
                for slot, (_, payload, checksum) in zip(slots, items, strict=True):
                    if isinstance(slot, WriteSlot):
                        copy_bytes(slot.view, payload)
                        checksums[slot] = checksum
            finally:  # after an error, what was copied in full is kept and the rest given back
                self._finish([s for s in slots if isinstance(s, WriteSlot)], checksums)
            return [WriteStatus.STORED if isinstance(slot, WriteSlot) else slot for slot in slots]

    def discard(self, keys: Sequence[StoreKey]) -> int:
        """Forgets these keys; returns how many were there. A key being written is forgotten when its writer commits."""
        with self._guard:
            num_found = self._slots.discard(keys)
            self._events.flush()
            return num_found

    def usage(self) -> Usage:
        """Returns how full the tier is; bytes are those of payloads that can be read."""
        with self._guard:
            return self._slots.usage()

    def taken_bytes(self) -> int:
        """What is taken of the capacity: slots with blocks, with what is kept of blocks and slabs. O(sizes in use)."""
        with self._guard:
            return self._slots.taken_bytes()

    def usage_of(self, tenant: TenantId) -> Usage:
        """One tenant's part of `usage`."""
        with self._guard:
            return self._slots.usage(tenant)

    def keys_of(self, tenant: TenantId) -> Iterator[list[StoreKey]]:
        """All keys of a tenant, those being written included, in parts; what changes meanwhile may be missed."""
        with self._guard:
            yield from keys_of(self._slots, tenant)

    def retire_tenant(self, tenant: TenantId) -> int:
        """Gives memory of the tenant back to the system, but for slabs with blocks, which take no others; how many
        bytes those have. After `discard` of all keys these are blocks that somebody reads or writes."""
        with self._guard:
            return retire_tenant(self._slots, tenant)

    def num_evicted_of(self, tenant: TenantId | None) -> int:
        """Blocks of the tenant that were evicted since the start; None: of all tenants."""
        return self._slots.changes.num_evicted_of(tenant)

    def near_eviction(self, share: float) -> list[StoreKey]:
        """The blocks that are evicted next: of each tenant that cannot grow, the coldest `share` of its slots.

        :param share: from 0 to 1; slots that are free already count as part of it. O(blocks returned).
        """
        with self._guard:
            return self._slots.near_eviction(share)

    def check(self) -> None:
        """Verifies the bookkeeping of keys, slots and memory; raises `InvariantError`."""
        with self._guard:
            self._slots.check()

    def close(self) -> None:
        """Gives back all memory but that under a lease or write slot, which lives until its view is gone.
        Idempotent."""
        if self._guard.close():
            self._slots.clear()
            self._events.flush()

    def acquire(self, keys: Sequence[StoreKey], *, touch: bool = True) -> list[ReadPin | None]:
        """Holds committed blocks in place for reading without a copy; None where `read` would miss.

        Counts as a use unless `touch` is off. Every lease goes back by `release`; until then its slot serves no
        other block.
        """
        with self._guard:
            return self._holds.acquire(keys, touch=touch)

    def release(self, leases: Iterable[ReadPin | None]) -> None:
        """Gives leases back. Ignores None and what was released before. Allowed after `close`."""
        self._holds.release(leases)

    def prepare(self, key: StoreKey, nbytes: int, *, writer: int = OWN_PROCESS) -> WriteSlot | WriteStatus:
        """Room for a payload of `nbytes`, to be filled by the caller. May evict other blocks.

        Returns EXISTS or FULL as `write` does. The slot stays the caller's until `commit` or `abort`.

        :param writer: in whose slabs; see `retire_writer`.
        """
        with self._guard:
            outcome = self._slots.prepare(key, nbytes, writer)
            self._events.flush()
            return outcome

    def commit(self, slot: WriteSlot, checksum: int) -> None:
        """Makes the block readable. `checksum` is kept for leases and not looked at.

        Raises `InvalidInputError` when the slot was committed or aborted before.
        """
        with self._guard:
            self._finish([slot], {slot: checksum})

    def commit_all(self, checksums: Mapping[WriteSlot, int]) -> None:
        """`commit` of a batch; its last block becomes the coldest of it, as tails should.

        Raises `InvalidInputError` when a slot was committed or aborted before; all others are committed.
        """
        with self._guard:
            self._finish(list(checksums), checksums)

    def abort(self, slot: WriteSlot) -> None:
        """Gives the slot back unwritten; does nothing after commit, abort or `close`."""
        self._slots.abort([slot])

    def abandon(self, slots: Iterable[WriteSlot]) -> None:
        """Gives up slots that their writer did not commit in time, and may still write to.

        Their slabs take no new block, and go when they are empty; what is committed in them can be read until then.
        Nobody else ever gets their memory. Ignores slots that were committed or aborted. Allowed after `close`.
        """
        self._slots.abandon(slots)

    def acquire_places(self, keys: Sequence[StoreKey], payload_bytes: Sequence[int]) -> PinnedSlots:
        """Holds committed blocks in place for another process that maps the slabs; counts as a use.

        A block of another length than asked for is a MISS. Ends with `release_places`, from any thread.
        """
        with self._guard:
            return self._holds.acquire_places(keys, payload_bytes)

    def release_places(self, places: PinnedSlots) -> None:
        """Gives back all that is held. Idempotent; allowed after `close`."""
        self._holds.release_places(places)

    def pin(self, keys: Sequence[StoreKey]) -> list[SlabPin | None]:
        """Keeps committed blocks in memory, however long; None where `read` would miss. Counts as a use.

        Every pin ends by `unpin`. A block that is discarded meanwhile misses at once; its memory comes back then.
        """
        with self._guard:
            return self._holds.pin(keys)

    def unpin(self, pins: Iterable[SlabPin]) -> None:
        """Ends pins. Ignores what was unpinned before. Allowed after `close`."""
        self._holds.unpin(pins)

    def are_findable(self, pins: Sequence[SlabPin]) -> list[bool]:
        """Whether each pinned block is what lookups of its key find: not once it was discarded."""
        with self._guard:
            return self._holds.are_findable(pins)

    def retire_writer(self, writer: int) -> None:
        """Notes that this writer writes to its slabs no more. What is committed in them can be read until an eviction.

        Commit or abort all its slots first. Allowed after `close`.
        """
        self._slots.retire_writer(writer)

    def set_shares(self, shares: Mapping[TenantId, Share]) -> None:
        """What these tenants are owed of memory, from now on; all others have equal shares. The change is made at once
        for all of them. Slabs change hands as they are asked for.

        A tenant that is above its cap gives up its coldest blocks now, for 2 seconds at most, and what is left then or
        is in use later, as it writes. Blocks stay as long as `min_residency_s` says.

        `InvalidInputError`, and nothing changed: more is guaranteed to all tenants than there is.
        """
        with self._guard:
            self._slots.set_shares(shares)

    def owed_bytes(self, tenant: TenantId) -> int:
        """Memory that the tenant can have, whatever those want who have memory now."""
        return self._slots.owed_bytes(tenant)

    def open_slab(self, tenant: TenantId, number: int, writer: int) -> SharedSlab | None:
        """A descriptor of one of the tenant's slabs, to be passed to `writer`: writable if the slab is its own.

        None when there is no such slab, or no longer. The caller closes the descriptor. `OSError`: none to be had.
        """
        with self._guard:
            return self._slots.open_slab(tenant, number, writer)

    def _finish(self, slots: Sequence[WriteSlot], checksums: Mapping[WriteSlot, int]) -> None:
        try:
            self._slots.finish(slots, checksums)
        finally:
            self._events.flush()


def _copy_out(lease: ReadPin | None, into: memoryview) -> Status:
    if lease is None or len(lease.view) != len(into):
        return Status.MISS
    copy_bytes(into, lease.view)
    return Status.HIT
