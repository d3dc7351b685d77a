"""A batch invariant model: the same bits, however a sequence is cut into chunks, and whatever is computed beside it."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_rig import EngineRig
from kvtier.config import parse_config
from kvtier.errors import ConfigError
from kvtier_bench.gpu.measuring.models import random_weights
from kvtier_engine.model import products
from kvtier_engine.model.fingerprint import arithmetic_fingerprint
from kvtier_engine.model.gates import invariantly_opened, opened
from kvtier_engine.model.llama import Chunk, LlamaModel
from kvtier_engine.model.model_config import ModelConfig
from kvtier_engine.model.paged_kv import allocate_kv, kv_namespace
from kvtier_engine.model.products import BASE, InvariantProducts
from kvtier_kernels import AttentionBatch, Scoring, paged_attention, paged_attention_reference
from kvtier_kernels.attention import attention_cpu_tiles, attention_cpu_trial
from tiny_model import CONFIG, tiny_model

Result = tuple[dict[int, Tensor], Tensor]
LENGTH = 330
"""Tokens: more than a tile of keys."""


SHAPE = replace(
    CONFIG,
    vocab_size=4096, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
)  # fmt: skip
"""Layers of the size of SmolLM2-135M's, of which the library computes some heights otherwise than others."""


@pytest.fixture(scope="module")
def medium() -> tuple[ModelConfig, LlamaModel]:
    weights = random_weights(SHAPE, torch.bfloat16, torch.device("cpu"))
    return SHAPE, LlamaModel(SHAPE, weights, batch_invariant=True)


