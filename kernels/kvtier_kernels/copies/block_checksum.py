"""Checksums of blocks where they lie on the device, to be compared with those of the bytes that they came from.

The checksum is that of `checksums`. Sums modulo 2**64 come out the same in whichever order they are added, so programs
add what they have to the sum of its block as they are done.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.arguments import check_index
from kvtier_kernels.checksums import HALF, KEY_FACTOR, KEY_STEP, MIXER, SEED, WORD_BYTES, part_words
from kvtier_kernels.copies.copy_pieces import MOST_PIECES, common_unit
from kvtier_kernels.copies.copy_tiles import checksum_tile
from kvtier_kernels.copies.part_copy import Parts
from kvtier_kernels.launching import check_launchable, on_device_of

_ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The type as which words are read, by the number of bytes that one load takes."""
_MIXER, _KEY_STEP, _KEY_FACTOR, _HALF = map(tl.constexpr, (MIXER, KEY_STEP, KEY_FACTOR, HALF))
_WORD_BYTES = tl.constexpr(WORD_BYTES)


def block_checksum(parts: Sequence[Parts], block_ids: Tensor) -> Tensor:
    """The checksum of each of these blocks: int64 `[n]`, on the device of the parts.

    Waits for nothing. Reads each block once, at the speed of the memory when there are a few MiB of them. A block that
    does not exist has `checksums.SEED` for its checksum.

    :param parts: of all blocks: a block is the parts of the first of these, then those of the second, and so on.
    :param block_ids: int32 or int64 `[n]`, on that device. The same block may come twice.
    :raises ValueError: on no parts, or a wrong shape, dtype or device, or too much for one launch.
    """
    if not parts:
        raise ValueError("there are no parts: needs at least one")
    device = parts[0].tensors[0].device
    for group in parts:
        check_launchable("part", group.tensors[0], _checksum_kernel)
        if group.tensors[0].device != device:
            raise ValueError(f"part is on {group.tensors[0].device}, another one on {device}")
    check_index("block_ids", block_ids, (-1,), device)
    sums = torch.full((block_ids.size(0),), SEED, dtype=torch.int64, device=device)
    first_word = 0
    for group in parts:
        if sums.numel() > 0:
            _add_parts(group, block_ids, sums, first_word)
        first_word += len(group.tensors) * part_words(group.tensors[0].size(1))
    return sums


def _add_parts(parts: Parts, block_ids: Tensor, sums: Tensor, first_word: int) -> None:
    """Adds what the words of these parts, whose first one has the number `first_word`, contribute to each sum."""
    first = parts.tensors[0]
    num_blocks, part_bytes = first.shape
    unit = common_unit(parts.alignment, part_bytes)
    element = min(unit, WORD_BYTES)
    words, num_warps = checksum_tile(part_words(part_bytes))
    chunks = triton.cdiv(part_words(part_bytes), words)
    num_pieces = block_ids.size(0) * len(parts.tensors) * chunks
    if num_pieces > MOST_PIECES:
        raise ValueError(f"{num_pieces} pieces of {block_ids.size(0)} blocks: too much for a launch; take fewer")
    with on_device_of(first):
        _checksum_kernel[(num_pieces,)](
            first.view(_ELEMENTS[element]), block_ids, parts.offsets, sums,
            first.stride(0) // unit, part_bytes // unit, num_blocks, len(parts.tensors), chunks,
            part_words(part_bytes), first_word,
            UNIT_BYTES=unit, ELEMENT_BYTES=element, WORDS=words, num_warps=num_warps,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "block_units", "part_units", "num_blocks", "num_parts", "chunks", "words_per_part", "first_word",
    ]
)  # fmt: skip
def _checksum_kernel(
    paged, block_ids, part_offsets, sums,
    block_units, part_units, num_blocks, num_parts, chunks, words_per_part, first_word,
    UNIT_BYTES: tl.constexpr, ELEMENT_BYTES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Strides and lengths are in units, of UNIT_BYTES each, for the reason that `row_copy._copy_kernel` has."""
    piece = tl.program_id(0)
    place = piece // (num_parts * chunks)
    part = piece // chunks % num_parts
    block = tl.load(block_ids + place).to(tl.int64)
    if (block < 0) | (block >= num_blocks):
        return
    UNIT_ELEMENTS: tl.constexpr = UNIT_BYTES // ELEMENT_BYTES
    start = (block * block_units + tl.load(part_offsets + part) // UNIT_BYTES) * UNIT_ELEMENTS
    word = piece % chunks * WORDS + tl.arange(0, WORDS)
    words = _load_words(paged + start, word, part_units * UNIT_ELEMENTS, ELEMENT_BYTES)
    product = words * _MIXER
    number = (first_word + part.to(tl.int64) * words_per_part + word).to(tl.uint64)
    terms = (product ^ (product >> _HALF)) * _key(number)
    terms = tl.where(word < words_per_part, terms, 0)
    tl.atomic_add(sums + place, tl.sum(terms, 0).to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _load_words(part, word, part_elements, ELEMENT_BYTES: tl.constexpr):
    """These words of a part, uint64; zeros beyond its end."""
    if ELEMENT_BYTES == _WORD_BYTES:
        return tl.load(part + word, mask=word < part_elements, other=0).to(tl.uint64, bitcast=True)
    else:  # noqa: RET505  # for Triton, which compiles what follows a return
        words = tl.zeros(word.shape, dtype=tl.uint64)
        for place in tl.static_range(_WORD_BYTES // ELEMENT_BYTES):
            element = word * (_WORD_BYTES // ELEMENT_BYTES) + place
            value = tl.load(part + element, mask=element < part_elements, other=0).to(tl.int64)
            value &= (1 << (8 * ELEMENT_BYTES)) - 1
            words |= value.to(tl.uint64, bitcast=True) << (8 * ELEMENT_BYTES * place)
        return words


@triton.jit
def _key(number):
    """The odd factor for the word of this number, computed as `kvtier_kernels.checksums` does."""
    key = (number + 1) * _KEY_STEP
    key = (key ^ (key >> _HALF)) * _KEY_FACTOR
    return (key ^ (key >> _HALF)) | 1
