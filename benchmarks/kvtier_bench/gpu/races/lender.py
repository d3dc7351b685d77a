"""A pool that lends, in this process: slots of a few memories, which others may be given at any time."""

import contextlib
import math
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from kvtier.device.kv import DeviceKV
from kvtier.identity.keys import StoreKey
from kvtier.memory.arena import Arena
from kvtier.memory.mapped_slab import MappedSlab
from kvtier.tiers.sidecar.direct_reads import DirectRead, LeasedBlocks
from kvtier_bench.gpu.measuring.host_copies import LentSlots, map_to_lend
from kvtier_bench.gpu.races.faults import Fault

POOL = "pool"
_NUM_SLABS = 2


@dataclass(slots=True)
class _Slab:
    arena: Arena
    """The memory as the pool has it."""
    memory: LentSlots
    """The slab's memory as a borrower has it, for reading."""
    generations: list[int]

    @property
    def mapped(self) -> MappedSlab:
        """The memory by the type that a `DirectReads` has for it."""
        return cast(MappedSlab, self.memory)


class Lender:
    """A pool, and a stand-in for the `DirectReads` that its blocks come from. `put` is the
    pool's, `start_read` and `end_read` are those of `DirectReads`. Any thread."""

    def __init__(self, slabs: Sequence[_Slab], fault: Fault) -> None:
        self._slabs, self._fault = slabs, fault
        self._places: dict[bytes, tuple[int, int]] = {}
        """Slab and slot of each block, by its key. Guarded by _lock, like generations."""
        self._lock = threading.Lock()

    @classmethod
    @contextlib.contextmanager
    def over(cls, num_slots: int, slot_bytes: int, device: DeviceKV, fault: Fault) -> Iterator["Lender"]:
        """A lender with memory that `device` can copy from: the first copy pins it, if the driver lets it."""
        with contextlib.ExitStack() as stack:
            slabs = []
            for _ in range(_NUM_SLABS):
                arena = Arena(num_slots // _NUM_SLABS, slot_bytes, shared=True)
                stack.callback(arena.close)
                lent = map_to_lend(arena)
                stack.callback(device.detach, lent)
                slabs.append(_Slab(arena, lent, [1] * arena.num_slots))
            yield cls(slabs, fault)

    def place_of(self, key: bytes) -> int:
        """The place that `put` was given for it."""
        slab_number, slot = self._places[key]
        return slot * _NUM_SLABS + slab_number

    def put(self, key: bytes, place: int, payload: npt.NDArray[np.uint8]) -> None:
        """Writes a block to a place, whose generation changes before, as in a real pool."""
        slab_number, slot = place % _NUM_SLABS, place // _NUM_SLABS
        slab = self._slabs[slab_number]
        with self._lock:
            for former in [key for key, place in self._places.items() if place == (slab_number, slot)]:
                del self._places[former]
            slab.generations[slot] += 1
        slab.arena.rows[slot] = payload
        with self._lock:
            self._places[key] = slab_number, slot

    def start_read(self, keys: Sequence[StoreKey], nbytes: int) -> DirectRead | None:
        """Implements `DirectReads.start_read`. Blocks that the pool does not have are not lent."""
        lent: dict[int, LeasedBlocks] = {}
        with self._lock:
            for index, key in enumerate(keys):
                place = self._places.get(key[:16] + key[32:])  # without its namespace
                if place is None:
                    continue
                slab = self._slabs[place[0]]
                blocks = lent.setdefault(place[0], LeasedBlocks(slab.mapped, [], [], [], []))
                blocks.indexes.append(index)
                blocks.slots.append(place[1])
                blocks.generations.append(slab.generations[place[1]])
        return DirectRead(list(lent.values()), 1, len(keys), nbytes, math.inf, list(lent))

    def end_read(self, borrowed: DirectRead, _wrong: Collection[int] = ()) -> list[bool]:
        """Returns whether each block was lent and kept its place, as `DirectReads.end_read` does."""
        whole = [False] * borrowed.num_blocks
        for serial, lent in zip(borrowed.serials, borrowed.blocks, strict=True):
            for index, slot, generation in zip(lent.indexes, lent.slots, lent.generations, strict=True):
                is_same = self._slabs[serial].generations[slot] == generation
                whole[index] = is_same or self._fault is Fault.OLD_GENERATION
        return whole
