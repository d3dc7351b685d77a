"""Pages of KV to records of a lossy codec and back, quantised on the way, in one launch for all parts."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.copies.copy_pieces import alignment, common_unit, cut, load_pairs
from kvtier_kernels.copies.copy_tiles import quantise_tile
from kvtier_kernels.copies.part_copy import Parts
from kvtier_kernels.launching import check_launchable, on_device_of
from kvtier_kernels.quantise_reference import LARGEST
from kvtier_kernels.quantising import dequantise, quantise, vector_scales
from kvtier_kernels.records import LossyCodec, RecordLayout

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def quantised_copy(
    parts: Parts,
    block_ids: Tensor,
    staging: Tensor,
    staging_rows: Tensor,
    *,
    layout: RecordLayout,
    gather: bool,
    max_programs: int | None = None,
) -> None:
    """Quantises block `block_ids[i]` to staging row `staging_rows[i]` (gather), or restores it from there, for all i.

    All else is as in `part_copy.part_copy`.

    :param parts: pages of `layout.page_bytes`, at even addresses.
    :param staging: uint8 `[num_rows, num_parts * layout.record_bytes]`, rows contiguous, or
        `[num_parts, num_rows, layout.record_bytes]`, each part likewise. Records begin at multiples of 16 bytes.
    :raises ValueError: on a wrong shape, dtype, stride, alignment or device.
    """
    first = parts.tensors[0]
    check_launchable("part", first, _record_kernel)
    if first.size(1) != layout.page_bytes:
        raise ValueError(f"parts of {first.size(1)} bytes: {layout} needs {layout.page_bytes}")
    records = parts.check_copy(block_ids, staging, staging_rows, part_bytes=layout.record_bytes)
    unit = common_unit(parts.alignment, layout.page_bytes)
    if unit < 2 or common_unit(alignment(records)) < 16:
        raise ValueError("parts must begin at even addresses, records at multiples of 16 bytes")
    num_vectors = block_ids.size(0) * layout.num_vectors
    if num_vectors == 0:
        return
    host = records.device != first.device
    tile = quantise_tile(layout.head_dim, host=host)
    if num_vectors > 2**30:
        raise ValueError(f"{num_vectors} vectors: too much for a launch; copy in batches")
    per_part, num_parts = triton.cdiv(num_vectors, tile.vectors), len(parts.tensors)
    pieces = cut(per_part, num_parts, layout.page_bytes, first.device, host=host, max_programs=max_programs)
    with on_device_of(first):
        _record_kernel[(pieces.num_programs,)](
            first.view(torch.int16), block_ids, records.view(torch.int8), records.view(torch.float32), staging_rows,
            parts.offsets, first.stride(0) // unit, records.stride(1) // 16, records.stride(0) // 16,
            first.size(0), records.size(1), block_ids.size(0), pieces.per_part, pieces.num_pieces,
            NUM_VECTORS=layout.num_vectors, HEAD_DIM=layout.head_dim, RECORD_BYTES=layout.record_bytes,
            SCALES_START=layout.scales_start, FP8=layout.codec is LossyCodec.FP8, DTYPE=_DTYPES[layout.dtype],
            LARGEST=LARGEST[layout.codec.stored_dtype], UNIT=unit // 2, VECTORS=tile.vectors, COLUMNS=tile.columns,
            GATHER=gather, num_warps=tile.num_warps,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "block_units", "row_units", "part_row_units", "num_blocks", "num_rows", "num_pairs", "pieces_per_part",
        "num_pieces",
    ],
    do_not_specialize_on_alignment=["block_ids", "staging_rows"],
)  # fmt: skip
def _record_kernel(
    paged, block_ids, values, scales, staging_rows, part_offsets,
    block_units, row_units, part_row_units, num_blocks, num_rows, num_pairs, pieces_per_part, num_pieces,
    NUM_VECTORS: tl.constexpr, HEAD_DIM: tl.constexpr, RECORD_BYTES: tl.constexpr, SCALES_START: tl.constexpr,
    FP8: tl.constexpr, LARGEST: tl.constexpr, DTYPE: tl.constexpr, UNIT: tl.constexpr,
    VECTORS: tl.constexpr, COLUMNS: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """A piece is so many vectors, of whichever pairs. paged: int16; values, int8, and scales, float32, are the same
    memory. Strides of paged are in units of UNIT elements, those of records in units of 16 bytes."""
    column = tl.arange(0, COLUMNS)
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        part = piece // pieces_per_part
        flat = piece % pieces_per_part * VECTORS + tl.arange(0, VECTORS)
        vector = flat % NUM_VECTORS
        block, row, exists = load_pairs(flat // NUM_VECTORS, block_ids, staging_rows, num_pairs, num_blocks, num_rows)
        mask = exists[:, None] & (column < HEAD_DIM)[None, :]
        block_unit = block * block_units + tl.load(part_offsets + part) // (2 * UNIT)
        in_page = paged + (block_unit * UNIT + vector * HEAD_DIM)[:, None] + column[None, :]
        record = (row * row_units + part.to(tl.int64) * part_row_units) * 16
        in_values = values + (record + vector * HEAD_DIM)[:, None] + column[None, :]
        in_scales = scales + (record + SCALES_START) // 4 + vector
        if GATHER:
            wide = tl.load(in_page, mask=mask, other=0).to(DTYPE, bitcast=True).to(tl.float32)
            scale = vector_scales(wide, LARGEST)
            tl.store(in_values, quantise(wide, scale, FP8), mask=mask)
            tl.store(in_scales, scale, mask=exists)
            last = exists & (vector == NUM_VECTORS - 1)
            _store_zeros(values + record, NUM_VECTORS * HEAD_DIM, SCALES_START, last)
            _store_zeros(values + record, SCALES_START + 4 * NUM_VECTORS, RECORD_BYTES, last)
        else:
            stored = tl.load(in_values, mask=mask, other=0)
            scale = tl.load(in_scales, mask=exists, other=0.0)
            tl.store(in_page, dequantise(stored, scale, FP8, DTYPE), mask=mask)


@triton.jit
def _store_zeros(records, START: tl.constexpr, STOP: tl.constexpr, mask):
    """Bytes START to STOP, fewer than 16, of each of these records."""
    if START < STOP:
        byte = tl.arange(0, 16)
        here = mask[:, None] & (START + byte < STOP)[None, :]
        tl.store(records[:, None] + START + byte[None, :], tl.zeros([mask.shape[0], 16], tl.int8), mask=here)
