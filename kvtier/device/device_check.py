"""Whether blocks have arrived on the device as they lie in host memory: checksums of some of them, on both sides.

A tier's checksum says that the bytes in host memory are right. What happens to them after that, on the bus and in the
kernels that put them into their places, nothing else looks at.
"""

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import InvalidInputError
from kvtier.memory.buffers import Bytes2D
from kvtier_kernels.checksums import host_checksum
from kvtier_kernels.copies.block_checksum import block_checksum
from kvtier_kernels.copies.part_copy import Parts

DEFAULT_EVERY = 64
"""The number of blocks of which one is checked. Host memory is read at 3.6 GB/s for that, by the thread that loads: a
load of 64 blocks of 2 MiB takes 2.4 ms over a bus of 55 GB/s, and its one checksum takes 0.6 ms."""


Slots = Sequence[int] | npt.NDArray[np.int64]


class DeviceCheck:
    """Compares a sample of the blocks that a copy has brought to the device. Any thread, several at a time."""

    def __init__(self, parts: Sequence[Parts], *, every: int = DEFAULT_EVERY) -> None:
        """Compiles the kernel on the stream that is current: about a second, the first time. Reads no block.

        :param parts: of all blocks on the device, as `block_checksum` takes them. In host memory a block is the same
            bytes, part after part; not the records of a lossy codec.
        :param every: one block in so many is looked at, and at least one of each load. 1 looks at all of them, which
            costs more than the load; with many, damage of few blocks is found late.
        """
        if every < 1:
            raise InvalidInputError(f"one block in {every} to be checked: needs at least 1")
        self._parts, self._every = tuple(parts), every
        self._part_sizes = [part.size(1) for group in parts for part in group.tensors]
        self._block_bytes = sum(self._part_sizes)
        self._device = parts[0].tensors[0].device
        self._lock = threading.Lock()
        self._num_loaded = 0  # guarded by _lock: blocks of all loads so far
        block_checksum(self._parts, torch.full((1,), -1, dtype=torch.int64, device=self._device))

    def wrong(self, rows: Bytes2D, slots: Slots, device_slots: Slots) -> list[int]:
        """Which of the blocks looked at differ: places in `slots`, in order. Empty when all are alike.

        Call it with the stream current that the copy was launched on. Waits until that stream is done, without the GIL,
        and computes the host's checksums meanwhile. Nobody may write to these slots before it returns.

        :param rows: uint8 `[num_slots, at least a block's bytes]` in host memory: where the blocks came from.
        :param slots: rows there. `device_slots`: the blocks on the device that they were copied to, as many.
        """
        sample = self._sample(len(slots))
        if not sample:
            return []
        ids = torch.tensor([device_slots[place] for place in sample], dtype=torch.int64)
        sums = block_checksum(self._parts, ids.to(self._device, non_blocking=True))
        expected = [host_checksum(rows[slots[place]][: self._block_bytes], self._part_sizes) for place in sample]
        found = sums.cpu().tolist()
        return [place for place, here, there in zip(sample, expected, found, strict=True) if here != there]

    def _sample(self, num_blocks: int) -> list[int]:
        """Blocks are chosen by count, not by key: the same block of a prompt is not looked at each time, nor never."""
        if num_blocks == 0:
            return []
        with self._lock:
            before, self._num_loaded = self._num_loaded, self._num_loaded + num_blocks
        return list(range(-before % self._every, num_blocks, self._every)) or [before % num_blocks]
