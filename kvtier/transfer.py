"""Moving blocks between device slots and arena slots, many blocks a call.

The arena is the host tier's memory and, when there is no host tier, the staging area: one row per
slot, preallocated and pre-faulted, because a copy into fresh pages runs at a tenth of the speed.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.copy_ranges import Ranges, copy_from, copy_to, ranges_of
from kvtier.errors import ClosedError, ConfigError, InvalidInputError
from kvtier.tiers import memfd
from kvtier.tiers.memory import map_memory

Bytes2D = npt.NDArray[np.uint8]
"""`[rows, bytes]`, uint8; each row is contiguous."""


_FEW = 2
"""Copies for which it is not worth while to put them into one call."""


class Arena:
    """`num_slots` slots of `slot_bytes` host memory. The owner of the slots decides who may touch which.

    Holds no bookkeeping and no lock: whoever hands out slot ids keeps writers apart.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, shared: bool = False) -> None:
        """Allocates and touches all memory: about 0.6 s per GiB on fresh pages.

        Raises `ConfigError` when the system does not have that much, or cannot share it.

        :param shared: a memfd of fixed size, which a tier process can map: copies are as fast, the first touch has
            no huge pages and takes twice as long. Otherwise anonymous memory.
        """
        if num_slots < 1 or slot_bytes < 1:
            raise InvalidInputError(f"arena of {num_slots} slots x {slot_bytes} bytes: both must be at least 1")
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self._rows: Bytes2D | None = None
        self._descriptor: int | None = None
        nbytes = num_slots * slot_bytes
        try:
            if shared:
                self._descriptor = memfd.create("kvtier-arena", nbytes)
                memory = memfd.map_new(self._descriptor, nbytes, prefault=True)
            else:
                memory = map_memory(nbytes, prefault=True)
        except (OSError, OverflowError) as error:
            self.close()
            raise ConfigError(
                f"host memory for {num_slots:,} slots of {slot_bytes:,} bytes cannot be had: {error}; "
                "lower host.capacity_bytes"
            ) from error
        self._rows = np.frombuffer(memory, dtype=np.uint8).reshape(num_slots, slot_bytes)

    @property
    def rows(self) -> Bytes2D:
        """`[num_slots, slot_bytes]` view of all memory."""
        if self._rows is None:
            raise ClosedError("the arena is closed")
        return self._rows

    def view(self, slot: int) -> memoryview:
        """Writable view of one slot."""
        return memoryview(self.rows[slot])

    @property
    def memory(self) -> memoryview:
        """All of it, slot after slot; writable."""
        return self.rows.reshape(-1).data

    @property
    def descriptor(self) -> int:
        """The memfd of a shared arena; open until `close`."""
        if self._descriptor is None:
            raise InvalidInputError("the arena is not shared, or closed")
        return self._descriptor

    def close(self) -> None:
        """Drops the memory as soon as the last view of it is gone. Idempotent."""
        self._rows = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class DeviceKV(Protocol):
    """The device side of a copy: paged KV seen as one row of bytes per block.

    Called from the movers' threads. Reads of device slots see everything that the engine's thread
    had written when the job was started.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    def gather(self, device_slots: Sequence[int], arena: Arena, arena_slots: Sequence[int]) -> None:
        """Device to arena, `device_slots[i]` to `arena_slots[i]`. On return the bytes are in the arena."""

    def scatter(self, arena: Arena, arena_slots: Sequence[int], device_slots: Sequence[int]) -> None:
        """Arena to device. On return the engine's next forward pass sees the bytes."""


