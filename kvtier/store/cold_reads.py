"""Reads of blocks that memory does not have and a tier below does."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvtier.codec.checksums import checksum
from kvtier.codec.stored_form import header_from_checksum
from kvtier.errors import ClosedError
from kvtier.identity.keys import StoreKey, tenant_of
from kvtier.store.private_buffers import PrivateBuffer, PrivateBuffers
from kvtier.store.tier_calls import TierCalls
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.lent_memory import LentMemory
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.host.pins import ReadPin
from kvtier.tiers.host.slots import WriteSlot
from kvtier.tiers.host.tier import HostTier


@dataclass(frozen=True, slots=True)
class Block:
    """A block that may be sent: valid until its lease or its buffer is released."""

    header: bytes
    """Stored-form header."""
    payload: memoryview
    lease: ReadPin | None
    """Holds the payload in memory; None when it lies in a buffer of its own."""
    source: str
    """The tier that had it, for the counter: `memory`, `disk`, `redis`."""
    buffer: PrivateBuffer | None = None
    """Has the payload when it is not in memory."""


def block_of(key: StoreKey, lease: ReadPin, source: str) -> Block:
    """Returns the block under a lease, without a look at its payload."""
    return Block(header_from_checksum(key, len(lease.view), lease.checksum), lease.view, lease, source)


class ColdReads:
    """Reads blocks from one tier into slots of the memory tier, each block once, however many ask for it.

    Where memory has no slot to spare, a block is served from a buffer of its own, and is a miss where there may be no
    more buffers. Any thread; waits for the tier. Two calls never wait for each other: each finishes its own blocks
    before it waits.
    """

    def __init__(
        self,
        memory: HostTier,
        tier: TierCalls,
        buffers: PrivateBuffers,
        on_admitted: Callable[[Sequence[StoreKey]], None],
        on_unread: Callable[[int], None],
    ) -> None:
        """
        :param buffers: where blocks go that memory has no room for.
        :param on_admitted: told of the blocks that memory got from the tier.
        :param on_unread: told of how many blocks were not read for want of room.
        """
        self._memory = memory
        self._tier = tier
        self._buffers = buffers
        self._on_admitted = on_admitted
        self._on_unread = on_unread
        self._lock = threading.Lock()
        self._flights: dict[StoreKey, threading.Event] = {}
        """Keys being read, with what is set when the reader is done. Guarded by _lock."""

    @property
    def tier_name(self) -> str:
        return self._tier.name

    def fetch(self, keys: Sequence[StoreKey], nbytes: int, found: dict[StoreKey, Block]) -> None:
        """Adds to `found` those of `keys` that the tier has with payloads of `nbytes`.

        The caller releases the leases and buffers of `found`, also after an exception.
        """
        statuses = self._tier.lookup(keys)
        wanted = dict.fromkeys(key for key, status in zip(keys, statuses, strict=True) if status is Status.HIT)
        if isinstance(disk := self._tier.tier, DiskTier):
            # A length that a client has only claimed takes no memory and evicts no blocks.
            lengths = disk.payload_bytes(list(wanted))
            wanted = dict.fromkeys(key for key, length in zip(wanted, lengths, strict=True) if length == nbytes)
        done = threading.Event()
        with self._lock:
            others = {key: self._flights[key] for key in wanted if key in self._flights}
            mine = [key for key in wanted if key not in others]
            self._flights.update(dict.fromkeys(mine, done))
        try:
            self._load(mine, nbytes, found)
        finally:
            with self._lock:
                for key in mine:
                    del self._flights[key]
            done.set()
        for key, flight in others.items():
            flight.wait()
            self._load([key], nbytes, found)

    def _load(self, keys: Sequence[StoreKey], nbytes: int, found: dict[StoreKey, Block]) -> None:
        """Adds what memory has by now, and the rest from the tier."""
        lent = LentMemory()
        slots: dict[StoreKey, WriteSlot] = {}
        private: dict[StoreKey, PrivateBuffer] = {}
        into: dict[StoreKey, memoryview] = {}
        num_unread = 0
        try:
            for key in keys:
                slot = self._memory.prepare(key, nbytes)
                if isinstance(slot, WriteSlot):
                    slots[key], into[key] = slot, slot.view
                elif slot is WriteStatus.EXISTS and (lease := self._memory.acquire([key])[0]) is not None:
                    found[key] = block_of(key, lease, self._tier.name)
                elif (buffer := self._buffers.take(tenant_of(key), nbytes)) is not None:
                    private[key], into[key] = buffer, buffer.view
                else:
                    num_unread += 1
            if num_unread:
                self._on_unread(num_unread)
            statuses = self._tier.read(list(into), list(into.values()), lent)
            checksums: dict[WriteSlot, int] = {}
            for (key, payload), status in zip(into.items(), statuses, strict=True):
                if status is not Status.HIT:
                    continue
                # The tier has held these bytes against their writer's checksum, and only this process can change them.
                if key in slots:
                    checksums[slots.pop(key)] = checksum(key, payload)
                else:
                    header = header_from_checksum(key, nbytes, checksum(key, payload))
                    found[key] = Block(header, payload, None, self._tier.name, private.pop(key))
            self._admit(checksums, found)
        finally:
            self._let_go(list(slots.values()), list(private.values()), lent)

    def _let_go(self, slots: Sequence[WriteSlot], private: Sequence[PrivateBuffer], lent: LentMemory) -> None:
        """Gives back the slots and buffers of what could not be read.

        Slots that a hung tier may still fill serve nobody before the tier answers. Their keys are free at once, since
        otherwise the blocks could neither be found nor be written until then.
        """
        with contextlib.suppress(ClosedError):
            if lent.is_in_use and slots:
                keys = [slot.key for slot in slots]
                statuses = zip(keys, self._memory.lookup(keys), strict=True)
                self._memory.discard([key for key, status in statuses if status is Status.PENDING])
        lent.when_done(partial(self._abort, slots, private))

    def _abort(self, slots: Sequence[WriteSlot], private: Sequence[PrivateBuffer]) -> None:
        for buffer in private:
            buffer.release()
        for slot in slots:
            with contextlib.suppress(ClosedError):
                self._memory.abort(slot)

    def _admit(self, checksums: dict[WriteSlot, int], found: dict[StoreKey, Block]) -> None:
        """Makes readable what was just read, and adds it unless it was discarded or evicted in the same moment."""
        self._memory.commit_all(checksums)
        keys = [slot.key for slot in checksums]
        leases = zip(keys, self._memory.acquire(keys), strict=True)
        admitted = {key: block_of(key, lease, self._tier.name) for key, lease in leases if lease is not None}
        found.update(admitted)
        if admitted:
            self._on_admitted(list(admitted))
