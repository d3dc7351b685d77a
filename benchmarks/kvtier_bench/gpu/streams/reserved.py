"""Memory of full size that takes none: reserved, and never touched, since nothing is copied."""

import mmap

import numpy as np
import torch
from torch import Tensor

from kvtier.memory.arena import Arena

_NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux; Python's module does not name it."""


def reserve(nbytes: int) -> mmap.mmap:
    """Memory that takes nothing until it is touched."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)


def reserved_pages(num_blocks: int, *, num_parts: int, part_bytes: int) -> list[Tensor]:
    """The KV of a device: its parts, of all blocks each, uint8 `[num_blocks, part_bytes]`."""
    memory = torch.frombuffer(reserve(num_blocks * num_parts * part_bytes), dtype=torch.uint8)
    return list(memory.view(num_parts, num_blocks, part_bytes).unbind())


class ReservedArena(Arena):
    """An arena whose memory is reserved only."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots, self.slot_bytes, self._descriptor = num_slots, slot_bytes, None
        self._rows = np.frombuffer(reserve(num_slots * slot_bytes), dtype=np.uint8).reshape(num_slots, slot_bytes)
