"""New keys and values into the blocks where they belong."""

import torch
from torch import Tensor

from kvtier_kernels.arguments import QUANTISED_DTYPES, check_write
from kvtier_kernels.quantise_reference import quantise_reference, stored_reference


def kv_write(
    kv_layer: Tensor,
    key: Tensor,
    value: Tensor,
    block_ids: Tensor,
    offsets: Tensor,
    *,
    kv_scales: Tensor | None = None,
) -> None:
    """Writes `key[i]` and `value[i]` to token `offsets[i]` of block `block_ids[i]`; nothing else changes.

    Quantised KV takes them as `kvtier_kernels.records` says. On CUDA a Triton kernel does all of it, and nothing waits
    for the device: ids are not checked there, and a place that does not exist is written nowhere.

    :param kv_layer: `[num_blocks, 2, tokens_per_block, num_kv_heads, head_dim]`, one layer's view of the paged KV.
    :param key: `[num_tokens, num_kv_heads, head_dim]` of the same dtype; float32, bfloat16 or float16 for quantised KV.
        `value` likewise.
    :param block_ids: int32 or int64 `[num_tokens]`; `offsets` likewise. (block, offset) pairs must be distinct.
    :param kv_scales: of quantised KV, float32. `[num_blocks, 2, tokens_per_block, num_kv_heads]`, block stride free:
        each vector gets its own scale, which is written there. For float8_e4m3fn also `[2]`: the scales, for keys and
        for values, by which these are divided; what is too large becomes the largest. Or None, which stands for 1.
    :raises ValueError: on a wrong shape, dtype, stride or device.
    :raises IndexError: on CPU, on a place that does not exist.
    """
    check_write(kv_layer, key, value, block_ids, offsets, kv_scales)
    if kv_layer.device.type == "cpu":
        for name, index in (("block_ids", block_ids), ("offsets", offsets)):
            if index.numel() and (least := int(index.min())) < 0:  # torch would count from the end
                raise IndexError(f"{name} has {least}: there is no such place")
        _write_on_cpu(kv_layer, key, value, (block_ids, offsets), kv_scales)
        return
    # Imported here: triton is not needed, and not everywhere to be had, where the engine runs on CPU.
    if kv_layer.dtype in QUANTISED_DTYPES:
        from kvtier_kernels.writes.slot_quantise import quantise_slots

        quantise_slots(kv_layer, key, value, block_ids, offsets, kv_scales)
    else:
        from kvtier_kernels.writes.slot_write import write_slots

        write_slots(kv_layer, key, value, block_ids, offsets)


def _write_on_cpu(
    kv_layer: Tensor, key: Tensor, value: Tensor, places: tuple[Tensor, Tensor], kv_scales: Tensor | None
) -> None:
    for which, vectors in enumerate((key, value)):
        stored, target = vectors, kv_layer[:, which]
        if kv_layer.dtype in QUANTISED_DTYPES:
            if kv_scales is not None and kv_scales.dim() == 4:
                stored, scales = quantise_reference(vectors, kv_layer.dtype)
                kv_scales[:, which].index_put_(places, scales)
            else:
                ratio = vectors.float() if kv_scales is None else vectors.float() / kv_scales[which]
                stored = stored_reference(ratio, kv_layer.dtype)
            # As integers: torch does not index float8.
            stored, target = stored.view(torch.int8), target.view(torch.int8)
        target.index_put_(places, stored)
