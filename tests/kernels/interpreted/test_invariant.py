"""Kernels whose bits of a token depend on no other token, alone and in the engine's model: a GPU is the interpreter."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_rig import Case, Inputs, kernel_error_bound, make_inputs, quantised, scored, windowed
from kvtier_bench.gpu.measuring.models import random_weights
from kvtier_engine.model import llama
from kvtier_engine.model.decode_graphs import GraphedModel
from kvtier_engine.model.llama import Chunk, LlamaModel
from kvtier_engine.model.paged_kv import allocate_kv
from kvtier_engine.model.triton_products import TritonProducts
from kvtier_kernels import paged_attention_reference
from kvtier_kernels.attention import layer_attention
from kvtier_kernels.attention.paged_attention import attend_with_triton
from kvtier_kernels.attention.prefix_prefill import prefix_prefill
from kvtier_kernels.invariant.linear import ProductTile, invariant_linear, product_tile
from kvtier_kernels.invariant.rms_norm import MAX_WIDTH, invariant_rms_norm
from tiny_model import CONFIG

LENGTH, SCALE = 70, 0.2
"""Keys, more than a tile of them, of a sequence of which some queries are new."""
SHAPE = replace(CONFIG, num_hidden_layers=1)


def of_lengths(*spans: tuple[int, int]) -> Case:
    """Queries `first` to `stop` of each span, each a sequence of its own. All keys are those of the longest."""
    queries, keys = tuple(stop - first for first, stop in spans), tuple(stop for _, stop in spans)
    return Case(queries, keys, tokens_per_block=8, num_heads=4, num_kv_heads=2, head_dim=16)


def variants(inputs: Inputs, variant: str) -> Inputs:
    if variant == "soft cap and window":
        return scored(windowed(inputs, 19), "soft_cap", "sinks")
    if variant == "int8":
        return quantised(inputs, torch.int8, per_key=True)
    return inputs


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        ("plain", torch.float32),
        ("plain", torch.bfloat16),
        ("soft cap and window", torch.bfloat16),
        ("int8", torch.float32),
    ],
)
def test_a_query_has_the_same_bits_beside_any_others(variant: str, dtype: torch.dtype) -> None:
    """All queries at once; then some of them, single ones, several sequences in a batch; each right as well."""
    whole = variants(make_inputs(of_lengths((0, LENGTH)), dtype), variant)
    lse = torch.empty(whole.query.shape[:2])
    out = attend_with_triton(*whole.args(SCALE, invariant=True), lse)
    expected = paged_attention_reference(*whole.args(SCALE))
    assert (out.float() - expected).abs().max().item() <= kernel_error_bound(whole, SCALE)
    for spans in (((0, 1),), ((5, 68),), ((66, 67),), ((LENGTH - 1, LENGTH), (20, 21), (40, 44)), ((0, 33), (64, 70))):
        of = torch.cat([torch.arange(first, stop) for first, stop in spans])
        starts = torch.tensor([0, *itertools.accumulate(stop - first for first, stop in spans)])
        some = replace(
            whole,
            query=whole.query[of],
            block_tables=whole.block_tables.expand(len(spans), -1).contiguous(),
            query_starts=starts,
            seq_lens=torch.tensor([stop for _, stop in spans]),
        )
        some_lse = torch.empty(some.query.shape[:2])
        assert torch.equal(attend_with_triton(*some.args(SCALE, invariant=True), some_lse), out[of]), spans
        assert torch.equal(some_lse, lse[of]), spans


def test_keys_of_an_invariant_batch_are_not_cut() -> None:
    inputs = make_inputs(of_lengths((0, 5)), torch.float32)
    with pytest.raises(ValueError, match="num_splits is 2: keys of an invariant batch are not cut"):
        prefix_prefill(*inputs.args(SCALE, invariant=True), num_splits=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_norms_and_products_have_the_same_bits_beside_any_others(dtype: torch.dtype) -> None:
    """`selfcheck` compares them with plain torch. Heads of a fused projection, a weight for each; Gemma's weights."""
    generator = torch.Generator().manual_seed(1)
    fused = torch.randn((40, 7, 24), generator=generator).to(dtype)[:, :5]
    weight, wide_weight = torch.randn((5, 24), generator=generator).to(dtype), torch.randn(24, generator=generator)
    for rows, factor in ((fused, weight), (fused[:, 0].contiguous(), wide_weight)):
        normed = invariant_rms_norm(rows, factor, 1e-6)
        expected = torch.nn.functional.rms_norm(rows.double(), (24,), eps=1e-6) * factor.double()
        assert (normed.double() - expected).abs().max().item() <= 2.5 * torch.finfo(dtype).eps * expected.abs().max()
        for some in (slice(0, 1), slice(20, 25)):
            assert torch.equal(invariant_rms_norm(rows[some], factor, 1e-6), normed[some])
    # Rows whose sums cancel: what is left shows the order of each.
    half, other = (torch.randn((count, 37), generator=generator) for count in (150, 40))
    rows, weight = torch.cat((half, half), 1).to(dtype), torch.cat((other, -other), 1).to(dtype)
    whole = invariant_linear(rows, weight)
    assert 0 < whole.abs().max() < 1e-2
    for some in (slice(0, 1), slice(2, 33), slice(140, 150)):
        assert torch.equal(invariant_linear(rows[some], weight), whole[some])


