"""What stands between a mover and its copies in the model: Python's time, and when copies began and ended."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import cast

from kvtier.device.kv import Blocks, DeviceKV, Fence, MemoryUse
from kvtier.identity.keys import StoreKey
from kvtier.memory.arena import Arena
from kvtier.memory.mapped_slab import MappedSlab
from kvtier.memory.slot_memory import SlotMemory
from kvtier.tiers.sidecar.direct_reads import DirectRead, LeasedBlocks
from kvtier_bench.gpu.simulation.timeline import Timeline
from kvtier_bench.gpu.streams.pace import Speeds
from kvtier_bench.gpu.streams.reserved import ReservedArena

_SLAB_BYTES = 64 << 20


class Fences(Enum):
    """The moment at which the event is recorded that copies wait for."""

    AT_ITS_TURN = "when a batch's turn comes"
    """The mover's thread records it, behind all that the engine has queued by then, as it was once. Loads from
    host memory had one thread then."""
    AT_SUBMIT = "when it is submitted"
    """The engine's thread records it, behind what is queued then. For saves it is so in any case."""
    AT_PROCESSED_STEP = "after the last processed step"
    """Loads come after the last step that the engine has seen the end of, as in vLLM."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that is over. Times are the timeline's."""

    begin_s: float
    """The time when the copy's thread asked for it, after Python's time."""
    waited_s: float
    """How long the device waited for the fence, where that is known: of loads."""
    end_s: float
    num_blocks: int


class TimedKV:
    """`DeviceKV` that takes the time Python takes, and notes when copies were done."""

    def __init__(
        self, inner: DeviceKV, timeline: Timeline, speeds: Speeds, fences: Fences, *, num_at_a_time: int
    ) -> None:
        """:param num_at_a_time: how many copies of one kind run at a time."""
        self._inner, self._timeline, self._speeds, self._fences = inner, timeline, speeds, fences
        self._num_at_a_time = num_at_a_time
        self.copies: list[Copy] = []
        """The copies until now. The movers' threads add to it, one at a time."""

    @property
    def num_blocks(self) -> int:
        return self._inner.num_blocks

    @property
    def block_bytes(self) -> int:
        return self._inner.block_bytes

    def begin_verifying(self) -> bool:
        return False

    def wrong_blocks(
        self, device_slots: Sequence[int], prefixes: Sequence[bytes], checksums: Sequence[int]
    ) -> list[int]:
        return self._inner.wrong_blocks(device_slots, prefixes, checksums)

    @property
    def memory_use(self) -> MemoryUse:
        return self._inner.memory_use

    def fence(self) -> Fence | None:
        return self._inner.fence()

    def gather(
        self, device_slots: Sequence[int], arena: Arena, arena_slots: Sequence[int], *, after: Fence | None
    ) -> None:
        def copy() -> float:
            self._inner.gather(device_slots, arena, arena_slots, after=self._fence(after))
            return 0.0

        self._note(copy, len(device_slots))

    def scatter(
        self, arena: SlotMemory, arena_slots: Sequence[int], device_slots: Sequence[int], *, after: Fence | None
    ) -> float:
        return self.scatter_all([Blocks(arena, arena_slots, device_slots)], after=after)

    def scatter_all(self, sources: Sequence[Blocks], *, after: Fence | None) -> float:
        num_blocks = sum(len(blocks.slots) for blocks in sources)
        return self._note(lambda: self._inner.scatter_all(sources, after=self._fence(after)), num_blocks)

    def gb_per_s(self) -> float:
        """The speed of all copies until now, from the end of the first ones, which ran at a time: they waited for the
        engine."""
        others = self.copies[self._num_at_a_time :]
        seconds = max(copy.end_s for copy in others) - self.copies[self._num_at_a_time - 1].end_s
        return sum(copy.num_blocks for copy in others) * self.block_bytes / seconds / 1e9

    def attach(self, memory: SlotMemory) -> bool:
        return self._inner.attach(memory)

    def detach(self, memory: SlotMemory) -> None:
        self._inner.detach(memory)

    def _fence(self, after: Fence | None) -> Fence | None:
        return self._inner.fence() if self._fences is Fences.AT_ITS_TURN else after

    def _note(self, copy: Callable[[], float], num_blocks: int) -> float:
        self._timeline.sleep(self._speeds.batch_s)
        begin = self._timeline.now
        waited_s = copy()
        self.copies.append(Copy(begin, waited_s, self._timeline.now, num_blocks))
        return waited_s


class LendingPool:
    """A stand-in for a `DirectReads`, of a pool that has every block. Any thread."""

    def __init__(self, num_blocks: int, block_bytes: int, device: DeviceKV, timeline: Timeline, speeds: Speeds) -> None:
        per_slab = max(1, _SLAB_BYTES // block_bytes)
        self._slabs = [ReservedArena(per_slab, block_bytes) for _ in range(-(-num_blocks // per_slab))]
        for slab in self._slabs:
            device.attach(slab)
        self._per_slab, self._timeline, self._speeds = per_slab, timeline, speeds

    def start_read(self, keys: Sequence[StoreKey], nbytes: int) -> DirectRead:
        """Implements `DirectReads.start_read`. A block's place is in its key."""
        self._timeline.sleep(self._speeds.ipc_s + len(keys) * nbytes / self._speeds.verified_bytes_per_s)
        lent: dict[int, LeasedBlocks] = {}
        for index, key in enumerate(keys):
            serial, slot = divmod(int.from_bytes(key[-8:], "big"), self._per_slab)
            blocks = lent.setdefault(serial, LeasedBlocks(cast(MappedSlab, self._slabs[serial]), [], [], [], []))
            blocks.indexes.append(index)
            blocks.slots.append(slot)
        return DirectRead(list(lent.values()), 1, len(keys), nbytes, math.inf, list(lent))

    def end_read(self, borrowed: DirectRead, wrong: Collection[int] = ()) -> list[bool]:
        return [index not in wrong for index in range(borrowed.num_blocks)]
