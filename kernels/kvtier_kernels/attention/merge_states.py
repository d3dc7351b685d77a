"""Attention over several runs of keys made one, as a Triton kernel.

A state is what attention over one run of keys gives: its result, and the log-sum-exp of its scores. States of runs
that have no key in common are merged by weighting each with its share of all weights (flash decoding, Dao et al.,
2023; the operation is the one that cascade attention in FlashInfer calls merge_state).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.launching import FUSE, check_launchable, on_device_of
from kvtier_kernels.tiles import merge_rows, next_power_of_two

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def empty_states(query: Tensor, num_states: int) -> tuple[Tensor, Tensor]:
    """What `merge_states` takes as `parts` and `part_lse`, for each row of `query`, not written yet."""
    num_rows, num_heads, head_dim = query.shape
    parts = query.new_empty((num_rows, num_heads, num_states, head_dim), dtype=torch.float32)
    return parts, query.new_empty((num_rows, num_heads, num_states), dtype=torch.float32)


def merge_states(
    parts: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor | None = None, *, sinks: Tensor | None = None
) -> None:
    """Merges the states of each row and head into `out`, and their log-sum-exps into `lse`; waits for nothing.

    A state whose log-sum-exp is -inf saw no key: it counts nothing, whatever is in its part. Where no state counts,
    `out` gets zeros and `lse` -inf. Sums are in float32 and in the order of the states.

    :param parts: float32, bfloat16 or float16 `[num_rows, num_heads, num_states, head_dim]`, contiguous.
    :param part_lse: float32 `[num_rows, num_heads, num_states]`, contiguous: natural logarithms.
    :param out: `[num_rows, num_heads, head_dim]` of any of these dtypes, contiguous; may be the memory of `parts` where
        there is one state.
    :param lse: float32 `[num_rows, num_heads]`, contiguous.
    :param sinks: float32 `[num_heads]`, contiguous: the log-sum-exp of one more state of each head, whose part is 0.
    :raises ValueError: on a wrong shape, dtype, stride or device.
    """
    check_launchable("parts", parts, _merge_kernel)
    if parts.dim() != 4 or parts.size(2) == 0 or parts.size(3) == 0:
        raise ValueError(f"parts has shape {list(parts.shape)}: needs [rows, heads, states, D]")
    num_rows, num_heads, _, head_dim = parts.shape
    _check("parts", parts, parts.shape, parts.device, _DTYPES)
    _check("part_lse", part_lse, parts.shape[:3], parts.device)
    _check("out", out, (num_rows, num_heads, head_dim), parts.device, _DTYPES)
    if lse is not None:
        _check("lse", lse, parts.shape[:2], parts.device)
    if sinks is not None:
        _check("sinks", sinks, parts.shape[1:2], parts.device)
    launch_merge(parts, part_lse, out, lse, sinks)


def launch_merge(parts: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor | None, sinks: Tensor | None) -> None:
    """`merge_states` of arguments that have been checked, or that a launcher made itself."""
    num_rows, num_heads, num_states, head_dim = parts.shape
    if num_rows * num_heads == 0:
        return
    columns = next_power_of_two(head_dim)
    with on_device_of(parts):
        _merge_kernel[(num_rows * num_heads,)](
            parts, part_lse, sinks, out, lse, num_heads, num_states,
            HEAD_DIM=head_dim, STATES=merge_rows(columns), COLUMNS=columns,
            num_warps=4, enable_fp_fusion=FUSE,
        )  # fmt: skip


def _check(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    device: torch.device,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
) -> None:
    if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} of shape {list(tensor.shape)}, strides {list(tensor.stride())}, {tensor.dtype}: "
            f"needs contiguous {wanted} {list(shape)}"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, what it belongs to on {device}")


@triton.jit(do_not_specialize=["num_heads", "num_states"])
def _merge_kernel(
    parts, part_lse, sinks, out, lse, num_heads, num_states,
    HEAD_DIM: tl.constexpr, STATES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One head of one row."""
    out_row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    in_head = column < HEAD_DIM
    merged = tl.zeros([COLUMNS], dtype=tl.float32)
    total = 0.0
    peak = float("-inf")
    if sinks is not None:
        total = 1.0
        peak = tl.load(sinks + tl.program_id(0) % num_heads)
    for first in range(0, num_states, STATES):
        state = first + tl.arange(0, STATES)
        live = state < num_states
        row = out_row * num_states + state
        state_lse = tl.load(part_lse + row, mask=live, other=float("-inf"))
        offsets = (row * HEAD_DIM)[:, None] + column[None, :]
        # A state without keys need not have a part: what is there may be NaN, which its weight of 0 would not remove.
        counted = state_lse != float("-inf")
        part = tl.load(parts + offsets, mask=counted[:, None] & in_head[None, :], other=0.0).to(tl.float32)
        new_peak = tl.maximum(peak, tl.max(state_lse, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink = tl.exp(peak - base)
        weights = tl.exp(state_lse - base)
        total = total * shrink + tl.sum(weights, 0)
        merged = merged * shrink + tl.sum(part * weights[:, None], 0)
        peak = new_peak
    divisor = tl.where(total == 0.0, 1.0, total)
    merged = merged / divisor
    merged_lse = tl.where(total == 0.0, float("-inf"), peak + tl.log(divisor))
    # `out` may be where `parts` is, of which other threads may still read what this one is to overwrite.
    tl.debug_barrier()
    tl.store(out + out_row * HEAD_DIM + column, merged.to(out.dtype.element_ty), mask=in_head)
    if lse is not None:
        tl.store(lse + out_row, merged_lse)
