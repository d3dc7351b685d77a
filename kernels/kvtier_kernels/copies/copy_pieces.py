"""How all copies between paged KV and staging cut a launch into pieces.

A piece is a tile of one part (a layer, say): some elements of some blocks. Programs take pieces in order, part by
part, and as many apart as there are programs: a launch of few programs keeps all of them busy to the end.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.copies.copy_tiles import host_copy_programs
from kvtier_kernels.launching import num_multiprocessors

MOST_PIECES = 2**30
"""Pieces, and bytes of a part: the piece that a program takes next has a number within 32 bits, and so have the places
in a tile that is partly beyond the end."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """One launch. All numbers are at least 1."""

    per_part: int
    num_pieces: int
    num_programs: int


def cut(
    per_part: int, num_parts: int, part_bytes: int, device: torch.device, *, host: bool, max_programs: int | None
) -> Pieces:
    """:param part_bytes: of the larger side.
    :param device: that computes. `host`: one side of the copy is host memory.
    :param max_programs: None for as many as `kvtier_kernels.copies.copy_tiles` says.
    :raises ValueError: nothing may run, or there is too much for a launch.
    """
    num_pieces = per_part * num_parts
    if num_pieces > MOST_PIECES or part_bytes > MOST_PIECES:
        raise ValueError(f"{num_pieces} pieces of parts of {part_bytes} bytes: too much for a launch; copy in batches")
    if max_programs is None:
        max_programs = host_copy_programs(num_multiprocessors(device)) if host else num_pieces
    if max_programs < 1:
        raise ValueError(f"max_programs is {max_programs}: needs at least 1")
    return Pieces(per_part, num_pieces, min(max_programs, num_pieces))


def common_unit(*numbers: int) -> int:
    """The most bytes, up to 16, that divide all of them."""
    together = 16
    for number in numbers:
        together |= number
    return together & -together


def alignment(memory: Tensor) -> int:
    """A number for `common_unit`: what divides it divides the memory's address and all its strides but the last, in
    bytes."""
    element = memory.element_size()
    # A view as wider integers counts from the start of the storage, the hardware from 0.
    together = memory.data_ptr() | int(memory.storage_offset()) * element
    for stride in memory.stride()[:-1]:
        together |= stride * element
    return together


@triton.jit
def load_pairs(pair, block_ids, staging_rows, num_pairs, num_blocks, num_rows):
    """Block, staging row and whether both exist, of each of these pairs."""
    live = pair < num_pairs
    block = tl.load(block_ids + pair, mask=live, other=-1).to(tl.int64)
    row = tl.load(staging_rows + pair, mask=live, other=-1).to(tl.int64)
    return block, row, (block >= 0) & (block < num_blocks) & (row >= 0) & (row < num_rows)
