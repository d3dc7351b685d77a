"""The RMS norm of each row, whose sum is always taken in the same order, as a Triton kernel.

Libraries share a row among more or fewer threads, by how many rows there are. Here a program has one row, and how it
sums follows from the row's width.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.arguments import FLOAT_DTYPES
from kvtier_kernels.launching import FUSE, check_launchable, on_device_of
from kvtier_kernels.tiles import next_power_of_two

MAX_WIDTH = 65_536
_COLUMNS_PER_WARP = 512
_MOST_WARPS = 16


def invariant_rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row divided by its root mean square, times the weight: fresh, contiguous, of `rows`' shape and dtype.

    A row has the same bits whatever is beside it. In float32; rounded before the product with a weight of 16 bits, as
    Hugging Face's models do, and after that with one of float32, as their Gemma does. Waits for nothing.

    :param rows: `[num_tokens, width]` or `[num_tokens, num_heads, width]`, float32, bfloat16 or float16. Only the
        stride between tokens is free.
    :param weight: `[width]`, or `[num_heads, width]`, contiguous, of the same dtype or float32.
    :raises ValueError: on a wrong shape, dtype, stride or device.
    """
    check_launchable("rows", rows, _norm_kernel)
    width, shape = rows.size(-1), f"shape {list(rows.shape)}, strides {list(rows.stride())}"
    inner = (width, 1)[-(rows.dim() - 1) :]
    if rows.dim() not in (2, 3) or not 1 <= width <= MAX_WIDTH or rows.stride()[1:] != inner:
        raise ValueError(f"rows of {shape}: needs [tokens, width] or [tokens, heads, width] of at most {MAX_WIDTH:,}")
    if weight.shape not in (rows.shape[-1:], rows.shape[1:]) or not weight.is_contiguous():
        raise ValueError(f"weight of shape {list(weight.shape)}: needs contiguous {list(rows.shape[-1:])}")
    if rows.dtype not in FLOAT_DTYPES or weight.dtype not in (rows.dtype, torch.float32):
        raise ValueError(f"rows are {rows.dtype}, weight is {weight.dtype}: needs one float dtype, or float32 weights")
    if weight.device != rows.device:
        raise ValueError(f"rows are on {rows.device}, weight on {weight.device}")
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    if out.numel() == 0:
        return out
    num_heads, columns = out[0].numel() // width, next_power_of_two(width)
    with on_device_of(rows):
        _norm_kernel[(len(rows) * num_heads,)](
            rows, weight, out, rows.stride(0), eps,
            NUM_HEADS=num_heads, WIDTH=width, COLUMNS=columns, WEIGHT_PER_HEAD=weight.dim() == 2,
            num_warps=max(1, min(_MOST_WARPS, columns // _COLUMNS_PER_WARP)), enable_fp_fusion=FUSE,
        )  # fmt: skip
    return out


@triton.jit
def _norm_kernel(
    rows, weight, out, token_stride, eps,
    NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WEIGHT_PER_HEAD: tl.constexpr,
):  # fmt: skip
    """One head of one token; `[tokens, width]` has one head."""
    row = tl.program_id(0).to(tl.int64)
    head = row % NUM_HEADS
    column = tl.arange(0, COLUMNS)
    there = column < WIDTH
    wide = tl.load(rows + row // NUM_HEADS * token_stride + head * WIDTH + column, mask=there, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    if WEIGHT_PER_HEAD:
        weight += head * WIDTH
    factor = tl.load(weight + column, mask=there, other=0.0)
    if factor.dtype != tl.float32:
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + column, (normed * factor.to(tl.float32)).to(out.dtype.element_ty), mask=there)
