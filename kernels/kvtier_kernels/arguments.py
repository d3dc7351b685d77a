"""Checks of launcher arguments. They look at shapes, dtypes, strides and devices, never at values on a device.

All raise `ValueError` that names the argument and what it must be: a bug of the caller. Messages are made only
when they are needed: these checks run in every layer.
"""

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTISED_DTYPES = (torch.int8, torch.float8_e4m3fn)
"""The dtypes of KV whose values are what is stored times a scale."""
KV_DTYPES = FLOAT_DTYPES + QUANTISED_DTYPES
INDEX_DTYPES = (torch.int32, torch.int64)


def check_kv_layer(kv_layer: Tensor) -> None:
    """`kv_layer` is `[num_blocks, 2, tokens_per_block, num_kv_heads, head_dim]`; only the block stride is free."""
    if kv_layer.dim() != 5 or kv_layer.size(1) != 2:
        raise ValueError(f"kv_layer {_describe(kv_layer)}: needs [B, 2, N, K, D]")
    if kv_layer.dtype not in KV_DTYPES:
        raise ValueError(
            f"kv_layer {_describe(kv_layer)}: needs float32, bfloat16 or float16, or int8 or float8_e4m3fn"
        )
    _, _, num_tokens, num_heads, head_dim = kv_layer.shape
    row = num_heads * head_dim
    inner = (num_tokens * row, row, head_dim, 1)
    if kv_layer.stride()[1:] != inner:
        raise ValueError(f"kv_layer {_describe(kv_layer)}: needs contiguous blocks")
    if kv_layer.stride(0) < 2 * inner[0]:
        raise ValueError(f"kv_layer {_describe(kv_layer)}: blocks overlap")


def check_rows(name: str, rows: Tensor, kv_layer: Tensor) -> None:
    """`rows` is `[num_tokens, num_heads, head_dim]` of `kv_layer`'s device and head_dim; row stride is free.

    Its dtype is `kv_layer`'s, or any of `FLOAT_DTYPES` where that is a quantised one.
    """
    if rows.dim() != 3 or rows.size(2) != kv_layer.size(4):
        raise ValueError(f"{name} {_describe(rows)}: needs [T, heads, D]")
    if kv_layer.dtype in QUANTISED_DTYPES:
        if rows.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name} {_describe(rows)}: needs float32, bfloat16 or float16")
    elif rows.dtype != kv_layer.dtype:
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
        raise ValueError(f"{name} is on {index.device}, what it points into on {device}")


def check_kv_scales(kv_scales: Tensor | None, kv_layer: Tensor) -> None:
    """`kv_scales` is what `kv_layer`'s dtype asks for.

    None for floats. For int8 a scale per token and head, for float8_e4m3fn that, a scale for keys and one for values,
    or None, which stands for 1.
    """
    if kv_scales is None:
        if kv_layer.dtype == torch.int8:
            raise ValueError("kv_scales is None: int8 needs a scale per token and head")
        return
    if kv_layer.dtype not in QUANTISED_DTYPES:
        raise ValueError(f"kv_scales given: kv_layer's {kv_layer.dtype} has none")
    if kv_scales.dtype != torch.float32:
        raise ValueError(f"kv_scales {_describe(kv_scales)}: needs float32")
    if kv_scales.device != kv_layer.device:
        raise ValueError(f"kv_scales is on {kv_scales.device}, kv_layer on {kv_layer.device}")
    if kv_layer.dtype == torch.float8_e4m3fn and kv_scales.shape == (2,) and kv_scales.is_contiguous():
        return
    _, _, num_tokens, num_heads, _ = kv_layer.shape
    inner = (num_tokens * num_heads, num_heads, 1)
    if kv_scales.shape != kv_layer.shape[:4] or kv_scales.stride()[1:] != inner:
        raise ValueError(f"kv_scales {_describe(kv_scales)}: needs contiguous blocks of {list(kv_layer.shape[:4])}")
    if kv_scales.stride(0) < 2 * inner[0]:
        raise ValueError(f"kv_scales {_describe(kv_scales)}: blocks overlap")


