"""`kv_write` and `block_copy` in the interpreter, bit for bit; offsets beyond 32 bits for all kernels."""

import math
import mmap
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention_rig import Case, Inputs, kernel_error_bound, make_inputs
from kvtier_kernels import (
    block_copy_reference,
    kv_write_reference,
    paged_attention_reference,
    part_copy_reference,
)
from kvtier_kernels.attention.paged_decode import paged_decode
from kvtier_kernels.attention.prefix_prefill import prefix_prefill
from kvtier_kernels.copies.block_copy import block_copy
from kvtier_kernels.copies.part_copy import Parts, part_copy
from kvtier_kernels.writes.slot_write import write_slots
from memory_rig import sparse

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DTYPE_IDS = ["float32", "bfloat16", "float16"]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bits: NaNs of all payloads, infinities, subnormals."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 24), (8, 128), (1, 1), (40, 128)])
@pytest.mark.parametrize("num_tokens", [0, 1, 13])
def test_kv_write_writes_these_tokens_and_nothing_else(
    num_tokens: int, heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    num_blocks, tokens_per_block = 4, 7
    fresh = random_bits((num_blocks, 3, 2, tokens_per_block, heads, head_dim), dtype)
    written, expected = fresh.clone(), fresh.clone()
    places = torch.randperm(num_blocks * tokens_per_block, generator=torch.Generator().manual_seed(3))[:num_tokens]
    block_ids, offsets = places // tokens_per_block, (places % tokens_per_block).int()
    # Rows of query, key and value side by side, as a fused projection leaves them.
    fused = random_bits((num_tokens, 2 + 2 * heads, head_dim), dtype, seed=1)
    key, value = fused[:, 2 : 2 + heads], fused[:, 2 + heads :]
    write_slots(written[:, 1], key, value, block_ids, offsets)
    # As integers: torch keeps no promise about the payload of a NaN.
    as_int = torch.int32 if dtype.itemsize == 4 else torch.int16
    kv_write_reference(expected[:, 1].view(as_int), key.view(as_int), value.view(as_int), block_ids, offsets)
    assert torch.equal(bits(written), bits(expected))


def test_kv_write_leaves_out_places_that_do_not_exist() -> None:
    fresh = random_bits((4, 2, 7, 1, 16), torch.float32)
    written = fresh.clone()
    rows = torch.ones(4, 1, 16)
    # Places before, behind and beside the KV: the middle of `guarded`, so that a write there would be seen.
    guarded = torch.zeros(12, 2, 7, 1, 16)
    guarded[4:8] = written
    block_ids, offsets = torch.tensor([-1, 4, 0, 2]), torch.tensor([0, 0, 7, -1])
    write_slots(guarded[4:8], rows, rows, block_ids, offsets)
    assert torch.equal(bits(guarded[4:8]), bits(fresh))
    assert guarded[:4].eq(0).all()
    assert guarded[8:].eq(0).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.int64])
@pytest.mark.parametrize("elements", [1, 3, 16, 257, 4096, 20_000])
def test_block_copy_gathers_and_scatters_bit_for_bit(elements: int, dtype: torch.dtype) -> None:
    blocks, staging = random_bits((9, elements), dtype), random_bits((5, elements), dtype, seed=1)
    block_ids, rows = torch.tensor([8, 0, 3]), torch.tensor([1, 4, 0])
    expected = staging.clone()
    block_copy_reference(blocks, block_ids, expected, rows)
    block_copy(blocks, block_ids, staging, rows)
    assert torch.equal(bits(staging), bits(expected))

    back = random_bits((9, elements), dtype, seed=2)
    expected = back.clone()
    block_copy_reference(staging, rows, expected, block_ids.flip(0).contiguous())
    block_copy(staging, rows.int(), back, block_ids.flip(0).int().contiguous())
    assert torch.equal(bits(back), bits(expected))


@pytest.mark.parametrize("start", [0, 1, 2, 4, 8, 16])
@pytest.mark.parametrize("row_bytes", [48, 50, 51])
def test_block_copy_takes_any_alignment(start: int, row_bytes: int) -> None:
    """Rows that start anywhere and lie apart by anything; what lies between them stays."""
    source = random_bits((start + 6 * 64,), torch.uint8)[start:].view(6, 64)[:, :row_bytes]
    memory = random_bits((8 * 80,), torch.uint8, seed=1)
    expected = memory.clone()
    from_rows, to_rows = torch.tensor([5, 2, 0]), torch.tensor([7, 0, 3])
    block_copy_reference(source, from_rows, expected.view(8, 80)[:, :row_bytes], to_rows)
    block_copy(source, from_rows, memory.view(8, 80)[:, :row_bytes], to_rows)
    assert torch.equal(memory, expected)


def test_block_copy_leaves_out_rows_that_do_not_exist() -> None:
    memory = random_bits((9, 64), torch.uint8)
    source = random_bits((4, 64), torch.uint8, seed=1)
    expected = memory.clone()
    expected[4] = source[2]
    block_copy(source, torch.tensor([-1, 4, 2, 0, 0]), memory[3:6], torch.tensor([0, 0, 1, -1, 3]))
    assert torch.equal(memory, expected)


def test_block_copy_of_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    memory = torch.ones(3, 8)
    block_copy(memory, none, memory.clone(), none)


