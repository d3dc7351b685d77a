"""What all Triton launchers share: where a kernel may run, and on what chip."""

import contextlib
import functools
import math
from typing import Any

import torch
import triton
from torch import Tensor

from kvtier_kernels.tiles import (
    MAX_BLOCK_ELEMENTS,
    MAX_GROUP,
    MAX_HEAD_DIM,
    MIN_DOT,
    Tile,
    padded_head_dim,
    shared_limit_bytes,
)

FUSE = True
"""A product and the sum that takes it are one instruction. Triton does it by itself only before 3.10."""
_INTERPRETED_CAPABILITY = (9, 0)
_INTERPRETED_MULTIPROCESSORS = 4


def check_launchable(name: str, tensor: Tensor, kernel: Any) -> None:
    """The kernel can run where `tensor` is: on CUDA, or on CPU when Triton interprets its kernels.

    :raises ValueError: it cannot.
    """
    interpreted = not isinstance(kernel, triton.JITFunction)
    if tensor.device.type != ("cpu" if interpreted else "cuda"):
        raise ValueError(
            f"{name} is on {tensor.device}: Triton kernels run on CUDA, "
            "or on CPU tensors in a process started with TRITON_INTERPRET=1"
        )


def check_attention_limits(query: Tensor, kv_layer: Tensor) -> None:
    """A tile can hold heads of this size, and groups this wide, and blocks are not too large for 32 bits.

    Shapes have been checked before.
    """
    if query.size(2) > MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {query.size(2)}: at most {MAX_HEAD_DIM}")
    if query.size(1) // kv_layer.size(3) > MAX_GROUP:
        raise ValueError(f"{query.size(1)} query heads for {kv_layer.size(3)} KV heads: at most {MAX_GROUP} each")
    if (block_elements := math.prod(kv_layer.shape[1:])) > MAX_BLOCK_ELEMENTS:
        raise ValueError(f"kv_layer has blocks of {block_elements:,} elements: at most {MAX_BLOCK_ELEMENTS:,}")


def check_block_ids(
    kv_layer: Tensor, block_tables: Tensor, seq_lens: Tensor, query_starts: Tensor | None, window: int | None
) -> None:
    """The blocks that a kernel will read exist. Nothing is known of tables on a device: there it is for the caller.

    :param query_starts: None where each sequence has one query.
    """
    if block_tables.device.type != "cpu":
        return
    num_blocks, _, tokens_per_block, *_ = kv_layer.shape
    first_key = torch.zeros_like(seq_lens)
    if window is not None:
        num_queries = 1 if query_starts is None else query_starts.diff()
        first_key = (seq_lens - num_queries - window + 1).clamp(min=0)
    entry = torch.arange(block_tables.size(1))
    read = (entry >= (first_key // tokens_per_block)[:, None]) & (entry * tokens_per_block < seq_lens[:, None])
    wrong = read & ((block_tables < 0) | (block_tables >= num_blocks))
    if wrong.any():
        seq, place = wrong.nonzero()[0].tolist()
        raise ValueError(f"block_tables[{seq}, {place}] is {block_tables[seq, place]}: there are {num_blocks} blocks")


def check_tile(tile: Tile, query: Tensor, kv_layer: Tensor, chip: tuple[int, int]) -> None:
    """Powers of two that `tl.dot` takes, with a row for each head of a group, in a chip of this capability."""
    group = query.size(1) // kv_layer.size(3)
    for name, size in (("rows", tile.rows), ("keys", tile.keys)):
        if size < MIN_DOT or size & (size - 1):
            raise ValueError(f"tile.{name} is {size}: needs a power of two from {MIN_DOT} on")
    if tile.rows < group:
        raise ValueError(f"tile.rows is {tile.rows}: needs at least the {group} query heads of a KV head")
    needed = tile.shared_bytes(padded_head_dim(query.size(2)), query.element_size())
    if needed > shared_limit_bytes(chip):
        raise ValueError(
            f"{group} query heads per KV head of head_dim {query.size(2)} in {query.dtype}: a tile of them may need "
            f"{needed:,} bytes of shared memory, a chip of {chip[0]}.{chip[1]} has {shared_limit_bytes(chip):,}; "
            "use a dtype of 16 bits, or attention on fewer heads per KV head"
        )


def stored_values(kv_layer: Tensor, chip: tuple[int, int]) -> Tensor:
    """`kv_layer` as kernels take it: float8 as its bits on chips without it, which are those before 8.9."""
    return kv_layer.view(torch.uint8) if kv_layer.dtype == torch.float8_e4m3fn and chip < (8, 9) else kv_layer


def per_key_stride(kv_scales: Tensor | None) -> int | None:
    """Returns the stride between the blocks of scales per token and head; None where there are no such scales."""
    return kv_scales.stride(0) if kv_scales is not None and kv_scales.dim() == 4 else None


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current CUDA device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of the chip; on CPU, the one that the interpreter stands for."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else _INTERPRETED_CAPABILITY


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
