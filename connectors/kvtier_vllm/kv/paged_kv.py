"""vLLM's paged KV as kvtier moves it: whole pages as bytes, a block being the pages of all layers."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier.device.grouped_kv import GroupedKV
from kvtier.device.kv import DeviceKV, HostMemoryKV
from kvtier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's KV."""

    pages: list[Tensor]
    """uint8 views `[num_blocks, page_bytes]`: one, or several where e.g. keys and values, or heads, lie apart."""
    layout: str
    """What a block of the layer has at which byte, whatever the number of blocks."""


def pages_of(layer: Tensor, num_blocks: int) -> LayerPages:
    """The pages of one layer.

    Dimensions may be in any order in memory, as long as what is within a block has no holes; pages may be padded.

    :param layer: blocks in dimension 0, or in dimension 1 behind keys and values.
    :param num_blocks: of the layer. Kernels may see each as several smaller ones, which follow one another.
    :raises ConfigError: no such views exist.
    """
    dim = next((dim for dim in range(min(2, layer.dim() - 1)) if layer.size(dim) % num_blocks == 0), None)
    if dim is None:
        raise _unknown(layer, num_blocks)
    others = sorted((d for d in range(layer.dim()) if d != dim), key=layer.stride, reverse=True)
    # With more than a block between its neighbours, a dimension is not within blocks: blocks are within it.
    outer = [d for d in others if layer.size(d) > 1 and layer.stride(d) > layer.stride(dim)]
    inner = [d for d in others if d not in outer]
    view = layer.permute(*outer, dim, *inner)
    places = itertools.product(*(range(layer.size(d)) for d in outer))
    pages = [_rows(view[place], layer, num_blocks) for place in places]
    described = [[(d, layer.size(d)) for d in outer], [(d, layer.size(d)) for d in inner]]
    return LayerPages(pages, f"{dim} {described} {layer.size(dim) // num_blocks} {layer.dtype}")


def _rows(part: Tensor, layer: Tensor, num_blocks: int) -> Tensor:
    """:param part: blocks in dimension 0, the others in their order in memory."""
    if not part[0].is_contiguous():
        raise _unknown(layer, num_blocks)
    rows = part.flatten(1).view(torch.uint8)
    if rows.size(0) == num_blocks:
        return rows
    if not rows.is_contiguous():
        raise _unknown(layer, num_blocks)
    return rows.view(num_blocks, -1)


@contextlib.contextmanager
def device_kv(
    groups: Sequence[Iterable[Tensor]],
    num_blocks: int,
    *,
    num_copies: int,
    staging_bytes: int = 128 * 2**20,
    checks_loads: bool = False,
) -> Iterator[DeviceKV]:
    """Moves blocks of these KV groups, each with its layers; see `GroupedKV` for their slots.

    Enter it in vLLM's thread; leave it after the last copy.

    :param num_copies: at a time; more callers wait. So do some of these where the staging holds fewer blocks.
    :param staging_bytes: of a CUDA device, beside the layers, where blocks have to be staged.
    :param checks_loads: whether a sample of what is loaded is verified on the device, which is CUDA then.
    :raises ConfigError: memory of a kind that is not moved, no room for staging, or none for a block in it.
    """
    pages = [[page for layer in group for page in pages_of(layer, num_blocks).pages] for group in groups]
    device = pages[0][0].device
    if device.type == "cpu":
        on_host = [HostMemoryKV(*(page.numpy() for page in of_group)) for of_group in pages]
        yield on_host[0] if len(on_host) == 1 else GroupedKV(on_host)
        return
    if device.type != "cuda":
        raise ConfigError(f"kvtier moves vLLM's KV in host memory and on CUDA; this is on {device}")
    # Imported here: it needs triton, and engines on CPU do not.
    from kvtier.device.cuda import CudaKV

    try:
        cuda_kv = CudaKV(*pages, staging_bytes=staging_bytes, num_lanes=num_copies, checks_loads=checks_loads)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"gpu_memory_utilization: leaves no room on {device} for staging copies in {staging_bytes:,} bytes; lower "
            "it, or cache.staging_bytes"
        ) from error
    try:
        yield cuda_kv
    finally:
        cuda_kv.close()


def _unknown(layer: Tensor, num_blocks: int) -> ConfigError:
    return ConfigError(
        f"KV of shape {list(layer.shape)} and strides {list(layer.stride())} for {num_blocks} blocks: "
        "not a layout whose pages are whole ranges of memory"
    )
