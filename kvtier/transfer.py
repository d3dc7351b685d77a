"""Moving blocks between device slots and arena slots, many blocks a call.

The arena is the host tier's memory and, when there is no host tier, the staging area: one row per
slot, preallocated and pre-faulted, because a copy into fresh pages runs at a tenth of the speed.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.errors import ClosedError, ConfigError, InvalidInputError
from kvtier.tiers.memory import map_memory

Bytes2D = npt.NDArray[np.uint8]
"""`[rows, bytes]`, uint8; each row is contiguous."""


class Arena:
    """`num_slots` slots of `slot_bytes` host memory. The owner of the slots decides who may touch which.

    Holds no bookkeeping and no lock: whoever hands out slot ids keeps writers apart.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        """Allocates and touches all memory: about 0.6 s per GiB on fresh pages.

        Raises `ConfigError` when the system does not have that much.
        """
        if num_slots < 1 or slot_bytes < 1:
            raise InvalidInputError(f"arena of {num_slots} slots x {slot_bytes} bytes: both must be at least 1")
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        try:
            memory = map_memory(num_slots * slot_bytes, prefault=True)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"host memory for {num_slots:,} slots of {slot_bytes:,} bytes cannot be had: {error}; "
                "lower host.capacity_bytes"
            ) from error
        self._rows: Bytes2D | None = np.frombuffer(memory, dtype=np.uint8).reshape(num_slots, slot_bytes)

    @property
    def rows(self) -> Bytes2D:
        """`[num_slots, slot_bytes]` view of all memory."""
        if self._rows is None:
            raise ClosedError("the arena is closed")
        return self._rows

    def view(self, slot: int) -> memoryview:
        """Writable view of one slot."""
        return memoryview(self.rows[slot])

    def close(self) -> None:
        """Drops the memory as soon as the last view of it is gone. Idempotent."""
        self._rows = None


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

    def __init__(self, blocks: npt.NDArray[Any]) -> None:
        """:param blocks: `[num_blocks, block_bytes]` uint8, writable, rows contiguous: a view, nothing is copied."""
        if blocks.ndim != 2 or blocks.dtype != np.uint8 or blocks.strides[1] != 1 or not blocks.flags.writeable:
            raise InvalidInputError(
                f"KV of shape {blocks.shape}, dtype {blocks.dtype}, strides {blocks.strides}: "
                "need a writable uint8 view of [num_blocks, block_bytes] with contiguous rows"
            )
        self._blocks: Bytes2D = blocks

    @property
    def num_blocks(self) -> int:
        return int(self._blocks.shape[0])

    @property
    def block_bytes(self) -> int:
        return int(self._blocks.shape[1])

    def gather(self, device_slots: Sequence[int], arena: Arena, arena_slots: Sequence[int]) -> None:
        rows, blocks = arena.rows, self._blocks
        for device_slot, arena_slot in zip(device_slots, arena_slots, strict=True):
            np.copyto(rows[arena_slot], blocks[device_slot])

    def scatter(self, arena: Arena, arena_slots: Sequence[int], device_slots: Sequence[int]) -> None:
        rows, blocks = arena.rows, self._blocks
        for arena_slot, device_slot in zip(arena_slots, device_slots, strict=True):
            np.copyto(blocks[device_slot], rows[arena_slot])
