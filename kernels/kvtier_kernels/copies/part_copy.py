"""Blocks in several parts, e.g. a page per layer, to and from staging in one launch.

A staging buffer holds blocks one after the other, each with its parts in order, or parts one after the other, each
with its blocks: layers that an engine gets one by one. All parts are reached from the first one by an offset, whichever
allocation they are in: a device has one address space.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier_kernels.arguments import check_byte_rows, check_index, check_staging
from kvtier_kernels.copies.copy_pieces import alignment
from kvtier_kernels.copies.row_copy import check_can_copy, copy_rows


@dataclass(frozen=True, slots=True)
class Parts:
    """Blocks in parts of equal size and stride. Make it once: it puts a table on the device."""

    tensors: tuple[Tensor, ...]
    """uint8 `[num_blocks, part_bytes]` each, rows contiguous."""
    offsets: Tensor
    """int64 `[num_parts]`: bytes from the first part to each."""
    alignment: int
    """What `copy_pieces.alignment` says of all parts together."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Parts":
        """Views are kept, nothing is copied. Raises `ValueError` for none, or those that differ not only in address."""
        if not tensors:
            raise ValueError("there are no parts: needs at least one")
        first = tensors[0]
        for tensor in tensors:
            check_byte_rows("part", tensor)
            if (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) != (
                first.shape, first.stride(), torch.uint8, first.device,
            ):  # fmt: skip
                raise ValueError(
                    f"part of {list(tensor.shape)} {tensor.dtype} on {tensor.device}, stride {tensor.stride(0)}, "
                    f"beside {list(first.shape)} on {first.device}, stride {first.stride(0)}: must be equal, and uint8"
                )
        offsets = [tensor.data_ptr() - first.data_ptr() for tensor in tensors]
        return cls(
            tuple(tensors),
            torch.tensor(offsets, dtype=torch.int64).to(first.device),
            functools.reduce(operator.or_, map(alignment, tensors)),
        )

    @property
    def block_bytes(self) -> int:
        return self.tensors[0].size(1) * len(self.tensors)

    def check_copy(self, block_ids: Tensor, staging: Tensor, staging_rows: Tensor, *, part_bytes: int) -> Tensor:
        """What all copies of parts take fits together.

        :param part_bytes: of a part in `staging`.
        :returns: a view of `staging`, `[num_parts, num_rows, part_bytes]`.
        :raises ValueError: on a wrong shape, dtype, stride or device.
        """
        num_parts, device = len(self.tensors), self.tensors[0].device
        by_part = check_staging(staging, num_parts, part_bytes, device)
        check_index("block_ids", block_ids, (-1,), device)
        check_index("staging_rows", staging_rows, (block_ids.size(0),), device)
        return by_part


def part_copy(
    parts: Parts,
    block_ids: Tensor,
    staging: Tensor,
    staging_rows: Tensor,
    *,
    gather: bool,
    max_programs: int | None = None,
) -> None:
    """Copies block `block_ids[i]` to staging row `staging_rows[i]` (gather) or the other way round, for all i.

    Waits for nothing: a pair with an id or row that does not exist is not copied. Parts are copied in order.

    :param block_ids: int32 or int64 `[n]`, on the device. `staging_rows` likewise. What is written to must be distinct.
    :param staging: uint8 `[num_rows, parts.block_bytes]`, rows contiguous, or `[num_parts, num_rows, part_bytes]`,
        each part likewise. On the same device, or pinned host memory: the kernel reaches it over the bus.
    :param max_programs: how many Triton programs may run at a time; None is what `copy_tiles` says: few
        beside host memory, else as many as there is work for.
    :raises ValueError: on a wrong shape, dtype, stride or device.
    """
    first = parts.tensors[0]
    check_can_copy("part", first)
    by_part = parts.check_copy(block_ids, staging, staging_rows, part_bytes=first.size(1))
    copy_rows(
        first, parts.offsets, block_ids, by_part, staging_rows,
        parts_alignment=parts.alignment, gather=gather, max_programs=max_programs,
    )  # fmt: skip
