"""New keys and values into the blocks where they belong, as a Triton kernel. Moves bits, whatever they stand for."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.launching import check_launchable, on_device_of
from kvtier_kernels.tiles import next_power_of_two

_BITS = {2: torch.int16, 4: torch.int32}
_MAX_ELEMENTS = 4096


def write_slots(kv_layer: Tensor, key: Tensor, value: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
    """`kvtier_kernels.writes.kv_write.kv_write` for tensors that have been checked there.

    Waits for nothing. A (block, offset) that does not exist is written nowhere.

    :raises ValueError: on a device where the kernel cannot run.
    """
    check_launchable("kv_layer", kv_layer, _write_kernel)
    launch_write(kv_layer, key, value, block_ids, offsets)


def launch_write(kv_layer: Tensor, key: Tensor, value: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
    """`write_slots` of arguments of the same form as some that it has been called with before."""
    num_tokens, num_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    bits = _BITS[kv_layer.element_size()]
    row = num_heads * head_dim
    elements = min(_MAX_ELEMENTS, next_power_of_two(row))
    with on_device_of(kv_layer):
        _write_kernel[(num_tokens, -(-row // elements))](
            kv_layer.view(bits), key.view(bits), value.view(bits), block_ids, offsets,
            key.stride(0), value.stride(0), kv_layer.stride(0), kv_layer.size(0),
            ROW=row, TOKENS_PER_BLOCK=kv_layer.size(2), ELEMENTS=elements, num_warps=4,
        )  # fmt: skip


@triton.jit
def _write_kernel(
    kv, key, value, block_ids, offsets, key_stride, value_stride, block_stride, num_blocks,
    ROW: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    block = tl.load(block_ids + token).to(tl.int64)
    offset = tl.load(offsets + token).to(tl.int64)
    exists = (block >= 0) & (block < num_blocks) & (offset >= 0) & (offset < TOKENS_PER_BLOCK)
    mask = (element < ROW) & exists
    target = kv + block * block_stride + offset * ROW + element
    tl.store(target, tl.load(key + token * key_stride + element, mask=mask), mask=mask)
    values = target + TOKENS_PER_BLOCK * ROW
    tl.store(values, tl.load(value + token * value_stride + element, mask=mask), mask=mask)
