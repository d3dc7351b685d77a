"""The kernel that copies bytes between paged KV and staging, in one launch for all parts, with its launch.

Bytes are moved as integers, 16 of them a thread and access where addresses and lengths allow. Host memory that is
pinned is reached as device memory is: few programs with much in flight saturate the bus, and leave the others to
whoever computes.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.copies.copy_pieces import alignment, common_unit, cut, load_pairs
from kvtier_kernels.copies.copy_tiles import copy_tile
from kvtier_kernels.launching import check_launchable, on_device_of

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""The type as which a copy moves words, by their number of bytes."""


def check_can_copy(name: str, tensor: Tensor) -> None:
    """:raises ValueError: the kernel cannot run where `tensor` is."""
    check_launchable(name, tensor, _copy_kernel)


def copy_rows(
    paged: Tensor,
    part_offsets: Tensor | None,
    block_ids: Tensor,
    staging: Tensor,
    staging_rows: Tensor,
    *,
    parts_alignment: int,
    gather: bool,
    max_programs: int | None,
) -> None:
    """What `block_copy` and `part_copy` have in common, of tensors that have been checked there.

    :param paged: uint8 `[num_blocks, part_bytes]`, the first part; `part_offsets` int64 bytes from it to each part,
        None where there is only one.
    :param staging: uint8 `[num_parts, num_rows, part_bytes]`, rows contiguous, else any strides.
    :param parts_alignment: `copy_pieces.alignment` of all parts together.
    """
    num_parts, num_rows, part_bytes = staging.shape
    num_pairs = block_ids.size(0)
    if num_pairs == 0:
        return
    unit = common_unit(parts_alignment, part_bytes, alignment(staging))
    where = paged if paged.is_cuda else staging
    host = paged.device != staging.device
    tile = copy_tile(unit, part_bytes, host=host)
    chunks = triton.cdiv(part_bytes, tile.words * tile.word_bytes)
    per_part = triton.cdiv(num_pairs, tile.rows) * chunks
    pieces = cut(per_part, num_parts, part_bytes, where.device, host=host, max_programs=max_programs)
    word = _WORDS[tile.word_bytes]
    with on_device_of(where):
        _copy_kernel[(pieces.num_programs,)](
            paged.view(word), block_ids, staging.view(word), staging_rows, part_offsets,
            paged.stride(0) // unit, staging.stride(1) // unit, staging.stride(0) // unit, part_bytes // unit,
            paged.size(0), num_rows, num_pairs, chunks, pieces.per_part, pieces.num_pieces,
            UNIT_BYTES=unit, UNIT_WORDS=unit // tile.word_bytes, ROWS=tile.rows, WORDS=tile.words,
            GATHER=gather, num_warps=tile.num_warps,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "block_units", "row_units", "part_row_units", "part_units", "num_blocks", "num_rows", "num_pairs",
        "chunks", "pieces_per_part", "num_pieces",
    ],
    do_not_specialize_on_alignment=["block_ids", "staging_rows"],
)  # fmt: skip
def _copy_kernel(
    paged, block_ids, staging, staging_rows, part_offsets,
    block_units, row_units, part_row_units, part_units,
    num_blocks, num_rows, num_pairs, chunks, pieces_per_part, num_pieces,
    UNIT_BYTES: tl.constexpr, UNIT_WORDS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    GATHER: tl.constexpr,
):  # fmt: skip
    """Strides and lengths are in units of UNIT_WORDS words: by that the compiler knows that all of them are
    multiples of it, and makes 16 bytes one access.

    part_row_units: from a part to the next in staging; row_units: from a row to the next."""
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        part = piece // pieces_per_part
        in_part = piece % pieces_per_part
        pair = in_part // chunks * ROWS + tl.arange(0, ROWS)
        word = in_part % chunks * WORDS + tl.arange(0, WORDS)
        block, row, exists = load_pairs(pair, block_ids, staging_rows, num_pairs, num_blocks, num_rows)
        mask = exists[:, None] & (word < part_units * UNIT_WORDS)[None, :]
        block_unit = block * block_units
        if part_offsets is not None:
            block_unit += tl.load(part_offsets + part) // UNIT_BYTES
        row_unit = row * row_units + part.to(tl.int64) * part_row_units
        in_block = paged + (block_unit * UNIT_WORDS)[:, None] + word[None, :]
        in_row = staging + (row_unit * UNIT_WORDS)[:, None] + word[None, :]
        if GATHER:
            tl.store(in_row, tl.load(in_block, mask=mask), mask=mask)
        else:
            tl.store(in_block, tl.load(in_row, mask=mask), mask=mask)
