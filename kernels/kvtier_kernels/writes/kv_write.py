"""New keys and values into the blocks where they belong."""

from torch import Tensor

from kvtier_kernels.arguments import check_write


def kv_write(kv_layer: Tensor, key: Tensor, value: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
    """Writes `key[i]` and `value[i]` to token `offsets[i]` of block `block_ids[i]`; nothing else changes.

    On CUDA a Triton kernel does all of it, and nothing waits for the device: ids are not checked there, and a place
    that does not exist is written nowhere.

    :param kv_layer: `[num_blocks, 2, tokens_per_block, num_kv_heads, head_dim]`, one layer's view of the paged KV. Not
        quantised.
    :param key: `[num_tokens, num_kv_heads, head_dim]` of the same dtype. `value` likewise.
    :param block_ids: int32 or int64 `[num_tokens]`; `offsets` likewise. (block, offset) pairs must be distinct.
    :raises ValueError: on a wrong shape, dtype, stride or device.
    :raises IndexError: on CPU, on a place that does not exist.
    """
    check_write(kv_layer, key, value, block_ids, offsets)
    if kv_layer.device.type == "cpu":
        for name, index in (("block_ids", block_ids), ("offsets", offsets)):
            if index.numel() and (least := int(index.min())) < 0:  # torch would count from the end
                raise IndexError(f"{name} has {least}: there is no such place")
        put_on_cpu(kv_layer, key, value, block_ids, offsets)
        return
    # Imported here: triton is not needed, and not everywhere to be had, where the engine runs on CPU.
    from kvtier_kernels.writes.slot_write import write_slots

    write_slots(kv_layer, key, value, block_ids, offsets)


def put_on_cpu(kv_layer: Tensor, key: Tensor, value: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
    """`kv_write` to CPU tensors, to places that are known to exist."""
    kv_layer[:, 0].index_put_((block_ids, offsets), key)
    kv_layer[:, 1].index_put_((block_ids, offsets), value)
