"""KV of 16 bits an element to its high bytes and its low bytes apart, and back, in one launch for all parts.

No bit changes. Sign, exponent and the first bits of the fraction of one value are much like those of the next; the low
bytes are noise. A compressor does well on the first alone. Our engine leaves it to the host: decision 16 in `docs/adr`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.copies.copy_pieces import alignment, common_unit, cut, load_pairs
from kvtier_kernels.copies.copy_tiles import copy_tile
from kvtier_kernels.copies.part_copy import Parts
from kvtier_kernels.launching import check_launchable, on_device_of


def plane_copy(
    parts: Parts,
    block_ids: Tensor,
    staging: Tensor,
    staging_rows: Tensor,
    *,
    gather: bool,
    max_programs: int | None = None,
) -> None:
    """Splits block `block_ids[i]` to staging row `staging_rows[i]` (gather), or joins it again, for all i.

    All else is as in `part_copy.part_copy`.

    :param parts: of elements of 2 bytes, little-endian, at even addresses.
    :param staging: uint8 `[num_rows, parts.block_bytes]`, rows contiguous: the high bytes of a block, all parts in
        order, then its low bytes. Or `[num_parts, num_rows, part_bytes]`, each part likewise: the high bytes of a part,
        then its low bytes.
    :raises ValueError: on a wrong shape, dtype, stride, alignment or device.
    """
    first, num_parts = parts.tensors[0], len(parts.tensors)
    check_launchable("part", first, _plane_kernel)
    part_bytes = first.size(1)
    parts.check_copy(block_ids, staging, staging_rows, part_bytes=part_bytes)
    page_unit = common_unit(parts.alignment, part_bytes) // 2
    if page_unit == 0:
        raise ValueError(f"parts of {part_bytes} bytes: need elements of 2 bytes, at even addresses")
    num_pairs, num_elements = block_ids.size(0), part_bytes // 2
    if num_pairs == 0:
        return
    if staging.dim() == 2:
        planes = staging.view(staging.size(0), 2, num_parts, num_elements).permute(2, 0, 1, 3)
    else:
        planes = staging.view(num_parts, staging.size(1), 2, num_elements)
    plane_unit = common_unit(num_elements, alignment(planes))
    host = planes.device != first.device
    tile = copy_tile(2, part_bytes, host=host)
    chunks = triton.cdiv(num_elements, tile.words)
    per_part = triton.cdiv(num_pairs, tile.rows) * chunks
    pieces = cut(per_part, num_parts, part_bytes, first.device, host=host, max_programs=max_programs)
    part_row_units, row_units, plane_units, _ = (stride // plane_unit for stride in planes.stride())
    with on_device_of(first):
        _plane_kernel[(pieces.num_programs,)](
            first.view(torch.int16), block_ids, planes.view(torch.int8), staging_rows, parts.offsets,
            first.stride(0) // (2 * page_unit), row_units, part_row_units, plane_units, num_elements // plane_unit,
            first.size(0), planes.size(1), num_pairs, chunks, pieces.per_part, pieces.num_pieces,
            PAGE_UNIT=page_unit, PLANE_UNIT=plane_unit, ROWS=tile.rows, ELEMENTS=tile.words, GATHER=gather,
            num_warps=tile.num_warps,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "block_units", "row_units", "part_row_units", "plane_units", "element_units", "num_blocks", "num_rows",
        "num_pairs", "chunks", "pieces_per_part", "num_pieces",
    ],
    do_not_specialize_on_alignment=["block_ids", "staging_rows"],
)  # fmt: skip
def _plane_kernel(
    paged, block_ids, planes, staging_rows, part_offsets,
    block_units, row_units, part_row_units, plane_units, element_units,
    num_blocks, num_rows, num_pairs, chunks, pieces_per_part, num_pieces,
    PAGE_UNIT: tl.constexpr, PLANE_UNIT: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr,
    GATHER: tl.constexpr,
):  # fmt: skip
    """paged: int16, planes: int8. Strides are in units of PAGE_UNIT and PLANE_UNIT elements, as in `row_copy`."""
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        part = piece // pieces_per_part
        in_part = piece % pieces_per_part
        pair = in_part // chunks * ROWS + tl.arange(0, ROWS)
        element = in_part % chunks * ELEMENTS + tl.arange(0, ELEMENTS)
        block, row, exists = load_pairs(pair, block_ids, staging_rows, num_pairs, num_blocks, num_rows)
        mask = exists[:, None] & (element < element_units * PLANE_UNIT)[None, :]
        block_unit = block * block_units + tl.load(part_offsets + part) // (2 * PAGE_UNIT)
        row_unit = row * row_units + part.to(tl.int64) * part_row_units
        in_page = paged + (block_unit * PAGE_UNIT)[:, None] + element[None, :]
        in_high = planes + (row_unit * PLANE_UNIT)[:, None] + element[None, :]
        in_low = in_high + plane_units.to(tl.int64) * PLANE_UNIT
        if GATHER:
            both = tl.load(in_page, mask=mask)
            tl.store(in_high, (both >> 8).to(tl.int8), mask=mask)
            tl.store(in_low, both.to(tl.int8), mask=mask)
        else:
            high = tl.load(in_high, mask=mask).to(tl.int16)
            low = tl.load(in_low, mask=mask).to(tl.int16)
            tl.store(in_page, (high << 8) | (low & 0xFF), mask=mask)
