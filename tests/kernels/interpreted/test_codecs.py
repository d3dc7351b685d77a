"""Lossy codecs on the way between paged KV and staging: bit for bit as their references."""

import math
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.copies.part_copy import Parts
from kvtier_kernels.copies.quantised_copy import quantised_copy
from kvtier_kernels.quantise_reference import (
    dequantise_reference,
    quantise_reference,
    quantised_copy_reference,
    stored_reference,
)
from kvtier_kernels.quantising import dequantise, quantise
from kvtier_kernels.records import LossyCodec, RecordLayout
from memory_rig import random_bytes, sparse

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""numpy's, of arithmetic with NaN and infinity, which is meant here."""

CODECS = list(LossyCodec)
DTYPES = [torch.bfloat16, torch.float16]
DTYPE_IDS = ["bfloat16", "float16"]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors_of_all_kinds(num_vectors: int, head_dim: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Ordinary ones, zeros, one outlier, huge, tiny, subnormal, infinite, NaN, and random bits."""
    vectors = torch.randn(num_vectors, head_dim, generator=generator(seed))
    vectors *= torch.logspace(-3, 3, num_vectors)[:, None]
    vectors = vectors.to(dtype)
    least, most = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    place = min(3, head_dim - 1)
    special: list[Callable[[Tensor], Any]] = [
        lambda vector: vector.zero_(),
        lambda vector: vector.zero_().neg_(),
        lambda vector: vector[place].fill_(1000.0),
        lambda vector: vector.fill_(most),
        lambda vector: vector.copy_(least * torch.randn(head_dim, generator=generator(seed + 1))),
        lambda vector: vector.view(torch.int16).fill_(1),
        lambda vector: vector[place].fill_(-math.inf),
        lambda vector: vector[place].fill_(math.nan),
        # Ties: with 127 as the largest, scale 1, every half is one.
        lambda vector: vector.copy_(torch.arange(head_dim) % 17 - 8.5)[place].fill_(127.0),
    ]
    for change, vector in zip(special, vectors, strict=False):
        change(vector)
    vectors[len(special) :: 4].copy_(random_bytes(len(vectors[len(special) :: 4]), 2 * head_dim).view(dtype))
    return vectors


def pages(num_parts: int, layout: RecordLayout, seed: int = 0) -> tuple[Tensor, ...]:
    """uint8 `[9, page_bytes]` each, all parts of a block side by side."""
    count = 9 * num_parts * layout.num_vectors
    vectors = vectors_of_all_kinds(count, layout.head_dim, layout.dtype, seed)
    shuffled = vectors[torch.randperm(count, generator=generator(seed))]
    return shuffled.view(torch.uint8).view(9, num_parts, layout.page_bytes).unbind(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("head_dim", "num_vectors", "by_part", "max_programs"),
    [(128, 33, True, None), (80, 7, False, 3), (1, 3, True, 1), (257, 5, False, None), (64, 90, False, 2)],
)
def test_pages_are_quantised_and_restored(
    head_dim: int, num_vectors: int, by_part: bool, max_programs: int | None, codec: LossyCodec, dtype: torch.dtype
) -> None:
    layout = RecordLayout(codec, dtype, head_dim, num_vectors)
    ours, theirs = pages(3, layout), pages(3, layout)
    shape = (3, 5, layout.record_bytes) if by_part else (5, 3 * layout.record_bytes)
    staging, expected = (random_bytes(*shape, seed=1) for _ in range(2))
    # The last two pairs name a row and a block that do not exist.
    rows = torch.tensor([1, 4, 0, 5, 2])
    for gather, block_ids in ((True, torch.tensor([8, 0, 3, 2, -1])), (False, torch.tensor([2, 3, 7, 1, 9]))):
        quantised_copy(
            Parts.of(ours), block_ids, staging, rows.int(),
            layout=layout, gather=gather, max_programs=max_programs,
        )  # fmt: skip
        quantised_copy_reference(theirs, block_ids[:3], expected, rows[:3], layout=layout, gather=gather)
        assert torch.equal(staging, expected)
        assert all(torch.equal(mine, reference) for mine, reference in zip(ours, theirs, strict=True))


@triton.jit
def _quantise_kernel(source, target, scales, FP8: tl.constexpr, VECTORS: tl.constexpr, COLUMNS: tl.constexpr):
    vector = tl.arange(0, VECTORS)
    index = vector[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(target + index, quantise(tl.load(source + index), tl.load(scales + vector), FP8))


@triton.jit
def _dequantise_kernel(source, target, scales, FP8: tl.constexpr, VECTORS: tl.constexpr, COLUMNS: tl.constexpr):
    vector = tl.arange(0, VECTORS)
    index = vector[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(target + index, dequantise(tl.load(source + index), tl.load(scales + vector), FP8, tl.bfloat16))


@pytest.mark.parametrize("codec", CODECS)
def test_every_kind_of_number_is_rounded_as_torch_does(codec: LossyCodec) -> None:
    """All bits of bfloat16, every value between two neighbours of e4m3 or int8 and a little beside it."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(codec.stored_dtype).float()
    numbers = codes[codes.isfinite()].sort().values
    ties = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(ties, torch.tensor(end)) for end in (-math.inf, math.inf)]
    values = torch.cat([every, numbers, ties, *beside])
    if codec is LossyCodec.INT8:
        values = values[values.isfinite()]
    values = torch.cat([values, values.new_zeros(-len(values) % 4096)]).view(-1, 4096)
    for scale in (1.0, 0.37):
        for rows in values.split(16):
            scales, stored = torch.full((16,), scale), torch.full((16, 4096), 99, dtype=torch.int8)
            padded = torch.zeros(16, 4096)
            padded[: len(rows)] = rows
            _quantise_kernel[(1,)](padded, stored, scales, FP8=codec is LossyCodec.FP8, VECTORS=16, COLUMNS=4096)
            assert torch.equal(stored, stored_reference(padded / scale, codec.stored_dtype).view(torch.int8))


