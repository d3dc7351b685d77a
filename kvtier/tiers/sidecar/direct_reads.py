"""Blocks of a tier in the tier process, read where they lie: the engine's end. See `kvtier.tiers.lease`."""

import contextlib
import logging
import os
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import NamedTuple, Protocol

from kvtier.clock import MONOTONIC
from kvtier.errors import KvtierError
from kvtier.identity.keys import StoreKey
from kvtier.memory.mapped_slab import MappedSlab
from kvtier.memory.slab_layout import SharedSlab
from kvtier.memory.slot_memory import SlotMemory
from kvtier.metrics import Metrics
from kvtier.system.quiet_log import QuietLog
from kvtier.tiers.base import Status
from kvtier.tiers.lease import SlotRef
from kvtier.tiers.sidecar.lease_table import NO_LEASE
from kvtier.tiers.sidecar.messages import MAX_BLOCKS, PLACE_FIELDS, Verb, pack_keys, pack_numbers, unpack_numbers
from kvtier.tiers.sidecar.supervisor import TierProcess

_TICK_S = 0.5
"""Seconds between two looks for slabs that have ended. Until then the system does not have their memory back. When many
are to be mapped, the tier hears as often of those that are."""
_IDLE_S = 60.0
"""A slab that nobody borrowed from for so long makes room for another one. To pin memory costs this process and its
neighbours time, which must not be spent on slabs that take turns."""

_log = logging.getLogger(__name__)


class Attaches(Protocol):
    """Something that copies out of memory that was lent. Any thread, but one at a time."""

    def attach(self, memory: SlotMemory) -> bool:
        """Gets ready for copies from there, which may take a while. False: they would be slow. `detach` it anyway."""

    def detach(self, memory: SlotMemory) -> None:
        """Notes that no copy from there is under way, and none will come."""


class LeasedBlocks(NamedTuple):
    """The blocks of one loan that lie in one slab."""

    memory: MappedSlab
    indexes: list[int]
    """The place of each block among those that were asked for."""
    slots: list[int]
    """The slots in the memory where the blocks are, in the same order."""
    generations: list[int]
    """The generation of what each of these slots holds, in the same order."""
    checksums: list[int]
    """The checksum that each block's writer gave it, in the same order; none where the tier has looked at all bytes."""


@dataclass(frozen=True, slots=True)
class DirectRead:
    """Blocks that may be read where they lie until `DirectReads.end_read`."""

    blocks: list[LeasedBlocks]
    lease_id: int
    num_blocks: int
    """The number of blocks that were asked for."""
    nbytes: int
    """The size of each payload."""
    held_until_s: float
    """The end of the loan by the monotonic clock."""
    serials: list[int]
    """The serials of the slabs of `blocks`."""


@dataclass(slots=True)
class _Slab:
    """A slab of the tier that is mapped here. Guarded by DirectReads._lock."""

    memory: MappedSlab
    direct_read_s: float
    """The time when somebody last wanted something of the slab, by the monotonic clock."""
    num_leases: int = 0
    has_ended: bool = False
    """Unmapped with its last loan."""