def computed(model: LlamaModel, config: ModelConfig, tokens: Sequence[int], cuts: Sequence[int], beside: int) -> Result:
    """Logits after each cut, and the sequence's KV, in steps with so many other sequences before it in the batch."""
    dtype = model._weights.embedding.dtype
    kv = allocate_kv(config, 40, 16, dtype)
    kv.tensor.fill_(float("nan"))
    num_blocks, logits = -(-len(tokens) // 16), {}
    for start, stop in itertools.pairwise(cuts):
        others = [Chunk([7] * (1 + 5 * row), 0, [num_blocks + row]) for row in range(beside)]
        chunk = Chunk(tokens[start:stop], start, range(num_blocks))
        logits[stop] = model.forward([*others, chunk], kv)[-1].clone()
    return logits, kv.tensor[: len(tokens) // 16].clone()


def assert_equal(one: Result, other: Result) -> None:
    assert torch.equal(one[1], other[1])
    both = set(one[0]) & set(other[0])
    assert both
    assert all(torch.equal(one[0][stop], other[0][stop]) for stop in both)


@pytest.mark.parametrize(
    ("cuts", "beside"),
    [
        ((0, 1, 40, 41, 256, 257, 300), 0),
        ((0, 300), 3),
        ((0, 90, 300), 1),
    ],
)
def test_bits_are_those_of_one_pass(medium: tuple[ModelConfig, LlamaModel], cuts: tuple[int, ...], beside: int) -> None:
    """Chunks of other sizes, single tokens up to the end, and other sequences in the batch."""
    config, model = medium
    tokens = random.Random(5).choices(range(config.vocab_size), k=LENGTH)
    whole = computed(model, config, tokens, (0, 305, LENGTH), 0)
    assert_equal(whole, computed(model, config, tokens, (*cuts, *range(301, 307), LENGTH), beside))


def test_products_fall_back_to_one_size_where_no_other_is_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tiny_model()._weights
    monkeypatch.setattr(products, "_CANDIDATES", (BASE,))
    fixed = InvariantProducts(weights)
    rows = torch.randn((75, CONFIG.hidden_size), generator=torch.Generator().manual_seed(2))
    layer = weights.layers[0]
    for few in (1, 31, 32, 33):
        assert torch.equal(fixed.linear(rows[:few], layer.qkv), fixed.linear(rows, layer.qkv)[:few])
        alone, together = (fixed.gated(of, layer.gate_up, layer.down) for of in (rows[:few], rows))
        assert torch.equal(alone, together[:few])
    exact = rows.double() @ layer.qkv.double().t()
    assert (fixed.linear(rows, layer.qkv) - exact).abs().max() < 1e-4


def test_a_large_tile_is_used_unless_most_of_it_would_be_padding() -> None:
    tiles = [BASE, products.Tile(64, by_columns=True), products.Tile(256, by_columns=True), products.Tile(1024)]

    def sizes(num_left: int) -> list[int]:
        taken = []
        while num_left > 0:
            taken.append(products._next_tile(tiles, num_left).num_tokens)
            num_left -= taken[-1]
        return taken

    assert [sizes(count) for count in (1, 33, 130, 768, 2000)] == [[32], [64], [256], [1024], [1024, 1024]]
    assert sizes(700) == [256, 256, 256]
    assert products._one_of_each_size([products.Tile(64), products.Tile(64, True), BASE]) == [BASE, products.Tile(64)]


def test_sizes_with_other_bits_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(products.Tile):
        __slots__ = ()

        def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
            order = torch.arange(weight.size(1) - 1, -1, -1)
            return super().linear(rows[:, order], weight[:, order])

    monkeypatch.setattr(products, "_CANDIDATES", (BASE, Odd(64)))
    assert products._alike(torch.empty(96, 80, dtype=torch.bfloat16)) == [BASE]


def test_a_place_in_the_tile_that_matters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(_: Any, rows: Tensor, weight: Tensor) -> Tensor:
        return (rows @ weight.t()) * torch.arange(len(rows)).view(-1, 1)

    monkeypatch.setattr(products.Tile, "linear", linear)
    with pytest.raises(ConfigError, match="batch_invariant"):
        products._alike(torch.empty(96, 80))


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gates_have_the_same_bits_in_every_lane(dtype: torch.dtype, gelu: bool) -> None:
    """Vector instructions take most elements, plain ones the last few; in 16 bits all inputs can be tried."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[~every.isnan()]
    every = every[: len(every) // 64 * 64]
    alone = invariantly_opened(every.view(-1, 1).expand(-1, 2)[:, 0], gelu=gelu)
    few = torch.cat([invariantly_opened(part.clone(), gelu=gelu) for part in every.split(3)])
    assert torch.equal(alone, few)
    plain = opened(every.double(), gelu=gelu).to(dtype)
    assert torch.allclose(alone.float(), plain.float(), rtol=0.01, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("width", [80, 100, 1000])
def test_float32_has_the_same_bits_whatever_the_width(width: int) -> None:
    """Widths of which vector instructions leave some elements over, and not the same ones in all sizes of tile."""
    shape = replace(SHAPE, intermediate_size=width, vocab_size=64)
    weights = random_weights(shape, torch.float32, torch.device("cpu"))
    layer, ours = weights.layers[0], InvariantProducts(weights)
    rows = torch.randn((256, shape.hidden_size), generator=torch.Generator().manual_seed(2))
    whole = ours.gated(rows, layer.gate_up, layer.down)
    for few in (1, 5, 17, 32, 65, 129):
        assert torch.equal(ours.gated(rows[:few], layer.gate_up, layer.down), whole[:few])


def test_a_row_that_is_left_over_is_not_computed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that sums otherwise for one row, as oneDNN does in bfloat16, is seen; a row beside it helps."""
    fused = attention_cpu_tiles._fused_attention
    halves = torch.cat((torch.arange(8, 16), torch.arange(8)))

    def summed_otherwise(query: Tensor, keys: Tensor, values: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
        out, lse = fused(query, keys, values, **settings)
        if query.size(2) % 32 == 1:
            swapped = fused(query[..., halves], keys[..., halves], values, **settings)
            out[:, :, -1], lse[:, :, -1] = swapped[0][:, :, -1], swapped[1][:, :, -1]
        return out, lse

    monkeypatch.setattr(attention_cpu_tiles, "_fused_attention", summed_otherwise)
    assert attention_cpu_trial.rows_are_alike(6, 2, 16, torch.bfloat16)
    monkeypatch.setattr(attention_cpu_tiles, "_padding", lambda rows: 0)
    assert not attention_cpu_trial.rows_are_alike(6, 2, 16, torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "window"), [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, 300), (torch.bfloat16, 20)]
)
def test_few_queries_have_the_bits_of_many_in_all_tiles(dtype: torch.dtype, window: int | None) -> None:
    """In tiles that are attended with all keys before them in one call, and in those that are merged."""
    generator, num_keys, tokens_per_block = torch.Generator().manual_seed(4), 1100, 24
    num_blocks = -(-num_keys // tokens_per_block)
    kv_layer = torch.randn((num_blocks, 2, tokens_per_block, 3, 64), generator=generator).to(dtype)
    query = torch.randn((num_keys, 9, 64), generator=generator).to(dtype)

    def attended(spans: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Attends queries `first` to `stop` of each span, each a sequence, whose memory behind them is not KV."""
        kv, tables = [], torch.full((len(spans), num_blocks + 1), -1)
        for seq, (first, stop) in enumerate(spans):
            of = kv_layer[: -(-stop // tokens_per_block)].clone()
            of[-1, :, (stop - 1) % tokens_per_block + 1 :] = math.nan
            tables[seq, : len(of)] = torch.arange(len(of)) + sum(map(len, kv))
            if window is not None:  # what no query sees may be anything, or not be there at all
                num_unseen = max(0, first - window + 1)
                of[: num_unseen // tokens_per_block] = math.nan
                of[num_unseen // tokens_per_block, :, : num_unseen % tokens_per_block] = math.nan
                tables[seq, : num_unseen // tokens_per_block] = -1
            kv.append(of)
        starts = torch.tensor([0, *itertools.accumulate(stop - first for first, stop in spans)])
        lens = torch.tensor([stop for _, stop in spans])
        batch = AttentionBatch(tables, starts, lens, scale=0.125, window=window, invariant=True)
        rows = torch.cat([query[first:stop] for first, stop in spans])
        lse = torch.empty(rows.shape[:2])
        return paged_attention(rows, torch.cat(kv), batch, lse=lse), lse

    out, lse = attended([(0, num_keys)])
    plain = AttentionBatch(
        torch.arange(num_blocks)[None],
        torch.tensor([0, num_keys]),
        torch.tensor([num_keys]),
        scale=0.125,
        window=window,
    )
    expected = paged_attention_reference(query, kv_layer, plain)
    assert (out - expected).abs().max().item() <= 4 * torch.finfo(dtype).eps * expected.abs().max().item()
    alone = [(0, 1), (255, 257), (299, 300), (700, 760), (1000, 1040), (1023, 1024), (1024, 1025), (1090, 1100)]
    together = [(255, 256), (299, 300), (300, 301), (510, 514), (511, 512), (1024, 1025), (1099, 1100)]
    for spans in (*([span] for span in alone), together):
        of = torch.cat([torch.arange(first, stop) for first, stop in spans])
        some, some_lse = attended(spans)
        assert torch.equal(some, out[of]), spans
        assert torch.equal(some_lse, lse[of]), spans


def test_namespaces_tell_arithmetics_apart(medium: tuple[ModelConfig, LlamaModel]) -> None:
    config, model = medium
    fingerprint = arithmetic_fingerprint(model, config, torch.bfloat16)
    assert fingerprint == arithmetic_fingerprint(model, config, torch.bfloat16)
    ids = {kv_namespace(config, bytes(32), torch.bfloat16, fingerprint=of).id for of in ("", fingerprint, "0" * 16)}
    assert len(ids) == 3


def test_what_would_break_it_is_refused() -> None:
    data = {"tenant": "red", "tenants": {"red": {"secret": "env:SECRET"}}}
    engine = {"batch_invariant": True, "lossy_codec": "int8_per_head"}
    with pytest.raises(ConfigError, match="lossy_codec"):
        parse_config(data | {"engine": engine}, source="test", environ={"SECRET": "s" * 32})
    for section, may in (({}, True), ({"dtype": "float32"}, False), ({"lossy_codec": "int8_per_head"}, False)):
        config = parse_config(data | {"engine": section}, source="test", environ={"SECRET": "s" * 32})
        assert config.engine.may_be_invariant is may


def test_invariant_attention_takes_no_scoring() -> None:
    query, kv_layer = torch.zeros(1, 2, 16), torch.zeros(1, 2, 4, 1, 16)
    index = torch.zeros(1, 1, dtype=torch.int64), torch.tensor([0, 1]), torch.tensor([1])
    for scoring in (Scoring(soft_cap=5.0), Scoring(sinks=torch.zeros(2))):
        with pytest.raises(ValueError, match="invariant attention"):
            paged_attention(query, kv_layer, AttentionBatch(*index, scale=1.0, invariant=True, scoring=scoring))


def test_a_branch_does_not_depend_on_how_many_there_are(medium: tuple[ModelConfig, LlamaModel]) -> None:
    """Tokens, and log probabilities bit for bit: alone, with other branches and requests, cached, after preemption."""
    config, model = medium
    tokens = random.Random(6).choices(range(config.vocab_size), k=43)
    seen: dict[int, set[tuple[object, ...]]] = {}
    for num_branches, num_blocks, max_batch_tokens in ((1, 64, 4096), (4, 64, 4096), (3, 17, 10)):
        rig = EngineRig(
            tiers=False, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, cache_aware=True, model=model,
            config=config,
        )  # fmt: skip
        for _ in range(2):
            request = rig.add(tokens, 14, temperature=1.0, seed=3, num_branches=num_branches, num_top=1)
            rig.add(tokens[:30], 9, temperature=1.0, num_branches=2)
            rig.run()
            for branch, done in rig.answers[request].items():
                seen.setdefault(branch, set()).add((done.token_ids, done.logprobs))
        assert (rig.counter("engine_preemptions") > 0) == (num_blocks == 17)
        rig.close()
    assert {branch: len(answers) for branch, answers in seen.items()} == {0: 1, 1: 1, 2: 1, 3: 1}