@pytest.mark.parametrize("codec", CODECS)
def test_every_byte_is_restored_as_torch_does(codec: LossyCodec) -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.int8).repeat(8, 1)
    scales = torch.tensor([1.0, 0.37, 1e-40, 3e38, 2.0**-130, 127.0, math.inf, 1e-5])
    restored = torch.zeros(8, 256, dtype=torch.int16)
    _dequantise_kernel[(1,)](every, restored, scales, FP8=codec is LossyCodec.FP8, VECTORS=8, COLUMNS=256)
    expected = dequantise_reference(every.view(codec.stored_dtype), scales, torch.bfloat16)
    is_nan = expected.isnan()
    assert torch.equal(restored.view(torch.bfloat16).isnan(), is_nan)
    assert torch.equal(restored[~is_nan], expected.view(torch.int16)[~is_nan])


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("codec", CODECS)
def test_restored_values_are_as_near_as_the_codec_allows(codec: LossyCodec, dtype: torch.dtype) -> None:
    """Half a step of the codec, and half a unit of the dtype: nothing is quantised twice or scaled wrongly."""
    vectors = torch.randn(200, 64, generator=generator(5)).mul(torch.logspace(-2, 2, 200)[:, None]).to(dtype)
    stored, scales = quantise_reference(vectors, codec.stored_dtype)
    restored = dequantise_reference(stored, scales, dtype).double()
    exact, peak = vectors.double(), vectors.double().abs().amax(-1, keepdim=True)
    step = peak / 127 if codec is LossyCodec.INT8 else exact.abs() * 2**-3 + peak / 448 * 2**-9
    bound = step / 2 + exact.abs() * torch.finfo(dtype).eps * 1.1 + peak * 1e-6
    assert ((restored - exact).abs() <= bound).all()


