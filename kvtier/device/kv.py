"""Moving blocks between device slots and arena slots, many blocks a call.

The arena is the host tier's memory and, when there is no host tier, the staging area: one row per
slot, preallocated and pre-faulted, because a copy into fresh pages runs at a tenth of the speed.
"""

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.errors import InvalidInputError
from kvtier.memory.arena import Arena
from kvtier.memory.buffers import Bytes2D
from kvtier.memory.copy_ranges import Ranges, copy_from, copy_to, ranges_of
from kvtier.memory.slot_memory import SlotMemory

Bytes3D = npt.NDArray[np.uint8]
_Places = slice | npt.NDArray[np.int64]
_FEW_PIECES, _MOST_PIECES = 2, 8
"""Pieces of a batch. Every copy gives up the GIL and must wait for it afterwards: 5 ms, where the engine is busy."""
_LARGE_BYTES = 128 << 10
"""The part's bytes from which on the kernel pins what a scatter copies: numpy would hold the GIL for longer."""
_LARGE_GATHERED_BYTES = 8 << 10
"""The part's bytes from which on the kernel does a gather: numpy would copy by way of a buffer, which takes longer."""


class Blocks(NamedTuple):
    """Blocks in one memory, and where they are on the device. As many slots on either side."""

    memory: SlotMemory
    slots: Sequence[int]
    device_slots: Sequence[int]


class Fence:
    """A place in the queue of work that an engine has given its device: all that was queued before it.

    `DeviceKV.fence` makes it, and copies of the same device take it. Nothing else can be done with it.
    """

    __slots__ = ()


class MemoryUse(NamedTuple):
    """What copies between device and host memory take."""

    staging_bytes: int = 0
    """Memory on the device, beside the KV."""
    pinned_bytes: int = 0
    """Host memory that is page-locked: the arena, and what a pool lends."""
    pinning_s: float = 0.0
    """Seconds that page-locking has taken since the start."""


class DeviceKV(Protocol):
    """The device side of a copy: paged KV seen as one row of bytes per block.

    A device may run behind the engine's thread. A copy touches device slots when everything before its fence `after`
    is done, and waits for nothing that was queued later. `fence` is called in the engine's thread, copies in the
    movers' threads.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    def fence(self) -> Fence | None:
        """Marks what the calling thread has queued until now; it costs some microseconds.

        None: there is no queue, and all that the thread has done is done.
        """

    def gather(
        self, device_slots: Sequence[int], arena: Arena, arena_slots: Sequence[int], *, after: Fence | None
    ) -> None:
        """Device to arena, `device_slots[i]` to `arena_slots[i]`. On return the bytes are in the arena.

        :param after: what has written the blocks is before it. None: that is done.
        """

    def scatter(
        self, arena: SlotMemory, arena_slots: Sequence[int], device_slots: Sequence[int], *, after: Fence | None
    ) -> float:
        """Arena to device. On return the bytes are on the device. Gives the seconds that it waited for the fence.

        :param after: what last used the device slots is before it. None: that is done.
        """

    def scatter_all(self, sources: Sequence[Blocks], *, after: Fence | None) -> float:
        """Copies blocks of several memories, arenas or attached, to the device at once, as `scatter` does those of
        one."""

    def begin_verifying(self) -> bool:
        """Gets ready for `wrong_blocks`, before any copy. False: this device cannot, and who reads verifies."""

    def wrong_blocks(
        self, device_slots: Sequence[int], prefixes: Sequence[bytes], checksums: Sequence[int]
    ) -> list[int]:
        """Which blocks are others on the device than their writers summed: places in `device_slots`, in order.

        Their copies are done, and nobody writes there. Only after `begin_verifying` has said that it can be asked.

        :param prefixes: what each block's checksum begins with: `kvtier.codec.checksums.prefix`.
        :param checksums: those of the writers.
        """

    @property
    def memory_use(self) -> MemoryUse:
        """The memory that copies take at the moment. Any thread."""

    def attach(self, memory: SlotMemory) -> bool:
        """Gets ready to copy from and to an arena, or from lent memory, read-only maybe. Any thread, beside copies.

        Blocks for as long as that takes, about 0.2 s per GiB on CUDA. False: its copies will be slow.
        """

    def detach(self, memory: SlotMemory) -> None:
        """Undoes `attach`, whatever it answered. No copy from or to there is under way, and none will come."""


def writable_rows(memory: SlotMemory) -> Bytes2D:
    """Returns `memory.rows` for torch, which warns of memory that is read-only: writing there ends the process.

    Valid as long as `memory` is kept.
    """
    rows = memory.rows
    if rows.flags.writeable:
        return rows
    alias = (ctypes.c_uint8 * rows.nbytes).from_address(rows.ctypes.data)
    return np.frombuffer(memoryview(alias), dtype=np.uint8).reshape(rows.shape)


def check_slots(device: DeviceKV, blocks: Blocks) -> None:
    """Raises `InvalidInputError`: slots that are not there, more on one side, or too small."""
    memory, memory_slots, device_slots = blocks
    if device.block_bytes > memory.slot_bytes:
        raise InvalidInputError(f"blocks of {device.block_bytes} bytes in slots of {memory.slot_bytes}")
    if len(device_slots) != len(memory_slots):
        raise InvalidInputError(f"{len(device_slots)} device slots and {len(memory_slots)} arena slots")
    for slots, num_slots in ((device_slots, device.num_blocks), (memory_slots, memory.num_slots)):
        if slots and not 0 <= min(slots) <= max(slots) < num_slots:
            raise InvalidInputError(f"slots {min(slots)} to {max(slots)}, of {num_slots}")


class HostKV(DeviceKV):
    """What KV in the host's own memory has in common: no queue behind the engine's thread, and nothing pinned."""

    def fence(self) -> Fence | None:
        """None: the engine's thread itself reads and writes this memory."""
        return None

    def scatter(
        self, arena: SlotMemory, arena_slots: Sequence[int], device_slots: Sequence[int], *, after: Fence | None
    ) -> float:
        return self.scatter_all([Blocks(arena, arena_slots, device_slots)], after=after)

    def begin_verifying(self) -> bool:
        """False: a core that looks at blocks here takes as long as where they come from."""
        return False

    def wrong_blocks(
        self, device_slots: Sequence[int], prefixes: Sequence[bytes], checksums: Sequence[int]
    ) -> list[int]:
        """Raises `InvalidInputError`: blocks are verified before they come here."""
        raise InvalidInputError(f"{len(device_slots)} blocks to verify on a device that does not")

    @property
    def memory_use(self) -> MemoryUse:
        """None: nothing is staged or pinned."""
        return MemoryUse()

    def attach(self, memory: SlotMemory) -> bool:
        return True

    def detach(self, memory: SlotMemory) -> None:
        pass