class HostMemoryKV:
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
        ends = np.cumsum([part.shape[1] for part in parts]).tolist()
        self._columns = [slice(end - part.shape[1], end) for part, end in zip(parts, ends, strict=True)]
        """Of each part in an arena slot."""
        self._copies_ranges = True
        """Whether the system copies many ranges at once, as far as is known."""
        self._scattering = threading.Lock()
        """Held by the one scatter that copies. One core's copy is nearly as fast as the memory; a second one beside it
        would take the engine's core, while the next batch can be read."""

    @property
    def num_blocks(self) -> int:
        return int(self._parts[0].shape[0])

    @property
    def block_bytes(self) -> int:
        return int(self._columns[-1].stop)

    def gather(self, device_slots: Sequence[int], arena: Arena, arena_slots: Sequence[int]) -> None:
        runs = self._checked_runs(device_slots, arena, arena_slots)
        if self._in_one_call(copy_from, runs, device_slots, arena, arena_slots):
            return
        rows = arena.rows
        for device_run, arena_run in runs:
            for part, columns in zip(self._parts, self._columns, strict=True):
                np.copyto(rows[arena_run, columns], part[device_run])

    def scatter(self, arena: Arena, arena_slots: Sequence[int], device_slots: Sequence[int]) -> None:
        runs = self._checked_runs(device_slots, arena, arena_slots)
        with self._scattering:
            if self._in_one_call(copy_to, runs, device_slots, arena, arena_slots):
                return
            rows = arena.rows
            for device_run, arena_run in runs:
                for part, columns in zip(self._parts, self._columns, strict=True):
                    np.copyto(part[device_run], rows[arena_run, columns])

    def _checked_runs(
        self, device_slots: Sequence[int], arena: Arena, arena_slots: Sequence[int]
    ) -> list[tuple[slice, slice]]:
        """Raises `InvalidInputError` rather than let a copy touch other memory."""
        if self.block_bytes > arena.slot_bytes:
            raise InvalidInputError(f"blocks of {self.block_bytes} bytes in slots of {arena.slot_bytes}")
        for slots, num_slots in ((device_slots, self.num_blocks), (arena_slots, arena.num_slots)):
            if slots and not 0 <= min(slots) <= max(slots) < num_slots:
                raise InvalidInputError(f"slots {min(slots)} to {max(slots)}, of {num_slots}")
        return list(_runs(device_slots, arena_slots))

    def _in_one_call(
        self,
        copy: Callable[[Ranges, Ranges], bool],
        runs: Sequence[object],
        device_slots: Sequence[int],
        arena: Arena,
        arena_slots: Sequence[int],
    ) -> bool:
        """False: nothing, or not all, was copied: in few pieces numpy does it as well, and others never do."""
        if not self._copies_ranges or len(runs) * len(self._parts) <= _FEW:
            return False
        parts = [(part.ctypes.data, part.strides[0]) for part in self._parts]
        columns = [(arena.rows.ctypes.data + column.start, arena.slot_bytes) for column in self._columns]
        widths = [part.shape[1] for part in self._parts]
        device = ranges_of(device_slots, parts, widths)
        host = ranges_of(arena_slots, columns, widths)
        self._copies_ranges = copy(device, host)
        return self._copies_ranges


def _runs(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Pairs of slots as few pairs of slices: in each, both go up or down by a step of their own.

    One copy per run, since every copy gives up the GIL and has to wait for it afterwards. Slots that were taken
    together mostly follow one another; those of a chain that was freed or evicted do so from its end.
    """
    start = 0
    pairs = list(zip(first, second, strict=True))
    while start < len(pairs):
        stop, steps = start + 1, (1, 1)
        if stop < len(pairs):
            steps = (pairs[stop][0] - pairs[start][0], pairs[stop][1] - pairs[start][1])
            while stop < len(pairs) and _differ_by(pairs[stop - 1], pairs[stop], steps):
                stop += 1
            if stop == start + 1:
                steps = (1, 1)
        yield _span(pairs[start][0], steps[0], stop - start), _span(pairs[start][1], steps[1], stop - start)
        start = stop


def _differ_by(before: tuple[int, int], after: tuple[int, int], steps: tuple[int, int]) -> bool:
    return 0 not in steps and (after[0] - before[0], after[1] - before[1]) == steps


def _span(start: int, step: int, count: int) -> slice:
    """`count` slots from `start` on."""
    stop = start + step * count
    return slice(start, None if stop < 0 else stop, step)
