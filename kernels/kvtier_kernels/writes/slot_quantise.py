"""New keys and values into the blocks of quantised KV, where they belong, as a Triton kernel."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.copies.copy_tiles import slot_tile
from kvtier_kernels.launching import check_launchable, on_device_of
from kvtier_kernels.quantise_reference import LARGEST
from kvtier_kernels.quantising import quantise, vector_scales


def quantise_slots(
    kv_layer: Tensor, key: Tensor, value: Tensor, block_ids: Tensor, offsets: Tensor, kv_scales: Tensor | None
) -> None:
    """`kvtier_kernels.writes.kv_write.kv_write` for int8 and float8_e4m3fn, for tensors that have been checked there.

    Waits for nothing. A (block, offset) that does not exist is written nowhere.

    :raises ValueError: on a device where the kernel cannot run.
    """
    check_launchable("kv_layer", kv_layer, _quantise_slots_kernel)
    num_tokens, num_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    heads, columns = slot_tile(num_heads, head_dim)
    scales_stride = kv_scales.stride(0) if kv_scales is not None and kv_scales.dim() == 4 else None
    with on_device_of(kv_layer):
        _quantise_slots_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
            kv_layer.view(torch.int8), key, value, kv_scales, block_ids, offsets,
            key.stride(0), value.stride(0), kv_layer.stride(0), scales_stride, kv_layer.size(0),
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, TOKENS_PER_BLOCK=kv_layer.size(2),
            FP8=kv_layer.dtype == torch.float8_e4m3fn, LARGEST=LARGEST[kv_layer.dtype], HEADS=heads, COLUMNS=columns,
            num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["scales_stride", "num_blocks"])
def _quantise_slots_kernel(
    kv, key, value, kv_scales, block_ids, offsets,
    key_stride, value_stride, block_stride, scales_stride, num_blocks,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr,
    FP8: tl.constexpr, LARGEST: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some heads of one token. kv_scales is written, a scale per head, where it has a stride; else read, if any."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, COLUMNS)
    block = tl.load(block_ids + token).to(tl.int64)
    offset = tl.load(offsets + token).to(tl.int64)
    exists = (block >= 0) & (block < num_blocks) & (offset >= 0) & (offset < TOKENS_PER_BLOCK)
    live = (head < NUM_HEADS) & exists
    mask = live[:, None] & (column < HEAD_DIM)[None, :]
    element = (head * HEAD_DIM)[:, None] + column[None, :]
    for which in tl.static_range(2):
        source = key + token * key_stride if which == 0 else value + token * value_stride
        vectors = tl.load(source + element, mask=mask, other=0.0).to(tl.float32)
        slot = which * TOKENS_PER_BLOCK + offset
        if scales_stride is not None:
            scales = vector_scales(vectors, LARGEST)
            tl.store(kv_scales + block * scales_stride + slot * NUM_HEADS + head, scales, mask=live)
        elif kv_scales is not None:
            scales = tl.zeros([HEADS], tl.float32) + tl.load(kv_scales + which)
        else:
            scales = tl.full([HEADS], 1.0, tl.float32)
        target = kv + block * block_stride + slot * (NUM_HEADS * HEAD_DIM) + element
        tl.store(target, quantise(vectors, scales, FP8), mask=mask)
