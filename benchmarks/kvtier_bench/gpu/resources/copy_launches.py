"""What the kernels that move and quantise KV launch: their share of `resources`."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kvtier_kernels.copies.block_checksum import block_checksum
from kvtier_kernels.copies.block_copy import block_copy
from kvtier_kernels.copies.part_copy import Parts, part_copy
from kvtier_kernels.copies.quantised_copy import quantised_copy
from kvtier_kernels.records import LossyCodec, RecordLayout

_NUM_PARTS, _NUM_BLOCKS = 3, 4


def copy_launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """Names, and what to call while launches are recorded."""
    for row_bytes in (2**20, 2**20 + 8, 51):
        yield f"block_copy rows of {row_bytes:,}", partial(_blocks, row_bytes)
    for part_bytes in (2**16, 2**16 + 8):
        yield f"part_copy parts of {part_bytes:,}", partial(_parts, part_bytes)
    yield "part_copy layers", _layers
    yield "block_checksum parts of 65,536", _checksums
    for codec in LossyCodec:
        yield f"quantised_copy {codec}", partial(_quantised, codec)


def _blocks(row_bytes: int) -> None:
    blocks, staging = (torch.empty((_NUM_BLOCKS, row_bytes), dtype=torch.uint8) for _ in range(2))
    block_copy(blocks, _index(), staging, _index())


def _parts(part_bytes: int) -> None:
    """Gather, then scatter."""
    staging = torch.empty((_NUM_BLOCKS, _NUM_PARTS * part_bytes), dtype=torch.uint8)
    for gather in (True, False):
        part_copy(_pages(part_bytes), _index(), staging, _index(), gather=gather)


def _layers() -> None:
    """Scatter from staging that has one layer after the other."""
    staging = torch.empty((_NUM_PARTS, _NUM_BLOCKS, 2**16), dtype=torch.uint8)
    part_copy(_pages(2**16), _index(), staging, _index(), gather=False)


def _checksums() -> None:
    """Sums, then the chain."""
    block_checksum([_pages(2**16)], _index(), torch.empty((3, 11), dtype=torch.int64))


def _quantised(codec: LossyCodec) -> None:
    """Gather, then scatter."""
    layout = RecordLayout(codec, torch.bfloat16, head_dim=128, num_vectors=256)
    staging = torch.empty((_NUM_BLOCKS, _NUM_PARTS * layout.record_bytes), dtype=torch.uint8)
    for gather in (True, False):
        quantised_copy(_pages(layout.page_bytes), _index(), staging, _index(), layout=layout, gather=gather)


def _pages(part_bytes: int) -> Parts:
    return Parts.of(torch.empty((_NUM_PARTS, _NUM_BLOCKS, part_bytes), dtype=torch.uint8).unbind())


def _index() -> torch.Tensor:
    return torch.zeros(3, dtype=torch.int64)
