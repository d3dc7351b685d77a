"""Memory of full size that takes none: reserved, and never touched, since nothing is copied."""

import mmap

import numpy as np
import torch
from torch import Tensor

from kvtier.transfer import Arena

_NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python's module does not have."""


def reserve(nbytes: int) -> mmap.mmap:
    """Whoever touches it, takes it."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)


def reserved_pages(num_blocks: int, *, num_parts: int, part_bytes: int) -> list[Tensor]:
    """KV on the device: parts of all blocks, uint8 `[num_blocks, part_bytes]`."""
    memory = torch.frombuffer(reserve(num_blocks * num_parts * part_bytes), dtype=torch.uint8)
    return list(memory.view(num_parts, num_blocks, part_bytes).unbind())


class ReservedArena(Arena):
    """An arena, but for its memory."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots, self.slot_bytes, self._descriptor = num_slots, slot_bytes, None
        self._rows = np.frombuffer(reserve(num_slots * slot_bytes), dtype=np.uint8).reshape(num_slots, slot_bytes)
