"""The part of `selfcheck` for kernels that move and quantise KV: bit for bit, to host memory and across streams too."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from kvtier_kernels.quantise_reference import quantised_copy_reference
from kvtier_kernels.records import DTYPES, LossyCodec, RecordLayout
from kvtier_kernels.reference import block_checksum_reference, block_copy_reference, part_copy_reference

Check = Callable[[], str]
"""Returns what is wrong; nothing, when all is right."""

ROW_BYTES = (1, 50, 4096, 2**16 + 16, 2**16 + 4)
CHECKSUM_BYTES, PREFIX_WORDS = (56, 2**16 + 8, 2**20), 11
NUM_BLOCKS, NUM_ROWS, NUM_PARTS, NUM_PAIRS = 50, 40, 5, 33


def copy_checks(device: torch.device) -> Iterator[tuple[str, Check]]:
    """Name and check of each: `selfcheck` runs them."""
    for row_bytes in ROW_BYTES:
        yield f"block_copy rows of {row_bytes} bytes", partial(_check_blocks, row_bytes, device)
        yield f"part_copy parts of {row_bytes} bytes", partial(_check_parts, row_bytes, device)
        yield f"part_copy layers of {row_bytes} bytes in host memory", partial(_check_layers, row_bytes, device)
    for part_bytes in CHECKSUM_BYTES:
        yield f"block_checksum parts of {part_bytes} bytes", partial(_check_checksums, part_bytes, device)
    for codec, dtype, (head_dim, num_vectors) in itertools.product(LossyCodec, DTYPES, ((128, 64), (80, 7))):
        layout = RecordLayout(codec, dtype, head_dim, num_vectors)
        yield (
            f"quantised_copy {codec} {_name(dtype)} {num_vectors}x{head_dim}",
            partial(_check_quantised, layout, device),
        )


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, dtype=dtype)


def _check_blocks(row_bytes: int, device: torch.device) -> str:
    from kvtier_kernels.copies.block_copy import block_copy

    source, target = random_bits((NUM_BLOCKS, row_bytes), torch.uint8), random_bits((NUM_ROWS, row_bytes), torch.uint8)
    block_ids, rows = _pairs()
    there = target.to(device, copy=True)
    block_copy(source.to(device), block_ids.to(device), there, rows.to(device))
    block_copy_reference(source, block_ids, target, rows)
    return _differ(there, target)


def _check_parts(part_bytes: int, device: torch.device) -> str:
    from kvtier_kernels.copies.part_copy import Parts, part_copy

    staging = random_bits((NUM_ROWS, NUM_PARTS * part_bytes), torch.uint8)
    kv = random_bits((NUM_BLOCKS, NUM_PARTS, part_bytes), torch.uint8)
    there, staged = kv.to(device, copy=True), staging.to(device, copy=True)
    block_ids, rows = _pairs()
    for gather, these_blocks in ((True, block_ids), (False, block_ids.flip(0).contiguous())):
        part_copy(Parts.of(there.unbind(1)), these_blocks.to(device), staged, rows.to(device), gather=gather)
        part_copy_reference(kv.unbind(1), these_blocks, staging, rows, gather=gather)
    return _differ(there, kv) or _differ(staged, staging)


def _check_layers(part_bytes: int, device: torch.device) -> str:
    """Copies layer after layer, to host memory and from it, and compares."""
    from kvtier_kernels.copies.part_copy import Parts, part_copy

    kv = random_bits((NUM_BLOCKS, NUM_PARTS, part_bytes), torch.uint8)
    staging = random_bits((NUM_PARTS, NUM_ROWS, part_bytes), torch.uint8)
    there, staged = kv.to(device, copy=True), staging.clone()
    if device.type == "cuda":
        staged = staged.pin_memory()
    block_ids, rows = _pairs()
    for gather, these_blocks in ((True, block_ids), (False, block_ids.flip(0).contiguous())):
        part_copy(Parts.of(there.unbind(1)), these_blocks.to(device), staged, rows.to(device), gather=gather)
        part_copy_reference(kv.unbind(1), these_blocks, staging, rows, gather=gather)
    return _differ(there, kv) or _differ(staged, staging)


def _check_checksums(part_bytes: int, device: torch.device) -> str:
    """Compares checksums of blocks, whose parts are in two allocations, with xxHash's own of the same bytes."""
    from kvtier_kernels.copies.block_checksum import block_checksum
    from kvtier_kernels.copies.part_copy import Parts

    kv, more = (random_bits((NUM_BLOCKS, parts, part_bytes), torch.uint8) for parts in (NUM_PARTS, 1))
    block_ids, _ = _pairs()
    groups = [Parts.of(of.to(device).unbind(1)) for of in (kv, more)]
    prefixes = random_bits((NUM_PAIRS, PREFIX_WORDS), torch.int64)
    expected = block_checksum_reference((*kv.unbind(1), *more.unbind(1)), block_ids, prefixes).tolist()
    found = block_checksum(groups, block_ids.to(device), prefixes.to(device)).tolist()
    return "" if found == expected else f"{sum(map(int.__ne__, found, expected))} of {len(expected)} checksums differ"


def _check_quantised(layout: RecordLayout, device: torch.device) -> str:
    from kvtier_kernels.copies.part_copy import Parts
    from kvtier_kernels.copies.quantised_copy import quantised_copy

    vectors = _vectors(NUM_BLOCKS * NUM_PARTS * layout.num_vectors, layout.head_dim, layout.dtype)
    kv = vectors.view(torch.uint8).view(NUM_BLOCKS, NUM_PARTS, layout.page_bytes)
    staging = random_bits((NUM_PARTS, NUM_ROWS, layout.record_bytes), torch.uint8)
    there, staged = kv.to(device, copy=True), staging.to(device, copy=True)
    block_ids, rows = _pairs()
    for gather, these_blocks in ((True, block_ids), (False, block_ids.flip(0).contiguous())):
        quantised_copy(
            Parts.of(there.unbind(1)), these_blocks.to(device), staged, rows.to(device), layout=layout, gather=gather
        )
        quantised_copy_reference(kv.unbind(1), these_blocks, staging, rows, layout=layout, gather=gather)
    return _differ(there, kv) or _differ(staged, staging)


def _vectors(num_vectors: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Random vectors of all magnitudes, some zero, some with an infinity or a NaN."""
    vectors = torch.randn(num_vectors, head_dim) * torch.logspace(-6, 4, num_vectors)[:, None]
    vectors[::17], vectors[1::19, 0], vectors[2::23, -1] = 0.0, torch.inf, torch.nan
    return vectors.to(dtype)


def _pairs() -> tuple[Tensor, Tensor]:
    return torch.randperm(NUM_BLOCKS)[:NUM_PAIRS], torch.randperm(NUM_ROWS)[:NUM_PAIRS]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _differ(there: Tensor, here: Tensor) -> str:
    return "" if torch.equal(there.cpu().view(torch.uint8), here.view(torch.uint8)) else "bytes differ"