def check_write(kv_layer: Tensor, key: Tensor, value: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
    """What `kv_write` takes fits together."""
    check_kv_layer(kv_layer)
    if kv_layer.dtype in QUANTISED_DTYPES:
        raise ValueError(f"kv_layer is {kv_layer.dtype}: keys and values are written as they are, into KV of floats")
    check_rows("key", key, kv_layer)
    check_rows("value", value, kv_layer)
    check_index("block_ids", block_ids, (key.size(0),), kv_layer.device)
    check_index("offsets", offsets, (key.size(0),), kv_layer.device)
    if key.shape != value.shape:
        raise ValueError(f"key is {list(key.shape)}, value {list(value.shape)}: must be equal")
    if key.dtype != value.dtype:
        raise ValueError(f"key is {key.dtype}, value {value.dtype}: must be equal")
    if key.size(1) != kv_layer.size(3):
        raise ValueError(f"key has {key.size(1)} heads, kv_layer {kv_layer.size(3)}")


def check_lse(lse: Tensor, query: Tensor) -> None:
    """`lse` is contiguous float32 `[num_tokens, num_heads]` on `query`'s device."""
    if lse.shape != query.shape[:2] or lse.dtype != torch.float32 or not lse.is_contiguous():
        raise ValueError(f"lse {_describe(lse)}: needs contiguous float32 {list(query.shape[:2])}")
    if lse.device != query.device:
        raise ValueError(f"lse is on {lse.device}, query on {query.device}")


def check_byte_rows(name: str, rows: Tensor) -> None:
    """`rows` is `[num_rows, row_elements]` with contiguous rows that do not overlap; row stride is free."""
    if rows.dim() != 2 or rows.size(1) == 0:
        raise ValueError(f"{name} {_describe(rows)}: needs [rows, elements]")
    if rows.stride(1) != 1 or (rows.size(0) > 1 and rows.stride(0) < rows.size(1)):
        raise ValueError(f"{name} {_describe(rows)}: needs contiguous rows that do not overlap")


def check_staging(staging: Tensor, num_parts: int, part_bytes: int, device: torch.device) -> Tensor:
    """`staging` as `[num_parts, num_rows, part_bytes]`, a view: uint8 that kernels on `device` reach.

    It is `[num_rows, num_parts * part_bytes]` (block by block) or `[num_parts, num_rows, part_bytes]` (part by part).
    """
    if staging.dim() == 2:
        check_byte_rows("staging", staging)
        if staging.size(1) != num_parts * part_bytes:
            raise ValueError(
                f"staging has rows of {staging.size(1)} bytes, blocks {num_parts} parts of {part_bytes}: must be equal"
            )
        by_part = staging.view(staging.size(0), num_parts, part_bytes).transpose(0, 1)
    else:
        if staging.dim() != 3 or (staging.size(0), staging.size(2)) != (num_parts, part_bytes):
            raise ValueError(f"staging {_describe(staging)}: needs [{num_parts}, rows, {part_bytes}]")
        if staging.stride(2) != 1 or not _are_apart(staging):
            raise ValueError(f"staging {_describe(staging)}: needs contiguous rows that do not overlap")
        by_part = staging
    if staging.dtype != torch.uint8:
        raise ValueError(f"staging {_describe(staging)}: needs uint8")
    check_reachable("staging", staging, device)
    return by_part


def _are_apart(rows: Tensor) -> bool:
    """Whether no two rows of `[num_parts, num_rows, part_bytes]` overlap, whichever of the first two is outside."""
    extent = rows.size(2)
    for stride, size in sorted(zip(rows.stride()[:2], rows.shape[:2], strict=True)):
        if size > 1 and stride < extent:
            return False
        extent += stride * (size - 1)
    return True


def check_reachable(name: str, memory: Tensor, device: torch.device) -> None:
    """Kernels on `device` can reach it: memory of that device, or of the host, pinned, where that device is CUDA."""
    pinned = device.type == "cuda" and memory.device.type == "cpu" and memory.is_pinned()
    if memory.device != device and not pinned:
        raise ValueError(
            f"{name} is on {memory.device}, what it is used with on {device}: must be equal, or pinned beside CUDA"
        )


def _describe(tensor: Tensor) -> str:
    return f"of shape {list(tensor.shape)}, strides {list(tensor.stride())}, {tensor.dtype}"
