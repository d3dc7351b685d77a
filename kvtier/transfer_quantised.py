"""Moving blocks of KV in host memory to and from arena slots in the form of a lossy codec: half as many bytes."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvtier.errors import InvalidInputError
from kvtier.transfer import Arena, check_slots
from kvtier_kernels.quantise_reference import from_records, to_records
from kvtier_kernels.records import RecordLayout

_BATCH_BLOCKS = 16
"""Quantised at a time: what that takes meanwhile is about four times their bytes."""


class QuantisedHostKV:
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
        """Of a block in the arena."""
        return self._layout.record_bytes

    def gather(self, device_slots: Sequence[int], arena: Arena, arena_slots: Sequence[int]) -> None:
        check_slots(self, device_slots, arena, arena_slots)
        records = self._records(arena)
        for devices, slots in _batches(device_slots, arena_slots):
            records[slots] = to_records(self._blocks[devices], self._layout)

    def scatter(self, arena: Arena, arena_slots: Sequence[int], device_slots: Sequence[int]) -> None:
        check_slots(self, device_slots, arena, arena_slots)
        records = self._records(arena)
        for devices, slots in _batches(device_slots, arena_slots):
            self._blocks[devices] = from_records(records[slots], self._layout)

    def _records(self, arena: Arena) -> Tensor:
        """`[num_slots, block_bytes]`, a view."""
        return torch.from_numpy(arena.rows)[:, : self.block_bytes]


def _batches(device_slots: Sequence[int], arena_slots: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Places on both sides, so many at a time."""
    for start in range(0, len(arena_slots), _BATCH_BLOCKS):
        batch = slice(start, start + _BATCH_BLOCKS)
        yield torch.tensor(device_slots[batch]), torch.tensor(arena_slots[batch])
