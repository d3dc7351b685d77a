"""New keys and values into the blocks where they belong."""

from torch import Tensor

from kvtier_kernels.arguments import check_index, check_kv_layer, check_rows


def kv_write(kv_layer: Tensor, key: Tensor, value: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
    """Writes `key[i]` and `value[i]` to token `offsets[i]` of block `block_ids[i]`; nothing else changes.

    :param kv_layer: `[num_blocks, 2, tokens_per_block, num_kv_heads, head_dim]`, one layer's view of the paged KV.
    :param key: `[num_tokens, num_kv_heads, head_dim]` of the same dtype; `value` likewise.
    :param block_ids: int64 `[num_tokens]`; `offsets` likewise. (block, offset) pairs must be distinct.
    :raises ValueError: on a wrong shape, dtype, stride or device.
    """
    check_kv_layer(kv_layer)
    check_rows("key", key, kv_layer)
    check_rows("value", value, kv_layer)
    check_index("block_ids", block_ids, (key.size(0),), kv_layer.device)
    check_index("offsets", offsets, (key.size(0),), kv_layer.device)
    if key.shape != value.shape:
        raise ValueError(f"key is {list(key.shape)}, value {list(value.shape)}: must be equal")
    if key.size(1) != kv_layer.size(3):
        raise ValueError(f"key has {key.size(1)} heads, kv_layer {kv_layer.size(3)}")
    kv_layer[:, 0].index_put_((block_ids, offsets), key)
    kv_layer[:, 1].index_put_((block_ids, offsets), value)
