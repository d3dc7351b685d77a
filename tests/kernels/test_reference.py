"""The fast CPU attention and the KV write against the plain references: odd sizes, poisoned memory, derived bounds."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention_rig import (
    CASES,
    SCORINGS,
    Case,
    Inputs,
    cpu_lse_error_bound,
    error_bound,
    make_inputs,
    quantised,
    scored,
    windowed,
)
from kvtier_kernels import kv_write, kv_write_reference, paged_attention, paged_attention_reference
from kvtier_kernels.attention import attention_cpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DTYPE_IDS = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_fast_path_agrees_with_the_reference(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    scale = case.head_dim**-0.5
    out = paged_attention(*inputs.args(scale))
    expected = paged_attention_reference(*inputs.args(scale))
    assert out.dtype == dtype
    assert out.is_contiguous()
    worst = (out.float() - expected).abs().max().item()
    assert worst <= error_bound(inputs, scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("kv", ["int8", "float8", "float8 with two scales", "float8 without scales"])
def test_quantised_kv(kv: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(CASES["decode and prefill together"], torch.float32)
    kv_dtype = torch.int8 if kv == "int8" else torch.float8_e4m3fn
    inputs = quantised(inputs, kv_dtype, per_key=kv in ("int8", "float8"))
    inputs = replace(inputs, query=inputs.query.to(dtype))
    if kv == "float8 without scales":
        inputs = replace(inputs, kv_scales=None, query=inputs.query / 100)
    check_with_lse(inputs)


@pytest.mark.parametrize("window", [1, 16, 17, 50, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_windows(window: int, dtype: torch.dtype) -> None:
    check_with_lse(windowed(make_inputs(CASES["decode and prefill together"], dtype), window))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_log_sum_exp(case: Case, dtype: torch.dtype) -> None:
    check_with_lse(make_inputs(case, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("rules", SCORINGS, ids="-".join)
def test_scoring(rules: tuple[str, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = scored(make_inputs(CASES["decode and prefill together"], dtype), *rules)
    check_with_lse(inputs)
    check_with_lse(windowed(inputs, 50))
    monkeypatch.setattr(attention_cpu, "_MAX_SCORES", 30 * 9 * 70)
    check_with_lse(inputs)


def test_scores_and_masks_of_few_queries_at_a_time_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = scored(
        make_inputs(Case((200,), (300,), num_heads=2, num_kv_heads=1, head_dim=8), torch.float32), "soft_cap"
    )
    monkeypatch.setattr(attention_cpu, "_MAX_SCORES", 20 * 2 * 300)
    with Largest() as largest:
        paged_attention(*inputs.args(0.125))
    assert largest.elements == 20 * 2 * 300


class Largest(TorchDispatchMode):
    """The most elements that an operation has returned in one tensor."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        result = func(*args, **(kwargs or {}))
        sizes = [one.numel() for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def check_with_lse(inputs: Inputs) -> None:
    lse, expected_lse = torch.full((2, *inputs.query.shape[:2]), math.nan).unbind()
    out = paged_attention(*inputs.args(0.125), lse)
    expected = paged_attention_reference(*inputs.args(0.125), expected_lse)
    assert (out.float() - expected).abs().max().item() <= error_bound(inputs, 0.125)
    assert (lse - expected_lse).abs().max().item() <= cpu_lse_error_bound(inputs, 0.125)


def test_the_bound_notices_a_key_too_many() -> None:
    inputs = make_inputs(CASES["prefill over a cached prefix"], torch.float32)
    scale = 0.125
    out = paged_attention(*inputs.args(scale))
    other = paged_attention_reference(*replace(inputs, seq_lens=inputs.seq_lens - 1).args(scale))
    assert (out - other).abs().max().item() > 20 * error_bound(inputs, scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_physical_blocks_and_stale_bytes_do_not_change_a_bit(dtype: torch.dtype) -> None:
    case = CASES["decode and prefill together"]
    first = make_inputs(case, dtype, block_seed=0, poison=math.nan)
    second = make_inputs(case, dtype, block_seed=7, poison=6e4)
    assert not torch.equal(first.block_tables, second.block_tables)
    assert torch.equal(paged_attention(*first.args(0.125)), paged_attention(*second.args(0.125)))


def test_reference_agrees_with_dense_attention() -> None:
    inputs = make_inputs(CASES["prefill"], torch.float32)
    blocks = inputs.block_tables[0, :3].long()
    dense = inputs.kv_layer[blocks].transpose(0, 1).flatten(1, 2)[:, :37].repeat_interleave(3, dim=2).transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(
        inputs.query.transpose(0, 1), dense[0], dense[1], is_causal=True, scale=0.125
    )
    out = paged_attention_reference(*inputs.args(0.125))
    assert (out - expected.transpose(0, 1)).abs().max().item() <= error_bound(inputs, 0.125)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("num_tokens", [0, 1, 23])
def test_kv_write_writes_these_tokens_and_nothing_else(num_tokens: int, dtype: torch.dtype) -> None:
    num_blocks, tokens_per_block, heads, head_dim = 4, 7, 3, 24
    fresh = torch.full((num_blocks, 3, 2, tokens_per_block, heads, head_dim), 7.0, dtype=dtype)
    written, expected = fresh.clone(), fresh.clone()
    places = torch.randperm(num_blocks * tokens_per_block, generator=torch.Generator().manual_seed(3))[:num_tokens]
    block_ids, offsets = places // tokens_per_block, places % tokens_per_block
    fused = torch.randn(num_tokens, 9, head_dim).to(dtype)
    kv_write(written[:, 1], fused[:, 3:6], fused[:, 6:9], block_ids, offsets)
    kv_write_reference(expected[:, 1], fused[:, 3:6], fused[:, 6:9], block_ids, offsets)
    assert torch.equal(written, expected)
    assert torch.equal(written[:, 0], fresh[:, 0])
    assert torch.equal(written[:, 2], fresh[:, 2])


def test_one_query_per_sequence_needs_no_query_starts() -> None:
    query, kv_layer, batch, _ = make_inputs(Case((1, 1, 1), (17, 256, 67)), torch.float32).args(0.125)
    without = replace(batch, query_starts=None)
    for attend in (paged_attention, paged_attention_reference):
        assert torch.equal(attend(query, kv_layer, without), attend(query, kv_layer, batch))
    with pytest.raises(ValueError, match="query_starts from 0 to 3: needs 0 to 2"):
        paged_attention(query[:2], kv_layer, without)


def test_attention_refuses_what_does_not_fit() -> None:
    good = make_inputs(CASES["decode and prefill together"], torch.float32)
    refused = {
        "needs contiguous blocks": {"kv_layer": good.kv_layer.transpose(2, 3)},
        "needs float32, bfloat16 or float16": {"kv_layer": good.kv_layer.double(), "query": good.query.double()},
        "needs kv_layer's": {"query": good.query.bfloat16()},
        "needs contiguous heads": {"query": good.query.transpose(1, 2).contiguous().transpose(1, 2)},
        "not a multiple": {"query": good.query[:, :7]},
        "needs shape": {"seq_lens": good.seq_lens[:2]},
        "needs int32 or int64": {"block_tables": good.block_tables.float()},
        "query_starts .* needs int32 or int64": {"query_starts": good.query_starts.float()},
        "needs to be contiguous": {"block_tables": good.block_tables.t().contiguous().t()},
        "query_starts from": {"query": good.query[:-1]},
        "queries and": {"seq_lens": good.seq_lens - 20},
        "keys needs": {"seq_lens": good.seq_lens + 400},
        "blocks overlap": {"kv_layer": good.kv_layer[:1].expand(4, -1, -1, -1, -1)},
        "needs [B, 2, N, K, D]": {"kv_layer": good.kv_layer[0]},
    }
    for words, changed in refused.items():
        with pytest.raises(ValueError, match=words.replace("[", r"\[")):
            paged_attention(*replace(good, **changed).args(0.125))


def test_block_ids_out_of_range_are_refused() -> None:
    inputs = make_inputs(CASES["decode"], torch.float32)
    tables = inputs.block_tables + 1000
    with pytest.raises(IndexError):
        paged_attention(*replace(inputs, block_tables=tables).args(0.125))


@pytest.mark.parametrize(("block_id", "offset"), [(-1, 0), (2, 0), (0, -1), (0, 4)])
def test_kv_write_refuses_places_that_do_not_exist(block_id: int, offset: int) -> None:
    layer, rows = torch.zeros(2, 2, 4, 3, 8), torch.ones(2, 3, 8)
    with pytest.raises(IndexError):
        kv_write(layer, rows, rows, torch.tensor([1, block_id]), torch.tensor([1, offset]))


def test_kv_write_refuses_what_does_not_fit() -> None:
    layer = torch.zeros(2, 2, 4, 3, 8)
    rows, index = torch.zeros(5, 3, 8), torch.arange(5)
    for words, key, value, places in (
        ("must be equal", rows, rows[:, :2], index),
        ("heads, kv_layer", rows[:, :2], rows[:, :2], index),
        ("needs shape", rows, rows, index[:4]),
        ("needs kv_layer's", rows.bfloat16(), rows, index),
    ):
        with pytest.raises(ValueError, match=words):
            kv_write(layer, key, value, places, index)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="into KV of floats"):
            kv_write(layer.to(dtype), rows, rows, index, index)
