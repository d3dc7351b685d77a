"""Which blocks a copy moves: slots in host memory and on the device, sorted for few large transfers."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.device.kv import Blocks
from kvtier.errors import InvalidInputError

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SlotBatch:
    """Blocks of a copy, by slot in host memory. All arrays are int64 `[num_blocks]`."""

    slots: Slots
    """The slots in host memory, ascending."""
    groups: Slots
    """The KV group of each block on the device."""
    blocks: Slots
    """The number of each block in its KV group."""

    @classmethod
    def of(cls, blocks: Blocks, *, num_groups: int, blocks_per_group: int) -> "SlotBatch":
        """Raises `InvalidInputError` for slots that do not exist, or that are more on one side than on the other."""
        slots, device_slots = (np.asarray(of_side, dtype=np.int64) for of_side in (blocks.slots, blocks.device_slots))
        if len(slots) != len(device_slots):
            raise InvalidInputError(f"{len(device_slots)} device slots and {len(slots)} arena slots")
        for name, of_side, number in (
            ("device", device_slots, num_groups * blocks_per_group),
            ("arena", slots, blocks.memory.num_slots),
        ):
            wrong = of_side[(of_side < 0) | (of_side >= number)]
            if len(wrong):
                raise InvalidInputError(f"{name} slot {wrong[0]}: there are {number}")
        order = np.argsort(slots, kind="stable")
        return cls(slots[order], *np.divmod(device_slots[order], blocks_per_group))

    def __len__(self) -> int:
        return len(self.slots)

    def pieces(self, most: int) -> Iterator["SlotBatch"]:
        """The batch in pieces of at most so many blocks."""
        for start in range(0, len(self), most):
            piece = slice(start, start + most)
            yield SlotBatch(self.slots[piece], self.groups[piece], self.blocks[piece])

    def runs(self, chunk_slots: int, *, adjacent: bool) -> tuple[Slots, Slots]:
        """First index and length of each run of slots that one transfer can move.

        :param chunk_slots: no run crosses a multiple of it in host memory.
        :param adjacent: the end of a slot is the start of the next; otherwise each slot is a run.
        """
        if len(self) == 0 or not adjacent:
            return np.arange(len(self)), np.ones(len(self), dtype=np.int64)
        breaks = (np.diff(self.slots) != 1) | (self.slots[1:] % chunk_slots == 0)
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        return starts, np.diff(starts, append=len(self))
