"""Host memory in equal slots, as copies to and from a device take it."""

from typing import Protocol

import numpy as np
import numpy.typing as npt


class SlotMemory(Protocol):
    """Host memory in equal slots, to copy blocks from: an arena, or memory of a tier that lends."""

    @property
    def num_slots(self) -> int: ...

    @property
    def slot_bytes(self) -> int: ...

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """`[num_slots, slot_bytes]`, uint8, a view of all memory, rows contiguous. Maybe read-only."""
