"""vLLM's paged KV as kvtier moves it: whole pages as bytes, a block being the pages of all layers."""

from collections.abc import Iterable

import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.transfer import DeviceKV, HostMemoryKV


def pages_of(layer: Tensor, num_blocks: int) -> list[Tensor]:
    """uint8 views `[num_blocks, page_bytes]` of one layer's KV: one, or two where keys and values lie apart.

    Dimensions inside a page may be in any order in memory, as long as it has no holes; pages may be padded.

    :param num_blocks: of the layer. Kernels may see each as several smaller ones, which follow one another.
    :raises ConfigError: no such view exists.
    """
    if layer.dim() > 1 and layer.size(0) % num_blocks == 0:
        halves = [layer]
    elif layer.dim() > 2 and layer.size(1) % num_blocks == 0:
        halves = list(layer.unbind(0))
    else:
        raise _unknown(layer, num_blocks)
    pages: list[Tensor] = []
    for half in halves:
        by_stride = sorted(range(1, half.dim()), key=half.stride, reverse=True)
        half = half.permute(0, *by_stride)
        if not half[0].is_contiguous():
            raise _unknown(layer, num_blocks)
        rows = half.flatten(1).view(torch.uint8)
        if rows.size(0) != num_blocks:
            if not rows.is_contiguous():
                raise _unknown(layer, num_blocks)
            rows = rows.view(num_blocks, -1)
        pages.append(rows)
    return pages


def layout_of(layer: Tensor, num_blocks: int) -> str:
    """What a page of this layer has at which byte, whatever the number of blocks."""
    parts = [layer] if layer.size(0) % num_blocks == 0 else list(layer.unbind(0))
    return " ".join(f"{list(part.shape[1:])}/{list(part.stride()[1:])}/{part.dtype}" for part in parts)


def device_kv(layers: Iterable[Tensor], num_blocks: int) -> DeviceKV:
    """Moves blocks of these layers. The tensors must outlive it.

    :raises ConfigError: memory of a kind that is not moved yet.
    """
    tensors = list(layers)
    if any(tensor.device.type != "cpu" for tensor in tensors):
        raise ConfigError(f"kvtier moves vLLM's KV in host memory only so far; this is on {tensors[0].device}")
    return HostMemoryKV(*(page.numpy() for tensor in tensors for page in pages_of(tensor, num_blocks)))


def _unknown(layer: Tensor, num_blocks: int) -> ConfigError:
    return ConfigError(
        f"KV of shape {list(layer.shape)} and strides {list(layer.stride())} for {num_blocks} blocks: "
        "not a layout whose pages are whole ranges of memory"
    )
