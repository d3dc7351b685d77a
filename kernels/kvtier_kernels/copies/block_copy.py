"""Many blocks, of all layers, between paged KV and a staging buffer in one launch.

A block of the paged KV is one contiguous row of bytes, and so is its place in a staging buffer: gather and scatter
are the same copy of rows to rows.
"""

import torch
from torch import Tensor

from kvtier_kernels.arguments import check_byte_rows, check_index, check_reachable
from kvtier_kernels.copies.copy_pieces import alignment
from kvtier_kernels.copies.row_copy import check_can_copy, copy_rows


def block_copy(
    source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor, *, max_programs: int | None = None
) -> None:
    """`target[target_rows[i]] = source[source_rows[i]]` for all i, byte for byte; other rows stay as they are.

    One of the two may be pinned host memory where the other is on CUDA: the kernel reaches it over the bus.
    Waits for nothing: a pair with a row id that does not exist is not copied.

    :param source: `[num_rows, row_elements]` of any dtype, rows contiguous; e.g. `kv.view(num_blocks, -1)`.
    :param target: the same dtype and row_elements; does not overlap with `source`.
    :param source_rows: int32 or int64 `[n]`, on the device that copies. `target_rows` likewise, distinct.
    :param max_programs: how many Triton programs may run at a time; None is what `copy_tiles` says: few
        beside host memory, else as many as there is work for.
    :raises ValueError: on a wrong shape, dtype, stride or device.
    """
    check_byte_rows("source", source)
    check_byte_rows("target", target)
    if (source.size(1), source.dtype) != (target.size(1), target.dtype):
        raise ValueError(
            f"source has rows of {source.size(1)} {source.dtype}, target of {target.size(1)} {target.dtype}: "
            "must be equal"
        )
    where = target if target.is_cuda else source
    check_can_copy("target" if where is target else "source", where)
    check_reachable("source", source, where.device)
    check_reachable("target", target, where.device)
    check_index("source_rows", source_rows, (-1,), where.device)
    check_index("target_rows", target_rows, (source_rows.size(0),), where.device)
    source, target = source.view(torch.uint8), target.view(torch.uint8)
    copy_rows(
        source, None, source_rows, target[None], target_rows,
        parts_alignment=alignment(source), gather=True, max_programs=max_programs,
    )  # fmt: skip