class HostMemoryKV(HostKV):
    """`DeviceKV` for engines whose KV lives in host memory (CPU inference, tests). Copies release the GIL."""

    def __init__(self, *parts: npt.NDArray[Any]) -> None:
        """
        :param parts: of all blocks, e.g. one per layer, each `[num_blocks, part_bytes]` uint8, writable, rows
            contiguous: views, nothing is copied. A block is its parts, one after the other.
        """
        for part in parts:
            if part.ndim != 2 or part.dtype != np.uint8 or part.strides[1] != 1 or not part.flags.writeable:
                raise InvalidInputError(
                    f"KV of shape {part.shape}, dtype {part.dtype}, strides {part.strides}: "
                    "need a writable uint8 view of [num_blocks, part_bytes] with contiguous rows"
                )
        if len({part.shape[0] for part in parts}) != 1:
            raise InvalidInputError(
                f"KV in {len(parts)} parts of {[len(p) for p in parts]} blocks: need the same of each"
            )
        self._parts: list[Bytes2D] = list(parts)
        """The parts, all of them: the views below hold on to some only."""
        self._layers = list(_alike(self._parts))
        self._copies_ranges = True
        """Whether the system copies many ranges at once, as far as is known."""
        self._block_bytes = sum(int(part.shape[1]) for part in parts)
        self._scattering = threading.Lock()
        """Held by the one scatter that copies. One core's copy is nearly as fast as the memory; a second one beside it
        would take the engine's core, while the next batch can be read."""

    @property
    def num_blocks(self) -> int:
        return int(self._parts[0].shape[0])

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    def gather(
        self, device_slots: Sequence[int], arena: Arena, arena_slots: Sequence[int], *, after: Fence | None
    ) -> None:
        blocks = Blocks(arena, arena_slots, device_slots)
        check_slots(self, blocks)
        pieces = list(_pieces(device_slots, arena_slots))
        if self._in_one_call(copy_from, [blocks], pieces, _LARGE_GATHERED_BYTES):
            return
        for layers, slots in self._beside(arena):
            for source, target in pieces:
                # Not `np.take`, which begins with a copy of all of `layers` where these lie apart.
                slots[:, target] = layers[:, source]

    def scatter_all(self, sources: Sequence[Blocks], *, after: Fence | None) -> float:
        for blocks in sources:
            check_slots(self, blocks)
        pieces = [list(_pieces(blocks.device_slots, blocks.slots)) for blocks in sources]
        with self._scattering:
            if self._in_one_call(copy_to, sources, list(itertools.chain(*pieces)), _LARGE_BYTES):
                return 0.0
            for blocks, theirs in zip(sources, pieces, strict=True):
                for layers, slots in self._beside(blocks.memory):
                    for target, source in theirs:
                        layers[:, target] = slots[:, source]
        return 0.0

    def _in_one_call(
        self,
        copy: Callable[[Ranges, Ranges], bool],
        every: Sequence[Blocks],
        pieces: Sequence[tuple[_Places, _Places]],
        large_bytes: int,
    ) -> bool:
        """Has the kernel copy large blocks that are all over the place. False: it does not, or numpy does it better.

        :param large_bytes: of the smallest part; numpy is better at less.
        """
        are_runs = all(isinstance(place, slice) for piece in pieces for place in piece)
        is_small = min(part.shape[1] for part in self._parts) < large_bytes
        if not self._copies_ranges or is_small or (are_runs and len(pieces) * len(self._layers) <= _FEW_PIECES):
            return False
        rows = [blocks.memory.rows for blocks in every]
        """Kept until all is copied: addresses alone do not keep the memory."""
        widths = [part.shape[1] for part in self._parts]
        beside: list[Ranges] = []
        for blocks, theirs in zip(every, rows, strict=True):
            starts = itertools.accumulate(widths[:-1], initial=theirs.ctypes.data)
            beside.append(ranges_of(blocks.slots, [(start, blocks.memory.slot_bytes) for start in starts], widths))
        device_slots = [slot for blocks in every for slot in blocks.device_slots]
        device = ranges_of(device_slots, [(part.ctypes.data, part.strides[0]) for part in self._parts], widths)
        self._copies_ranges = copy(device, np.concatenate(beside))
        return self._copies_ranges

    def _beside(self, arena: SlotMemory) -> Iterator[tuple[Bytes3D, Bytes3D]]:
        """Views `[num_parts, slots, part_bytes]` of device and arena, for all parts that are alike."""
        start = 0
        for layers in self._layers:
            num_parts, _, part_bytes = layers.shape
            stop = start + num_parts * part_bytes
            columns = arena.rows[:, start:stop].reshape(arena.num_slots, num_parts, part_bytes)
            yield layers, columns.transpose(1, 0, 2)
            start = stop


