"""A product of tokens with a weight whose bits depend on the token alone, as a Triton kernel.

Libraries choose tiles, and into how many parts a sum is cut, by the number of tokens. Here a tile is always of the
same size, and each of its sums goes through the inputs in the same steps from first to last; a row of a product on
tensor cores depends on no other row. One token takes as long as a tile of them: mostly the time of reading the weight.
(He et al., "Defeating Nondeterminism in LLM Inference", 2025; vLLM's `matmul_persistent` likewise has one size of tile
by dtype.)
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.arguments import FLOAT_DTYPES
from kvtier_kernels.launching import FUSE, capability, check_launchable, on_device_of
from kvtier_kernels.tiles import Chips

_TILES_TOGETHER = 8
"""Tiles of rows that one tile of the weight meets one after the other, so that the chip's cache answers most reads."""


class ProductTile(NamedTuple):
    """What a program computes at a time. All powers of two."""

    rows: int
    columns: int
    """Outputs."""
    inputs: int
    """Inputs of one step of each sum."""
    num_warps: int
    num_stages: int


def product_tile(element_bytes: int, chip: tuple[int, int]) -> ProductTile:
    """The tile, by dtype and chip alone. In 16 bits it has 128 rows, so that a prefill reads a weight from the cache
    once for as many; one token's products still take no longer than its share of the memory's bandwidth.

    :param chip: its compute capability.
    """
    if element_bytes == 4:  # outside of the tensor cores, with operands in registers
        return ProductTile(32, 64, 16, num_warps=4, num_stages=1)
    if Chips.of(chip) in (Chips.HOPPER, Chips.BLACKWELL):
        return ProductTile(128, 128, 64, num_warps=8, num_stages=3)
    return ProductTile(128, 128, 32, num_warps=8, num_stages=4)


def invariant_linear(rows: Tensor, weight: Tensor) -> Tensor:
    """`rows` times the transposed `weight`: a fresh `[num_rows, num_outputs]`, contiguous, of their dtype.

    A row of it has the same bits whatever rows are beside it, and however many. Sums are in float32. Waits for nothing.

    :param rows: `[num_rows, num_inputs]`, contiguous, float32, bfloat16 or float16.
    :param weight: `[num_outputs, num_inputs]`, contiguous, of the same dtype and device.
    :raises ValueError: on a wrong shape, dtype, stride or device.
    """
    check_launchable("rows", rows, _linear_kernel)
    for name, tensor in (("rows", rows), ("weight", weight)):
        if tensor.dim() != 2 or tensor.size(1) != weight.size(-1) or not tensor.is_contiguous():
            raise ValueError(
                f"{name} of shape {list(tensor.shape)}, strides {list(tensor.stride())}: "
                f"needs contiguous [..., {weight.size(-1)}]"
            )
    if rows.dtype not in FLOAT_DTYPES or weight.dtype != rows.dtype or weight.device != rows.device:
        raise ValueError(
            f"rows are {rows.dtype} on {rows.device}, weight is {weight.dtype} on {weight.device}: "
            "needs one float dtype and device"
        )
    (num_rows, num_inputs), num_outputs = rows.shape, weight.size(0)
    out = rows.new_empty((num_rows, num_outputs))
    if out.numel() == 0:
        return out
    tile = product_tile(rows.element_size(), capability(rows.device))
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outputs, tile.columns)
    with on_device_of(rows):
        _linear_kernel[(num_tiles,)](
            rows, weight, out, num_rows, num_outputs,
            NUM_INPUTS=num_inputs, TILE_ROWS=tile.rows, TILE_COLUMNS=tile.columns, TILE_INPUTS=tile.inputs,
            TOGETHER=_TILES_TOGETHER, num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=FUSE,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    rows, weight, out, num_rows, num_outputs,
    NUM_INPUTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INPUTS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """One tile. Programs go through the columns with TOGETHER tiles of rows at a time."""
    program = tl.program_id(0)
    num_row_tiles = tl.cdiv(num_rows, TILE_ROWS)
    band = TOGETHER * tl.cdiv(num_outputs, TILE_COLUMNS)
    first_tile = program // band * TOGETHER
    height = tl.minimum(num_row_tiles - first_tile, TOGETHER)
    row = (first_tile + program % band % height) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = program % band // height * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    step = tl.arange(0, TILE_INPUTS)
    row_exists = (row < num_rows)[:, None]
    column_exists = (column < num_outputs)[:, None]
    some_rows = rows + row.to(tl.int64)[:, None] * NUM_INPUTS + step[None, :]
    some_columns = weight + column.to(tl.int64)[:, None] * NUM_INPUTS + step[None, :]
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], dtype=tl.float32)
    for first in range(0, NUM_INPUTS, TILE_INPUTS):
        if NUM_INPUTS % TILE_INPUTS == 0:
            left = tl.load(some_rows + first, mask=row_exists, other=0.0)
            right = tl.load(some_columns + first, mask=column_exists, other=0.0)
        else:
            there = (step < NUM_INPUTS - first)[None, :]
            left = tl.load(some_rows + first, mask=row_exists & there, other=0.0)
            right = tl.load(some_columns + first, mask=column_exists & there, other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    offsets = row.to(tl.int64)[:, None] * num_outputs + column[None, :]
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=row_exists & (column < num_outputs)[None, :])
