"""Moving blocks of KV in host memory to and from arena slots in the form of a lossy codec: half as many bytes."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvtier.device.kv import Blocks, Fence, HostKV, check_slots, writable_rows
from kvtier.errors import InvalidInputError
from kvtier.memory.arena import Arena
from kvtier.memory.slot_memory import SlotMemory
from kvtier_kernels.quantise_reference import from_records, to_records
from kvtier_kernels.records import RecordLayout

_BATCH_BLOCKS = 16
"""Quantised at a time: what that takes meanwhile is about four times their bytes."""


class QuantisedHostKV(HostKV):
    """`DeviceKV` for engines on CPU; what `CudaKV` does with `layout`, bit for bit. Copies release the GIL.

    `gather` and `scatter` may be called from several threads at a time.
    """

    def __init__(self, blocks: Tensor, layout: RecordLayout) -> None:
        """
        :param blocks: uint8 `[num_blocks, layout.page_bytes]` on CPU, rows contiguous, at even addresses: a view,
            nothing is copied.
        :raises InvalidInputError: anything else.
        """
        if (
            blocks.dim() != 2
            or blocks.dtype != torch.uint8
            or blocks.stride(1) != 1
            or blocks.size(1) != layout.page_bytes
        ):
            raise InvalidInputError(
                f"KV of shape {list(blocks.shape)}, {blocks.dtype}, strides {list(blocks.stride())}: "
                f"need a uint8 view of [num_blocks, {layout.page_bytes}] with contiguous rows"
            )
        self._blocks, self._layout = blocks, layout

    @property
    def num_blocks(self) -> int:
        return self._blocks.size(0)

    @property
    def block_bytes(self) -> int:
        """The size of a block in the arena."""
        return self._layout.record_bytes

    def gather(
        self, device_slots: Sequence[int], arena: Arena, arena_slots: Sequence[int], *, after: Fence | None
    ) -> None:
        blocks = Blocks(arena, arena_slots, device_slots)
        check_slots(self, blocks)
        records = self._records(arena)
        for devices, slots in _batches(blocks):
            records[slots] = to_records(self._blocks[devices], self._layout)

    def scatter_all(self, sources: Sequence[Blocks], *, after: Fence | None) -> float:
        for blocks in sources:
            check_slots(self, blocks)
        for blocks in sources:
            records = self._records(blocks.memory)
            for devices, slots in _batches(blocks):
                self._blocks[devices] = from_records(records[slots], self._layout)
        return 0.0

    def _records(self, memory: SlotMemory) -> Tensor:
        """`[num_slots, block_bytes]`, a view."""
        return torch.from_numpy(writable_rows(memory))[:, : self.block_bytes]


def _batches(blocks: Blocks) -> Iterator[tuple[Tensor, Tensor]]:
    """Places on both sides, so many at a time."""
    for start in range(0, len(blocks.slots), _BATCH_BLOCKS):
        batch = slice(start, start + _BATCH_BLOCKS)
        yield torch.tensor(blocks.device_slots[batch]), torch.tensor(blocks.slots[batch])