class DirectReads:
    """Borrows from one tier of a `TierProcess`, whatever becomes of the process. Any thread.

    Slabs are mapped, and attached to the device, by a thread of its own: the blocks of a slab are lent once it is. A
    slab that the tier has given up is unmapped within a second.
    """

    def __init__(
        self,
        tier: str,
        process: TierProcess,
        device: Attaches,
        metrics: Metrics,
        *,
        most_bytes: int = 2**60,
        verified: bool = True,
    ) -> None:
        """
        :param process: stays the caller's, like `device`; both outlive this.
        :param most_bytes: of slabs that are mapped at a time. Where one more is wanted, those that nobody has borrowed
            from for a minute go, the least recently used first. Blocks of what finds no room are not lent.
        :param verified: whether the tier looks at all bytes that it lends; see `LeasingTier.lease`.
        """
        self._tier, self._process, self._device, self._most_bytes = tier, process, device, most_bytes
        self._verified = verified
        self._hits = [metrics.tier_blocks.labels(tier, op, Status.HIT.name.lower()) for op in ("read", "lease")]
        self._bytes = metrics.tier_bytes.labels(tier, "read")
        self._seconds = metrics.tier_batch_seconds.labels(tier, "lease")
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        """Notified for the thread: slabs are wanted, loans are settled, or it is over."""
        self._wanted: dict[int, None] = {}
        """Serials of slabs that are to be mapped, in order. Guarded by _lock."""
        self._slabs: dict[int, _Slab] = {}
        """The mapped slabs, by serial. Changed by the thread alone, under _lock."""
        self._full_until_s = 0.0
        """The time until which no slab is wanted: there was no room for one. Changed by the thread alone."""
        self._settled: list[int] = []
        """Ids of loans that are over, as the tier does not know yet. Guarded by _lock."""
        self._is_over = False
        """Closed, or the device cannot copy from there. Guarded by _lock."""
        self._is_closed = False
        """Guarded by _lock."""
        self._failed = QuietLog(_log)
        self._thread = threading.Thread(target=self._run, name="kvtier-borrow", daemon=True)
        self._thread.start()

    @property
    def mapped_bytes(self) -> int:
        """The number of bytes of the slots in slabs that are mapped at the moment."""
        with self._lock:
            return self._mapped_bytes()

    def start_read(self, keys: Sequence[StoreKey], nbytes: int) -> DirectRead | None:
        """What the tier lends of these blocks now, to be settled in any case; None where that is nothing.

        :param nbytes: of each payload.
        """
        if self._is_over or not 0 < len(keys) <= MAX_BLOCKS:
            return None
        request = {
            "tier": self._tier,
            "keys": pack_keys(keys),
            "payload_bytes": nbytes,
            "verified": int(self._verified),
        }
        try:
            with self._seconds.time():
                answer = self._process.call(Verb.LEASE, request)
        except KvtierError as error:
            self._failed.warning(f"tier {self._tier} lends nothing: {error}")
            return None
        self._want(unpack_numbers(answer.data("not_ready")))
        lease_id = answer.number("lease")
        if lease_id == NO_LEASE:
            return None
        direct_read = DirectRead([], lease_id, len(keys), nbytes, answer.number("held_until_ms") / 1000, [])
        places = (unpack_numbers(answer.data(field)) for field in PLACE_FIELDS)
        self._find(direct_read, starmap(SlotRef, zip(*places, strict=True)))
        return direct_read

    def end_read(self, direct_read: DirectRead, wrong: Collection[int] = ()) -> list[bool]:
        """Ends a loan, once. Whether each block that was asked for was lent, in its place until now, and not wrong.

        Asks nobody, so that a thread of a busy interpreter is not held up: the tier hears of it from another thread.

        :param wrong: indexes of blocks whose bytes were found to be others than their writer's.
        """
        held = MONOTONIC() < direct_read.held_until_s
        whole = {
            i
            for leased in direct_read.blocks
            for i, slot, generation in zip(leased.indexes, leased.slots, leased.generations, strict=True)
            if held and leased.memory.generation(slot) == generation and i not in wrong
        }
        with self._changed:
            for serial in direct_read.serials:
                self._slabs[serial].num_leases -= 1
            self._settled.append(direct_read.lease_id)
            self._changed.notify_all()
        for hits in self._hits:
            hits.inc(len(whole))
        self._bytes.inc(len(whole) * direct_read.nbytes)
        return [i in whole for i in range(direct_read.num_blocks)]

    def close(self) -> None:
        """Unmaps everything. Call it after the last loan. Idempotent."""
        with self._changed:
            self._is_over = self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _want(self, serials: Sequence[int]) -> None:
        with self._changed:
            missing = [serial for serial in serials if serial not in self._slabs and serial not in self._wanted]
            if missing and not self._is_full():
                self._wanted.update(dict.fromkeys(missing))
                self._changed.notify_all()

    def _find(self, direct_read: DirectRead, places: Iterable[SlotRef]) -> None:
        """Finds where the blocks lie here. It passes over a slab that is not here, or that has no such slot."""
        by_serial: dict[int, LeasedBlocks] = {}
        now_s = MONOTONIC()
        with self._lock:
            for i, (serial, slot, generation, checksum) in enumerate(places):
                slab = self._slabs.get(serial)
                if slab is None or slot >= slab.memory.num_slots or direct_read.nbytes > slab.memory.slot_bytes:
                    continue
                leased = by_serial.get(serial)
                if leased is None:
                    leased = by_serial[serial] = LeasedBlocks(slab.memory, [], [], [], [])
                    slab.num_leases += 1
                    slab.direct_read_s = now_s
                leased.indexes.append(i)
                leased.slots.append(slot)
                leased.generations.append(generation)
                if not self._verified:
                    leased.checksums.append(checksum)
        direct_read.blocks.extend(by_serial.values())
        direct_read.serials.extend(by_serial)

    def _run(self) -> None:
        """Maps what is wanted, unmaps what has ended, and tells the tier which loans are over."""
        look_at_s = 0.0
        while not self._is_over:
            with self._changed:
                self._changed.wait_for(self._is_due, _TICK_S if self._slabs else None)
                wanted = list(self._wanted)
            try:
                self._release()
                if wanted or MONOTONIC() > look_at_s:
                    self._map_some(wanted)
                    self._give_up(self._ended())
                    look_at_s = MONOTONIC() + _TICK_S
            except Exception:
                # Blocks are read as ever where none can be lent.
                _log.exception("tier %s lends nothing any more", self._tier)
                self._is_over = True
        self._give_up(list(self._slabs))
        while self._slabs and not self._is_closed:  # what is left is lent at the moment
            with self._changed:
                self._changed.wait(_TICK_S)
            self._give_up([])
        self._release()

    def _is_due(self) -> bool:
        """Caller holds _lock."""
        return bool(self._wanted or self._settled) or self._is_over

    def _is_full(self) -> bool:
        return MONOTONIC() < self._full_until_s

    def _mapped_bytes(self) -> int:
        """Caller holds _lock."""
        return sum(_bytes_of(slab.memory) for slab in self._slabs.values())

    def _release(self) -> None:
        """Tells the tier of loans that are over."""
        with self._lock:
            settled, self._settled = self._settled, []
        if settled:
            with contextlib.suppress(KvtierError):  # the process has ended, and its loans with it
                self._process.call(Verb.RELEASE, {"leases": pack_numbers(settled)})

    def _map_some(self, wanted: Sequence[int]) -> None:
        """Maps wanted slabs, as many as can be mapped before the tier should hear of loans that are over."""
        tell_at_s = MONOTONIC() + _TICK_S
        for serial in wanted:
            if not self._is_full():
                self._map(serial)
            with self._lock:
                del self._wanted[serial]
            self._release()
            if self._is_over or MONOTONIC() > tell_at_s:
                return

    def _map(self, serial: int) -> None:
        try:
            shared = self._process.fetch_slab(serial)
            if shared is None:
                return
            if not self._make_room(_bytes_of(shared)):
                os.close(shared.descriptor)
                return
            memory = MappedSlab.map(shared)
        except (OSError, KvtierError) as error:
            self._failed.warning(f"tier {self._tier}: a slab cannot be mapped: {error}")
            return
        is_attached = False
        try:
            is_attached = self._device.attach(memory)
        finally:
            if not is_attached:
                self._device.detach(memory)  # as far as it came
        if not is_attached:
            _log.warning("tier %s: the device cannot copy from its memory; blocks go by way of the arena", self._tier)
            self._is_over = True
            return
        with self._lock:
            self._slabs[serial] = _Slab(memory, MONOTONIC())

    def _make_room(self, nbytes: int) -> bool:
        """Whether there is room for a slab of this size: gives up others for it that nobody has used lately."""
        now_s, idle = MONOTONIC(), list[int]()
        with self._lock:
            excess_bytes = self._mapped_bytes() + nbytes - self._most_bytes
            for serial, slab in sorted(self._slabs.items(), key=lambda item: item[1].direct_read_s):
                if excess_bytes > 0 and not slab.num_leases and slab.direct_read_s + _IDLE_S <= now_s:
                    idle.append(serial)
                    excess_bytes -= _bytes_of(slab.memory)
            if excess_bytes > 0:
                self._full_until_s = now_s + _IDLE_S
        if excess_bytes > 0:
            _log.info("tier %s: no more of its memory is mapped than pool.pinned_bytes", self._tier)
            return False
        self._give_up(idle)
        return self.mapped_bytes + nbytes <= self._most_bytes  # or one of them has just been lent again

    def _ended(self) -> list[int]:
        """Serials of mapped slabs that the tier has given up. Tells the tier process which ones there are."""
        serials = [serial for serial, slab in self._slabs.items() if not slab.has_ended]
        try:
            answer = self._process.call(Verb.SLABS, {"mapped": pack_numbers(serials)})
        except KvtierError:
            return serials  # with the process that had them
        return unpack_numbers(answer.data("ended"))

    def _give_up(self, serials: Sequence[int]) -> None:
        """Unmaps these, and what has ended before, unless it is lent at the moment."""
        with self._lock:
            for serial in serials:
                self._slabs[serial].has_ended = True
            free = [serial for serial, slab in self._slabs.items() if slab.has_ended and not slab.num_leases]
            given_up = [self._slabs.pop(serial) for serial in free]
        for slab in given_up:
            self._device.detach(slab.memory)


def _bytes_of(slab: MappedSlab | SharedSlab) -> int:
    return slab.slot_bytes * slab.num_slots
