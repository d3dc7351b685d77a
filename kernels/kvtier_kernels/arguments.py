"""Checks of launcher arguments. They look at shapes, dtypes, strides and devices, never at values on a device.

All raise `ValueError` that names the argument and what it must be: a bug of the caller.
"""

import torch
from torch import Tensor

KV_DTYPES = (torch.float32, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)


def require(condition: bool, message: str) -> None:
    """Raises `ValueError(message)` unless `condition`."""
    if not condition:
        raise ValueError(message)


def check_kv_layer(kv_layer: Tensor) -> None:
    """`kv_layer` is `[num_blocks, 2, tokens_per_block, num_kv_heads, head_dim]`; only the block stride is free."""
    require(kv_layer.dim() == 5 and kv_layer.size(1) == 2, f"kv_layer {_describe(kv_layer)}: needs [B, 2, N, K, D]")
    require(kv_layer.dtype in KV_DTYPES, f"kv_layer {_describe(kv_layer)}: needs float32 or bfloat16")
    _, _, num_tokens, num_heads, head_dim = kv_layer.shape
    row = num_heads * head_dim
    inner = (num_tokens * row, row, head_dim, 1)
    require(kv_layer.stride()[1:] == inner, f"kv_layer {_describe(kv_layer)}: needs contiguous blocks")
    require(kv_layer.stride(0) >= 2 * inner[0], f"kv_layer {_describe(kv_layer)}: blocks overlap")


def check_rows(name: str, rows: Tensor, kv_layer: Tensor) -> None:
    """`rows` is `[num_tokens, num_heads, head_dim]` of `kv_layer`'s dtype, device and head_dim; row stride is free."""
    require(rows.dim() == 3 and rows.size(2) == kv_layer.size(4), f"{name} {_describe(rows)}: needs [T, heads, D]")
    require(rows.dtype == kv_layer.dtype, f"{name} {_describe(rows)}: needs kv_layer's {kv_layer.dtype}")
    require(rows.device == kv_layer.device, f"{name} is on {rows.device}, kv_layer on {kv_layer.device}")
    require(rows.stride()[1:] == (rows.size(2), 1), f"{name} {_describe(rows)}: needs contiguous heads")


def check_index(name: str, index: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """`index` is contiguous int32 or int64 of this shape on this device; -1 in `shape` stands for any size."""
    fits = index.dim() == len(shape) and all(want in (-1, got) for want, got in zip(shape, index.shape, strict=True))
    require(fits, f"{name} {_describe(index)}: needs shape {list(shape)}")
    require(index.dtype in INDEX_DTYPES, f"{name} {_describe(index)}: needs int32 or int64")
    require(index.is_contiguous(), f"{name} {_describe(index)}: needs to be contiguous")
    require(index.device == device, f"{name} is on {index.device}, kv_layer on {device}")


def _describe(tensor: Tensor) -> str:
    return f"of shape {list(tensor.shape)}, strides {list(tensor.stride())}, {tensor.dtype}"