def test_wrong_arguments_are_refused() -> None:
    rows, weight = torch.empty(3, 8), torch.empty(5, 8)
    for wrong, message in (
        (lambda: invariant_linear(rows.t(), weight), "rows of shape"),
        (lambda: invariant_linear(rows, torch.empty(5, 9)), r"rows of shape .* needs contiguous \[..., 9\]"),
        (lambda: invariant_linear(rows, torch.empty(8, 5).t()), "weight of shape"),
        (lambda: invariant_linear(rows, weight.half()), "needs one float dtype and device"),
        (lambda: invariant_rms_norm(rows, torch.empty(7), 0.1), "weight of shape"),
        (lambda: invariant_rms_norm(rows.t(), torch.empty(3), 0.1), "rows of shape"),
        (lambda: invariant_rms_norm(torch.empty(1, MAX_WIDTH + 1), weight, 0.1), "at most 65,536"),
        (lambda: invariant_rms_norm(rows, torch.empty(8).half(), 0.1), "needs one float dtype"),
        (lambda: invariant_rms_norm(rows, torch.empty(8, device="meta"), 0.1), "weight on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    assert invariant_linear(rows[:0], weight).shape == (0, 5)
    assert invariant_rms_norm(rows[:0], weight[0], 0.1).shape == (0, 8)
    assert product_tile(2, (8, 6)) == ProductTile(128, 128, 32, 8, 4)


class Again:
    """A recorder whose graphs run their function again."""

    def record(self, run: Any) -> tuple[Any, Tensor]:
        result = run()

        class Replay:
            def replay(self) -> None:
                result.copy_(run())

        return Replay(), result


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> LlamaModel:
    """As on CUDA, in bfloat16, whose `silu` has the same bits in every lane of the CPU, too."""
    monkeypatch.setattr(llama, "step_attention", layer_attention.step_with_triton)
    monkeypatch.setattr(llama, "_invariant", lambda config, _weights: TritonProducts(gelu=config.is_gemma))
    return LlamaModel(SHAPE, random_weights(SHAPE, torch.bfloat16, torch.device("cpu")), batch_invariant=True)


def computed(
    model: LlamaModel, tokens: Sequence[int], cuts: Sequence[int], beside: int, graphs: bool = False
) -> tuple[dict[int, Tensor], Tensor]:
    """Logits after each cut and the sequence's KV, in steps with so many other sequences before it in the batch."""
    kv = allocate_kv(SHAPE, 40, 16, torch.bfloat16)
    kv.tensor.fill_(torch.nan)
    forward: Any = model.forward
    if graphs:
        forward = GraphedModel(model, kv, Again(), max_seqs=2, max_seq_len=len(tokens)).forward
    num_blocks, logits = -(-len(tokens) // 16), {}
    for start, stop in itertools.pairwise(cuts):
        others = [Chunk([7] * (1 if graphs else 1 + 5 * row), 0, [num_blocks + row]) for row in range(beside)]
        logits[stop] = forward([*others, Chunk(tokens[start:stop], start, range(num_blocks))], kv)[-1].clone()
    return logits, kv.tensor[:num_blocks]


def test_a_model_has_the_same_bits_cold_cached_chunked_and_batched(model: LlamaModel) -> None:
    """Chunks of other sizes, decodes, other sequences in the batch, decodes that are replayed."""
    tokens = random.Random(5).choices(range(SHAPE.vocab_size), k=LENGTH)
    expected, expected_kv = computed(model, tokens, (0, LENGTH), 0)
    single = (*range(66, LENGTH), LENGTH)
    for cuts, beside, graphs in (
        ((0, 1, 40, *single), 0, False),
        ((0, 33, *single), 2, False),
        ((0, *single), 2, True),
    ):
        logits, kv = computed(model, tokens, cuts, beside, graphs)
        assert torch.equal(logits[LENGTH], expected[LENGTH])
        written = ~expected_kv.isnan()
        assert torch.equal(kv[written], expected_kv[written])
        assert expected[LENGTH].isfinite().all()