def test_layout_of_a_record() -> None:
    """Written down twice: what is on disks is read by it."""
    layout = RecordLayout(LossyCodec.INT8, torch.bfloat16, head_dim=5, num_vectors=3)
    assert (layout.page_bytes, layout.values_bytes, layout.scales_start, layout.record_bytes) == (30, 15, 16, 32)
    page = torch.tensor([[127, -127, 0.5, 1.5, 2.5], [0, 0, 0, 0, 0], [254, 2, -2, 0, 1]], dtype=torch.bfloat16)
    record = torch.full((1, 32), 0xAA, dtype=torch.uint8)
    index = torch.zeros(1, dtype=torch.int64)
    quantised_copy(Parts.of([page.view(torch.uint8).view(1, 30)]), index, record, index, layout=layout, gather=True)
    stored = [127, 129, 0, 2, 2, 0, 0, 0, 0, 0, 127, 1, 255, 0, 0]
    one, two = [0, 0, 0x80, 0x3F], [0, 0, 0, 0x40]
    assert record[0].tolist() == [*stored, 0, *one, *one, *two, 0, 0, 0, 0]
    assert RecordLayout(LossyCodec.FP8, torch.float16, 128, 256).record_bytes == 256 * 132
    assert list(LossyCodec) == ["int8_per_head", "fp8_e4m3_per_head"]
    assert len({msgpack.packb(name) for name in (*LossyCodec, "int8_per_head")}) == 2, (
        "a namespace packs it as a string"
    )


def test_pages_and_records_may_lie_beyond_32_bits() -> None:
    far, layout = 3 * 2**30, RecordLayout(LossyCodec.INT8, torch.float16, 16, 64)
    page = vectors_of_all_kinds(64, 16, torch.float16).view(torch.uint8).view(2048)
    parts = [sparse(2 * far + 2048).as_strided((3, 2048), (far, 1)) for _ in range(2)]
    from_block, to_block, row = torch.tensor([2]), torch.tensor([1]), torch.tensor([1])
    for part in parts:
        part[2] = page
    staging = sparse(3 * far + 2048).as_strided((2, 2, 2048), (2 * far, far, 1))
    records = staging[:, :, : layout.record_bytes]
    quantised_copy(Parts.of(parts), from_block, records, row, layout=layout, gather=True)
    quantised_copy(Parts.of(parts), to_block, records, row, layout=layout, gather=False)
    stored, scales = quantise_reference(page.view(torch.float16).view(64, 16), torch.int8)
    restored = dequantise_reference(stored, scales, torch.float16).view(torch.uint8).view(2048)
    assert all(torch.equal(part[1], restored) for part in parts)


def test_copies_of_nothing() -> None:
    layout, none = RecordLayout(LossyCodec.INT8, torch.bfloat16, 8, 2), torch.zeros(0, dtype=torch.int64)
    parts, staging = Parts.of(pages(2, layout)), random_bytes(2, 64)
    before = staging.clone()
    quantised_copy(parts, none, staging, none, layout=layout, gather=True)
    assert torch.equal(staging, before)


def test_what_does_not_fit_is_refused() -> None:
    layout, index = RecordLayout(LossyCodec.INT8, torch.bfloat16, 8, 2), torch.zeros(2, dtype=torch.int64)
    parts, staging, memory = Parts.of(pages(3, layout)), random_bytes(3, 4, 32), random_bytes(2000)
    odd = Parts.of([memory[1 : 1 + 9 * 32].view(9, 32)] * 3)
    other = RecordLayout(LossyCodec.INT8, torch.bfloat16, 8, 3)
    for words, changed in (
        (r"parts of 32 bytes: .* needs 48", {"layout": other}),
        (r"staging .* needs \[3, rows, 32\]", {"staging": staging[:2]}),
        ("staging has rows of 64", {"staging": random_bytes(4, 64)}),
        ("staging is on meta", {"staging": staging.to("meta")}),
        ("multiples of 16 bytes", {"staging": memory[8 : 8 + 3 * 4 * 32].view(3, 4, 32)}),
        ("even addresses", {"parts": odd}),
        ("block_ids .* int32 or int64", {"block_ids": index.float()}),
        (r"staging_rows .* needs shape \[2\]", {"staging_rows": index[:1]}),
        ("max_programs is 0", {"max_programs": 0}),
    ):
        good = {"parts": parts, "block_ids": index, "staging": staging, "staging_rows": index, "layout": layout}
        with pytest.raises(ValueError, match=words):
            quantised_copy(**(good | changed), gather=True)  # type: ignore[arg-type]
    for words, wrong in (("needs bfloat16", {"dtype": torch.float32}), ("at least 1", {"head_dim": 0})):
        with pytest.raises(ValueError, match=words):
            RecordLayout(**({"codec": LossyCodec.FP8, "dtype": torch.float16, "head_dim": 8, "num_vectors": 1} | wrong))  # type: ignore[arg-type]
