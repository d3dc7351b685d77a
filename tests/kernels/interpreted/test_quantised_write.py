"""`kv_write` into quantised KV in the interpreter, bit for bit."""

import math

import pytest
import torch
from torch import Tensor

from kvtier_kernels import kv_write_reference
from kvtier_kernels.writes.kv_write import kv_write
from kvtier_kernels.writes.slot_quantise import quantise_slots
from memory_rig import random_bytes, sparse

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""numpy's, of arithmetic with NaN and infinity, which is meant here."""

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DTYPE_IDS = ["float32", "bfloat16", "float16"]
KINDS = {"int8": (torch.int8, "own"), "fp8": (torch.float8_e4m3fn, "own")} | {
    f"fp8 {scales}": (torch.float8_e4m3fn, scales) for scales in ("given", "none")
}
NUM_BLOCKS, TOKENS_PER_BLOCK = 4, 7


def quantised_kv(dtype: torch.dtype, scales: str, heads: int, head_dim: int) -> tuple[Tensor, Tensor | None]:
    """All layers of the KV, any bytes, and all their scales, any floats."""
    shape = (NUM_BLOCKS, 3, 2, TOKENS_PER_BLOCK, heads)
    kv = random_bytes(*shape, head_dim).view(dtype)
    if scales == "own":
        return kv, random_bytes(*shape, 4, seed=1).view(torch.float32).view(shape)
    return kv, torch.tensor([0.37, 1.7]) if scales == "given" else None


def layer_of(scales: Tensor | None) -> Tensor | None:
    return scales[:, 1] if scales is not None and scales.dim() == 5 else scales


def rows_of_all_kinds(num_tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values as a fused projection leaves them: side by side with queries. Some are zero, infinite, NaN."""
    generator = torch.Generator().manual_seed(5)
    fused = torch.randn(num_tokens, 2 + 2 * heads, head_dim, generator=generator)
    fused *= torch.logspace(-4, 4, num_tokens)[:, None, None]
    fused[-1:, 2] = 0.0
    fused[:1, 2, 0], fused[1:2, 2, 0], fused[2:3, -1, -1] = math.inf, math.nan, -math.inf
    fused = fused.to(dtype)
    return fused[:, 2 : 2 + heads], fused[:, 2 + heads :]


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_tokens", "heads", "head_dim"), [(13, 3, 24), (5, 8, 128), (2, 1, 1), (3, 40, 128)])
def test_these_vectors_and_their_scales_and_nothing_else(
    num_tokens: int, heads: int, head_dim: int, kind: str, dtype: torch.dtype
) -> None:
    kv, scales = quantised_kv(*KINDS[kind], heads, head_dim)
    expected_kv, expected_scales = kv.clone(), None if scales is None else scales.clone()
    places = torch.randperm(NUM_BLOCKS * TOKENS_PER_BLOCK, generator=torch.Generator().manual_seed(3))[:num_tokens]
    block_ids, offsets = places // TOKENS_PER_BLOCK, (places % TOKENS_PER_BLOCK).int()
    key, value = rows_of_all_kinds(num_tokens, heads, head_dim, dtype)
    quantise_slots(kv[:, 1], key, value, block_ids, offsets, layer_of(scales))
    kv_write_reference(expected_kv[:, 1], key, value, block_ids, offsets, kv_scales=layer_of(expected_scales))
    assert torch.equal(kv.view(torch.uint8), expected_kv.view(torch.uint8))
    if scales is not None and expected_scales is not None:
        assert torch.equal(scales.view(torch.int32), expected_scales.view(torch.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_places_that_do_not_exist_are_left_out(kind: str) -> None:
    kv, scales = quantised_kv(*KINDS[kind], 2, 16)
    fresh, fresh_scales = kv.clone(), None if scales is None else scales.clone()
    layer, layer_scales = kv[1:3, 1], layer_of(scales)
    if layer_scales is not None and layer_scales.dim() == 4:
        layer_scales = layer_scales[1:3]
    rows = torch.ones(4, 2, 16)
    block_ids, offsets = torch.tensor([-1, 2, 0, 1]), torch.tensor([0, 0, TOKENS_PER_BLOCK, -1])
    quantise_slots(layer, rows, rows, block_ids, offsets, layer_scales)
    quantise_slots(layer, rows[:0], rows[:0], block_ids[:0], offsets[:0], layer_scales)
    assert torch.equal(kv.view(torch.uint8), fresh.view(torch.uint8))
    assert scales is None or torch.equal(scales.view(torch.int32), fresh_scales.view(torch.int32))  # type: ignore[union-attr]


def test_blocks_and_their_scales_may_lie_beyond_32_bits() -> None:
    """Strides that two blocks need not fill: of the first 3 GiB nothing is touched."""
    far = sparse(3 * 2**30 + 64).view(torch.int8)
    layer = far.as_strided((2, 2, 1, 1, 16), (3 * 2**30, 16, 16, 16, 1))
    scales = far.view(torch.float32).as_strided((2, 2, 1, 1), (3 * 2**28 + 8, 1, 1, 1))
    key, index = torch.arange(16.0).view(1, 1, 16), torch.ones(1, dtype=torch.int64)
    quantise_slots(layer, key, -key, index, index - 1, scales)
    stored = (key[0, 0] * 127 / 15).round().to(torch.int8)
    assert torch.equal(layer[1, :, 0, 0], torch.stack([stored, -stored]))
    assert torch.equal(scales[1].flatten(), torch.full((2,), 15.0) / 127)


def test_what_does_not_fit_is_refused() -> None:
    layer, scales = torch.zeros(2, 2, 4, 3, 8, dtype=torch.int8), torch.zeros(2, 2, 4, 3)
    rows, index = torch.zeros(5, 3, 8), torch.arange(5)
    for words, changed in (
        ("kv_scales is None: int8 needs", {"kv_scales": None}),
        ("kv_scales .* needs float32", {"kv_scales": scales.double()}),
        ("kv_scales .* needs contiguous blocks", {"kv_scales": scales[:1]}),
        ("kv_scales .* needs contiguous blocks", {"kv_scales": scales[0, :, 0, 0].clone()}),
        ("kv_scales given: .*float32 has none", {"kv_layer": layer.float()}),
        ("key .* needs float32, bfloat16 or float16", {"key": rows.to(torch.int8)}),
        ("key is .*bfloat16, value .*float32", {"key": rows.bfloat16()}),
        (r"key .* needs \[T, heads, D\]", {"key": rows[..., :4]}),
    ):
        good = {"kv_layer": layer, "key": rows, "value": rows, "block_ids": index, "offsets": index}
        with pytest.raises(ValueError, match=words):
            kv_write(**(good | {"kv_scales": scales} | changed))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kv_layer is on meta"):
        quantise_slots(layer.to("meta"), rows, rows, index, index, scales)
