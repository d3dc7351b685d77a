"""Checks of launcher arguments. They look at shapes, dtypes, strides and devices, never at values on a device.

All raise `ValueError` that names the argument and what it must be: a bug of the caller. Messages are made only
when they are needed: these checks run in every layer.
"""

import torch
from torch import Tensor

KV_DTYPES = (torch.float32, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)


def check_kv_layer(kv_layer: Tensor) -> None:
    """`kv_layer` is `[num_blocks, 2, tokens_per_block, num_kv_heads, head_dim]`; only the block stride is free."""
    if kv_layer.dim() != 5 or kv_layer.size(1) != 2:
        raise ValueError(f"kv_layer {_describe(kv_layer)}: needs [B, 2, N, K, D]")
    if kv_layer.dtype not in KV_DTYPES:
        raise ValueError(f"kv_layer {_describe(kv_layer)}: needs float32 or bfloat16")
    _, _, num_tokens, num_heads, head_dim = kv_layer.shape
    row = num_heads * head_dim
    inner = (num_tokens * row, row, head_dim, 1)
    if kv_layer.stride()[1:] != inner:
        raise ValueError(f"kv_layer {_describe(kv_layer)}: needs contiguous blocks")
    if kv_layer.stride(0) < 2 * inner[0]:
        raise ValueError(f"kv_layer {_describe(kv_layer)}: blocks overlap")


def check_rows(name: str, rows: Tensor, kv_layer: Tensor) -> None:
    """`rows` is `[num_tokens, num_heads, head_dim]` of `kv_layer`'s dtype, device and head_dim; row stride is free."""
    if rows.dim() != 3 or rows.size(2) != kv_layer.size(4):
        raise ValueError(f"{name} {_describe(rows)}: needs [T, heads, D]")
    if rows.dtype != kv_layer.dtype:
        raise ValueError(f"{name} {_describe(rows)}: needs kv_layer's {kv_layer.dtype}")
    if rows.device != kv_layer.device:
        raise ValueError(f"{name} is on {rows.device}, kv_layer on {kv_layer.device}")
    if rows.stride()[1:] != (rows.size(2), 1):
        raise ValueError(f"{name} {_describe(rows)}: needs contiguous heads")


def check_index(name: str, index: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """`index` is contiguous int32 or int64 of this shape on this device; -1 in `shape` stands for any size."""
    fits = index.dim() == len(shape) and all(want in (-1, got) for want, got in zip(shape, index.shape, strict=True))
    if not fits:
        raise ValueError(f"{name} {_describe(index)}: needs shape {list(shape)}")
    if index.dtype not in INDEX_DTYPES:
        raise ValueError(f"{name} {_describe(index)}: needs int32 or int64")
    if not index.is_contiguous():
        raise ValueError(f"{name} {_describe(index)}: needs to be contiguous")
    if index.device != device:
        raise ValueError(f"{name} is on {index.device}, kv_layer on {device}")


def _describe(tensor: Tensor) -> str:
    return f"of shape {list(tensor.shape)}, strides {list(tensor.stride())}, {tensor.dtype}"