@pytest.mark.parametrize("part_bytes", [1, 48, 50, 4096, 20_000])
@pytest.mark.parametrize("block_first", [True, False])
def test_parts_are_gathered_and_scattered(part_bytes: int, block_first: bool) -> None:
    """A page per layer: layers one after the other, or all layers of a block."""
    shape = (9, 5, part_bytes) if block_first else (5, 9, part_bytes)
    ours, theirs = (random_bits(shape, torch.uint8).unbind(1 if block_first else 0) for _ in range(2))
    staging, expected = (random_bits((6, 5 * part_bytes), torch.uint8, seed=1) for _ in range(2))
    rows = torch.tensor([1, 5, 0])
    for gather, block_ids in ((True, torch.tensor([8, 0, 3])), (False, torch.tensor([2, 3, 7]))):
        part_copy(Parts.of(ours), block_ids, staging, rows.int(), gather=gather)
        part_copy_reference(theirs, block_ids, expected, rows, gather=gather)
        assert torch.equal(staging, expected)
        assert all(torch.equal(mine, reference) for mine, reference in zip(ours, theirs, strict=True))


def test_parts_may_lie_in_memory_of_their_own() -> None:
    """Engines allocate layer by layer; offsets go up and down."""
    ours = [random_bits((7, 100), torch.uint8, seed=seed)[:, :64] for seed in (3, 1, 2)]
    theirs = [part.clone() for part in ours]
    staging, expected = torch.zeros(4, 192, dtype=torch.uint8), torch.zeros(4, 192, dtype=torch.uint8)
    block_ids, rows = torch.tensor([6, -1, 2, 7, 0]), torch.tensor([0, 1, 3, 2, -1])
    part_copy(Parts.of(ours), block_ids, staging, rows, gather=True)
    part_copy_reference(theirs, torch.tensor([6, 2]), expected, torch.tensor([0, 3]), gather=True)
    assert torch.equal(staging, expected), "pairs that do not exist are left out"
    part_copy(Parts.of(ours), block_ids[:0], staging, rows[:0], gather=True)


def test_parts_that_cannot_be_are_refused() -> None:
    part, index = torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    for other in (part[:, :8], part[:2], part.view(torch.int32), part.to("meta")):
        with pytest.raises(ValueError, match="must be equal"):
            Parts.of([part, other])
    with pytest.raises(ValueError, match="staging has rows of 16"):
        part_copy(Parts.of([part, part]), index, part, index, gather=True)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


FAR_ELEMENTS = 3 * 2**29
"""Between blocks: the third begins beyond 2**31 elements. 32-bit arithmetic would wrap, or raise in our interpreter."""


def far_apart(inputs: Inputs) -> Inputs:
    """The same, with the blocks moved far apart."""
    num_blocks, _, tokens, heads, head_dim = inputs.kv_layer.shape
    row = heads * head_dim
    memory = sparse((num_blocks - 1) * FAR_ELEMENTS * 2 + 2 * tokens * row * 2).view(torch.bfloat16)
    layer = memory.as_strided(inputs.kv_layer.shape, (FAR_ELEMENTS, tokens * row, row, head_dim, 1))
    layer.copy_(inputs.kv_layer)
    return replace(inputs, kv_layer=layer)


def test_blocks_may_lie_beyond_32_bits() -> None:
    before = resident_bytes()
    for case in (Case((5,), (60,)), Case((1, 1), (33, 20))):
        near = make_inputs(case, torch.bfloat16)
        far = far_apart(near)
        assert int(near.block_tables.max()) * FAR_ELEMENTS > 2**32
        out = prefix_prefill(*far.args(0.125))
        assert torch.equal(out, prefix_prefill(*near.args(0.125)))
        expected = paged_attention_reference(*near.args(0.125))
        assert (out.float() - expected).abs().max().item() <= kernel_error_bound(near, 0.125)
    assert torch.equal(paged_decode(*far.args(0.125)), paged_decode(*near.args(0.125)))

    layer = far.kv_layer
    last = torch.tensor([layer.size(0) - 1])
    rows = random_bits((1, *layer.shape[3:]), torch.bfloat16)
    write_slots(layer, rows, rows, last, torch.tensor([11]))
    assert torch.equal(bits(layer[-1, 1, 11]), bits(rows[0]))
    assert resident_bytes() - before < 2**30


@pytest.mark.parametrize("row_bytes", [4096, 4097])
def test_copied_rows_may_lie_beyond_32_bits(row_bytes: int) -> None:
    """Beyond 2**31 words of 4 bytes, and of 1 byte."""
    stride = 3 * 2**30 if row_bytes % 2 == 0 else 3 * 2**30 + 1
    memory = sparse(4 * stride + row_bytes)
    rows = memory.as_strided((5, row_bytes), (stride, 1))
    staging = random_bits((2, row_bytes), torch.uint8)
    block_copy(staging, torch.tensor([1, 0]), rows, torch.tensor([4, 3]))
    assert torch.equal(rows[4], staging[1])
    assert torch.equal(rows[3], staging[0])
    back = torch.zeros_like(staging)
    block_copy(rows, torch.tensor([4, 3]), back, torch.tensor([1, 0]))
    assert torch.equal(back, staging)
    assert resident_bytes() < 4 * 2**30
