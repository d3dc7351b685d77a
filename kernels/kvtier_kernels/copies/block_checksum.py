"""Checksums of blocks where they lie on the device, to be compared with those that their writers computed.

The checksum is xxh3_64, which is not made for many threads: accumulators are scrambled after each KiB. What a KiB adds
to them does not depend on them, though. One kernel computes these sums for all KiB of all blocks at once, at the speed
of the memory; another one takes each block's sums, a sixteenth of its bytes, through the chain of scrambles.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels import xxh3
from kvtier_kernels.arguments import check_index
from kvtier_kernels.copies.copy_pieces import MOST_PIECES, common_unit
from kvtier_kernels.copies.copy_tiles import CHAIN_TILE, SUM_GROUPS
from kvtier_kernels.copies.part_copy import Parts
from kvtier_kernels.launching import check_launchable, on_device_of
from kvtier_kernels.xxh3 import GROUP_WORDS, LANES, LEAST_BYTES, WORD_BYTES

_LANES, _STRIPES, _GROUP_WORDS = map(tl.constexpr, (LANES, xxh3.STRIPES, GROUP_WORDS))
_SCRAMBLE_AT, _LAST_AT, _MERGE_AT, _START_AT = map(
    tl.constexpr, (xxh3.SCRAMBLE_AT, xxh3.LAST_AT, xxh3.MERGE_AT, xxh3.START_AT)
)
_PRIME32_1, _PRIME64_1, _AVALANCHE = map(tl.constexpr, (xxh3.PRIME32_1, xxh3.PRIME64_1, xxh3.AVALANCHE))


def block_checksum(parts: Sequence[Parts], block_ids: Tensor, prefixes: Tensor) -> Tensor:
    """xxh3_64 of a prefix and the block behind it, for each of these blocks: int64 `[n]`, on the device of the parts.

    The unsigned checksum that `xxhash.xxh3_64_intdigest` gives is this one modulo 2**64. Waits for nothing, once a
    first call has brought a table to the device. A block that does not exist has the checksum 0. Reads each block once,
    and takes a sixteenth of the blocks' bytes for as long as it runs.

    :param parts: of all blocks: a block is the parts of the first of these, then those of the second, and so on.
    :param block_ids: int32 or int64 `[n]`, on that device. The same block may come twice.
    :param prefixes: int64 `[n, prefix_words]`, contiguous, on that device: the bytes before block `block_ids[i]`, in
        words of 8; perhaps none.
    :raises ValueError: on no parts, parts that are not whole words, fewer than 241 bytes of prefix and block together,
        a wrong shape, dtype or device, or too much for one launch.
    """
    if not parts:
        raise ValueError("there are no parts: needs at least one")
    device = parts[0].tensors[0].device
    for group in parts:
        check_launchable("part", group.tensors[0], _sum_kernel)
        if group.tensors[0].device != device:
            raise ValueError(f"part is on {group.tensors[0].device}, another one on {device}")
        if not is_in_words(group):
            raise ValueError(
                f"part of {group.tensors[0].size(1)} bytes: needs a size, an address and strides that are multiples of "
                f"{WORD_BYTES} bytes"
            )
    check_index("block_ids", block_ids, (-1,), device)
    check_index("prefixes", prefixes, (block_ids.size(0), -1), device)
    if prefixes.dtype != torch.int64:
        raise ValueError(f"prefixes are {prefixes.dtype}: needs int64")
    num_words = prefixes.size(1) + sum(group.block_bytes for group in parts) // WORD_BYTES
    if num_words * WORD_BYTES < LEAST_BYTES:
        raise ValueError(f"prefix and block are {num_words * WORD_BYTES} bytes: need {LEAST_BYTES} or more together")
    checksums = torch.empty(block_ids.shape, dtype=torch.int64, device=device)
    if checksums.numel() > 0:
        with on_device_of(checksums):
            _launch(parts, block_ids, prefixes, checksums, num_words)
    return checksums


def is_in_words(parts: Parts) -> bool:
    """Whether `block_checksum` takes these parts: their sizes, addresses and strides are multiples of 8 bytes."""
    return common_unit(parts.alignment, parts.tensors[0].size(1)) >= WORD_BYTES


def _launch(parts: Sequence[Parts], block_ids: Tensor, prefixes: Tensor, checksums: Tensor, num_words: int) -> None:
    num_checked, device = block_ids.size(0), checksums.device
    num_groups = triton.cdiv(num_words, GROUP_WORDS)
    most_pieces = num_checked * triton.cdiv(num_groups, SUM_GROUPS)
    if most_pieces > MOST_PIECES or num_words > MOST_PIECES:
        raise ValueError(
            f"{most_pieces} pieces of {num_checked} blocks of {num_words} words: too much for a launch; take fewer"
        )
    num_blocks = min(group.tensors[0].size(0) for group in parts)
    secrets = xxh3.table(device)
    sums = torch.empty((num_checked, num_groups, LANES), dtype=torch.int64, device=device)
    last_words = torch.empty((num_checked, LANES), dtype=torch.int64, device=device)
    begun, tile_words = 0, SUM_GROUPS * GROUP_WORDS
    for group in parts:
        first = group.tensors[0].view(torch.int64)
        parts_begin = begun or prefixes.size(1)
        stop = parts_begin + group.block_bytes // WORD_BYTES
        first_tile = begun // tile_words
        tiles = triton.cdiv(stop, tile_words) - first_tile
        _sum_kernel[(num_checked * tiles,)](
            first, group.offsets, block_ids, prefixes, secrets, sums, last_words,
            first.stride(0), first.size(1), num_blocks, begun, parts_begin, stop, num_words, num_groups, first_tile,
            tiles, GROUPS=SUM_GROUPS, num_warps=1,
        )  # fmt: skip
        begun = stop
    _chain_kernel[(triton.cdiv(num_checked, CHAIN_TILE.blocks),)](
        sums, last_words, block_ids, secrets, checksums, num_checked, num_blocks, num_words, num_groups,
        BLOCKS=CHAIN_TILE.blocks, AHEAD=CHAIN_TILE.ahead, num_warps=1,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[  # block_ids and prefixes may be slices of one tensor, so that they begin anywhere
        "block_ids", "prefixes", "block_words", "part_words", "num_blocks", "begun", "parts_begin", "stop", "num_words",
        "num_groups", "first_tile", "tiles",
    ]
)  # fmt: skip
def _sum_kernel(
    paged, part_offsets, block_ids, prefixes, secrets, sums, last_words,
    block_words, part_words, num_blocks, begun, parts_begin, stop, num_words, num_groups, first_tile, tiles,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Words are numbered through prefix and block. These parts have those from `parts_begin` to `stop`; all before
    `begun` are in `sums` already: those of the parts before, or, with the first parts, none, and the prefix is summed
    here."""
    checked = tl.program_id(0) // tiles
    block = tl.load(block_ids + checked).to(tl.int64)
    if (block < 0) | (block >= num_blocks):
        return
    TILE: tl.constexpr = GROUPS * _GROUP_WORDS
    first_group = (first_tile + tl.program_id(0) % tiles) * GROUPS
    first_word = first_group * _GROUP_WORDS
    stripe, lane = tl.arange(0, _STRIPES)[:, None], tl.arange(0, _LANES)[None, :]
    group = first_group + tl.arange(0, GROUPS)
    in_tile = (tl.arange(0, GROUPS)[:, None, None] * _STRIPES + stripe[None, :, :]) * _LANES + lane[None, :, :]
    keys = tl.load(secrets + stripe + lane)[None, :, :]
    # The last stripe of all is added at the end, with other keys.
    counted = tl.minimum(stop, (num_words - 1) // _LANES * _LANES)
    part = tl.maximum(first_word - parts_begin, 0) // part_words
    in_part = first_word - parts_begin - part * part_words
    if (in_part >= 0) & (in_part + TILE <= part_words) & (first_word + TILE <= counted):
        offset = tl.load(part_offsets + part) // 8 + in_part
        data = tl.load(paged + block * block_words + offset + in_tile)
        lane_sums = _lane_sums(data, _products(data, keys))
    else:
        word = first_word + in_tile
        data = _load_words(paged, part_offsets, block * block_words, word, part_words, parts_begin, stop)
        in_prefix = (word >= begun) & (word < parts_begin)
        data |= tl.load(prefixes + checked.to(tl.int64) * parts_begin + word, mask=in_prefix, other=0)
        is_last = (word >= tl.maximum(num_words - _LANES, begun)) & (word < stop)
        tl.store(last_words + checked.to(tl.int64) * _LANES + (word - (num_words - _LANES)), data, mask=is_last)
        counts = (word >= begun) & (word < counted)
        lane_sums = _lane_sums(tl.where(counts, data, 0), tl.where(counts, _products(data, keys), 0))
    into = (checked.to(tl.int64) * num_groups + group)[:, None] * _LANES + lane
    if first_word < begun:
        lane_sums += tl.load(sums + into, mask=(group * _GROUP_WORDS < begun)[:, None], other=0)
    tl.store(sums + into, lane_sums, mask=(group < num_groups)[:, None])


@triton.jit
def _load_words(paged, part_offsets, block_start, word, part_words, parts_begin, stop):
    """These words, int64, of a block in several parts; zeros where it has none."""
    mask = (word >= parts_begin) & (word < stop)
    number = tl.where(mask, word - parts_begin, 0).to(tl.uint32)
    part = number // part_words.to(tl.uint32)
    offset = tl.load(part_offsets + part) // 8 + (number - part * part_words.to(tl.uint32))
    return tl.load(paged + block_start + offset, mask=mask, other=0)


@triton.jit
def _products(data, keys):
    """The products of the halves of each word with its key, int64."""
    keyed = (data ^ keys).to(tl.uint64, bitcast=True)
    return ((keyed & 0xFFFFFFFF) * (keyed >> 32)).to(tl.int64, bitcast=True)


@triton.jit
def _lane_sums(data, products):
    """`[groups, lanes]` of words `[groups, stripes, lanes]`: a lane has its products, and the data of its neighbour."""
    return tl.sum(products, 1) + _of_neighbours(tl.sum(data, 1))


@triton.jit
def _of_neighbours(values):
    """`[rows, lanes]`, each lane with the value of the other lane of its pair: the sum of both, less its own."""
    pairs = tl.reshape(values, (values.shape[0], values.shape[1] // 2, 2))
    both = tl.broadcast_to(tl.expand_dims(tl.sum(pairs, 2), 2), pairs.shape)
    return tl.reshape(both - pairs, values.shape)


@triton.jit(do_not_specialize=["block_ids", "num_checked", "num_blocks", "num_words", "num_groups"])
def _chain_kernel(
    sums, last_words, block_ids, secrets, checksums, num_checked, num_blocks, num_words, num_groups,
    BLOCKS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A thread is a lane of a block. AHEAD groups are loaded at a time, before the first of them is needed."""
    checked, lane = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS), tl.arange(0, _LANES)[None, :]
    block = tl.load(block_ids + checked, mask=checked < num_checked, other=-1).to(tl.int64)
    exists = ((block >= 0) & (block < num_blocks))[:, None]
    scramble = tl.load(secrets + _SCRAMBLE_AT + lane).to(tl.uint64, bitcast=True)
    start = tl.load(secrets + _START_AT + lane).to(tl.uint64, bitcast=True)
    acc = tl.broadcast_to(start, (BLOCKS, _LANES))
    place = sums + checked.to(tl.int64)[:, None] * num_groups * _LANES + lane
    num_full = (num_words - 1) // _GROUP_WORDS
    for first in range(0, num_full // AHEAD * AHEAD, AHEAD):
        for step in tl.static_range(AHEAD):
            acc = _scrambled(acc, tl.load(place + (first + step) * _LANES, mask=exists, other=0), scramble)
    for group in range(num_full // AHEAD * AHEAD, num_full):
        acc = _scrambled(acc, tl.load(place + group * _LANES, mask=exists, other=0), scramble)
    rest = tl.load(place + num_full * _LANES, mask=exists, other=0)
    last = tl.load(last_words + checked.to(tl.int64)[:, None] * _LANES + lane, mask=exists, other=0)
    rest += _of_neighbours(last) + _products(last, tl.load(secrets + _LAST_AT + lane))
    acc += rest.to(tl.uint64, bitcast=True)
    acc ^= tl.load(secrets + _MERGE_AT + lane).to(tl.uint64, bitcast=True)
    left, right = tl.split(tl.reshape(acc, (BLOCKS, _LANES // 2, 2)))
    hashed = tl.sum((left * right) ^ tl.umulhi(left, right), 1) + num_words.to(tl.uint64) * 8 * _PRIME64_1
    hashed = (hashed ^ (hashed >> 37)) * _AVALANCHE
    hashed = (hashed ^ (hashed >> 32)).to(tl.int64, bitcast=True)
    tl.store(checksums + checked, tl.where((block >= 0) & (block < num_blocks), hashed, 0), mask=checked < num_checked)


@triton.jit
def _scrambled(acc, more, scramble):
    """Accumulators at the end of a group that adds `more` to them."""
    total = acc + more.to(tl.uint64, bitcast=True)
    return (total ^ (total >> 47) ^ scramble) * _PRIME32_1
