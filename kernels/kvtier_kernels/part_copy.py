"""Blocks in several parts, e.g. a page per layer, to and from a staging buffer in one launch, as a Triton kernel.

A staging row holds the parts one after the other. All parts are reached from the first one by an offset, whichever
allocation they are in: a device has one address space.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.arguments import check_byte_rows, check_index
from kvtier_kernels.launching import COPY_WORDS, check_launchable, on_device_of
from kvtier_kernels.tiles import copy_words


@dataclass(frozen=True, slots=True)
class Parts:
    """Blocks in parts of equal size and stride. Make it once: it puts a table on the device."""

    tensors: tuple[Tensor, ...]
    """uint8 `[num_blocks, part_bytes]` each, rows contiguous."""
    offsets: Tensor
    """int64 `[num_parts]`: bytes from the first part to each."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Parts":
        """Views are kept, nothing is copied. Raises `ValueError` for parts that differ in more than their address."""
        first = tensors[0]
        for tensor in tensors:
            check_byte_rows("part", tensor)
            if (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) != (
                first.shape, first.stride(), torch.uint8, first.device,
            ):  # fmt: skip
                raise ValueError(
                    f"part of {list(tensor.shape)} {tensor.dtype} on {tensor.device}, stride {tensor.stride(0)}, "
                    f"beside {list(first.shape)} on {first.device}, stride {first.stride(0)}: must be equal, and uint8"
                )
        offsets = [tensor.data_ptr() - first.data_ptr() for tensor in tensors]
        return cls(tuple(tensors), torch.tensor(offsets, dtype=torch.int64).to(first.device))

    @property
    def block_bytes(self) -> int:
        return self.tensors[0].size(1) * len(self.tensors)


def part_copy(parts: Parts, block_ids: Tensor, staging: Tensor, staging_rows: Tensor, *, gather: bool) -> None:
    """Copies block `block_ids[i]` to staging row `staging_rows[i]` (gather) or the other way round, for all i.

    Waits for nothing: a pair with an id or row that does not exist is not copied.

    :param block_ids: int32 or int64 `[n]`. `staging_rows` likewise. What is written to must be distinct.
    :param staging: uint8 `[num_rows, parts.block_bytes]`, rows contiguous, on the same device.
    :raises ValueError: on a wrong shape, dtype, stride or device.
    """
    first = parts.tensors[0]
    check_byte_rows("staging", staging)
    check_launchable("part", first, _part_kernel)
    if (staging.size(1), staging.dtype, staging.device) != (parts.block_bytes, torch.uint8, first.device):
        raise ValueError(
            f"staging has rows of {staging.size(1)} {staging.dtype} on {staging.device}, blocks have "
            f"{parts.block_bytes} bytes on {first.device}: must be equal"
        )
    check_index("block_ids", block_ids, (-1,), first.device)
    check_index("staging_rows", staging_rows, (block_ids.size(0),), first.device)
    part_bytes, num_parts = first.size(1), len(parts.tensors)
    unit = _common_unit(parts, staging)
    word_bytes, words = copy_words(unit, part_bytes)
    chunks = triton.cdiv(part_bytes // word_bytes, words)
    num_programs = block_ids.size(0) * num_parts * chunks
    if num_programs == 0:
        return
    if num_programs >= 2**31 or part_bytes >= 2**31:
        raise ValueError(f"{block_ids.size(0)} blocks of {parts.block_bytes} bytes: too much for a launch; use batches")
    word = COPY_WORDS[word_bytes]
    with on_device_of(first):
        _part_kernel[(num_programs,)](
            first.view(word), block_ids, staging.view(word), staging_rows, parts.offsets,
            first.stride(0) // unit, staging.stride(0) // unit, part_bytes // unit,
            first.size(0), staging.size(0), num_parts, chunks,
            UNIT_BYTES=unit, UNIT_WORDS=unit // word_bytes, WORDS=words, GATHER=gather, num_warps=4,
        )  # fmt: skip


def _common_unit(parts: Parts, staging: Tensor) -> int:
    """The most bytes, up to 16, that divide all addresses and lengths."""
    numbers = parts.tensors[0].size(1)
    for rows in (*parts.tensors, staging):
        # A view as wider integers counts from the start of the storage, the hardware from 0.
        numbers |= rows.data_ptr() | int(rows.storage_offset()) | rows.stride(0)
    return min(16, numbers & -numbers)


@triton.jit(
    do_not_specialize=["block_units", "row_units", "part_units", "num_blocks", "num_rows", "num_parts", "chunks"]
)
def _part_kernel(
    paged, block_ids, staging, staging_rows, offsets,
    block_units, row_units, part_units, num_blocks, num_rows, num_parts, chunks,
    UNIT_BYTES: tl.constexpr, UNIT_WORDS: tl.constexpr, WORDS: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Strides and lengths are in units of UNIT_WORDS words: by that the compiler knows that all of them are
    multiples of it, and makes 16 bytes one access."""
    program = tl.program_id(0)
    word = (program % chunks) * WORDS + tl.arange(0, WORDS)
    part = (program // chunks) % num_parts
    index = program // chunks // num_parts
    block = tl.load(block_ids + index).to(tl.int64)
    row = tl.load(staging_rows + index).to(tl.int64)
    exists = (block >= 0) & (block < num_blocks) & (row >= 0) & (row < num_rows)
    mask = (word < part_units * UNIT_WORDS) & exists
    in_block = paged + (tl.load(offsets + part) // UNIT_BYTES + block * block_units) * UNIT_WORDS + word
    in_row = staging + (row * row_units + part.to(tl.int64) * part_units) * UNIT_WORDS + word
    if GATHER:
        tl.store(in_row, tl.load(in_block, mask=mask), mask=mask)
    else:
        tl.store(in_block, tl.load(in_row, mask=mask), mask=mask)