def _alike(parts: Sequence[Bytes2D]) -> Iterator[Bytes3D]:
    """Views `[num_parts, num_blocks, part_bytes]` of parts that follow one another at equal distances.

    All parts of such a view are copied by one call.
    """
    start = 0
    while start < len(parts):
        first, stop, step = parts[start], start + 1, 0
        while stop < len(parts) and (parts[stop].shape, parts[stop].strides) == (first.shape, first.strides):
            distance = parts[stop].ctypes.data - parts[stop - 1].ctypes.data
            if stop > start + 1 and distance != step:
                break
            step, stop = distance, stop + 1
        shape, strides = (stop - start, *first.shape), (step, *first.strides)
        yield np.lib.stride_tricks.as_strided(first, shape, strides)
        start = stop


def _pieces(device_slots: Sequence[int], arena_slots: Sequence[int]) -> Iterator[tuple[_Places, _Places]]:
    """Pairs of places, as few as may be, with arena slots that go up or down by equal steps, and so need no index.

    Slots that were taken, freed or evicted together form such runs. Scattered slots become one pair with an
    index on both sides: what is copied then goes by way of a buffer.
    """
    ends = [0]
    while ends[-1] < len(arena_slots) and len(ends) <= _MOST_PIECES:
        ends.append(_end_of_run(arena_slots, ends[-1]))
    if ends[-1] < len(arena_slots):
        ends = [0, len(arena_slots)]
    for start, stop in itertools.pairwise(ends):
        yield _places(device_slots[start:stop]), _places(arena_slots[start:stop])


def _end_of_run(slots: Sequence[int], start: int) -> int:
    """The end of the longest run of equal steps from there."""
    stop = min(start + 2, len(slots))
    while stop < len(slots) and slots[stop] - slots[stop - 1] == slots[start + 1] - slots[start]:
        stop += 1
    return stop


def _places(slots: Sequence[int]) -> _Places:
    step = slots[1] - slots[0] if len(slots) > 1 else 1
    if step == 0 or _end_of_run(slots, 0) < len(slots):
        return np.asarray(slots, dtype=np.int64)
    stop = slots[-1] + (1 if step > 0 else -1)
    return slice(slots[0], None if stop < 0 else stop, step)
