"""Launchers refuse what does not fit with a `ValueError` that names it, before anything is launched."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_rig import CASES, make_inputs, quantised
from kvtier_kernels import AttentionBatch, paged_attention
from kvtier_kernels.attention.paged_decode import paged_decode
from kvtier_kernels.attention.prefix_prefill import prefix_prefill
from kvtier_kernels.copies.block_copy import block_copy
from kvtier_kernels.scoring import Scoring
from kvtier_kernels.tiles import Tile
from kvtier_kernels.writes.kv_write import kv_write
from kvtier_kernels.writes.slot_write import write_slots
from memory_rig import sparse


def refuses(words: str, launch: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(ValueError, match=words):
        launch(*args, **kwargs)


def test_prefill() -> None:
    good = make_inputs(CASES["decode and prefill together"], torch.float32)
    refused: dict[str, dict[str, torch.Tensor]] = {
        r"needs \[B, 2, N, K, D\]": {"kv_layer": good.kv_layer[0]},
        "needs float32, bfloat16 or float16": {"kv_layer": good.kv_layer.double()},
        "needs contiguous blocks": {"kv_layer": good.kv_layer.transpose(2, 3)},
        "blocks overlap": {"kv_layer": good.kv_layer[:1].expand(4, -1, -1, -1, -1)},
        "query .* needs kv_layer's": {"query": good.query.bfloat16()},
        r"query .* needs \[T, heads, D\]": {"query": good.query[..., :32]},
        "query .* needs contiguous heads": {"query": good.query.transpose(1, 2).contiguous().transpose(1, 2)},
        "query is on meta": {"query": good.query.to("meta")},
        "not a multiple": {"query": good.query[:, :7]},
        "block_tables is on meta": {"block_tables": good.block_tables.to("meta")},
        "block_tables .* int32 or int64": {"block_tables": good.block_tables.float()},
        "block_tables .* contiguous": {"block_tables": good.block_tables.t().contiguous().t()},
        "query_starts .* needs shape": {"query_starts": good.query_starts[1:]},
        "seq_lens .* needs shape": {"seq_lens": good.seq_lens[:2]},
        "seq_lens .* int32 or int64": {"seq_lens": good.seq_lens.to(torch.int16)},
    }
    for words, changed in refused.items():
        refuses(words, prefix_prefill, *replace(good, **changed).args(0.125))
    shape = good.query.shape[:2]
    for lse in (torch.empty(shape[::-1]), torch.empty(shape, dtype=torch.float64), torch.empty(shape[::-1]).t()):
        refuses("lse .* needs contiguous float32", prefix_prefill, *good.args(0.125), lse=lse)
    refuses("lse is on meta", prefix_prefill, *good.args(0.125), lse=torch.empty(shape, device="meta"))
    refuses("tile.rows is 2: ", prefix_prefill, *good.args(0.125), tile=Tile(2, 16, 4, 1))
    refuses("tile.keys is 24: ", prefix_prefill, *good.args(0.125), tile=Tile(16, 24, 4, 1))
    huge = Tile(1024, 128, 4, 1)
    refuses("tile of them may need .* bytes of shared memory", prefix_prefill, *good.args(0.125), tile=huge)
    for scale in (0.0, -1.0, math.inf, math.nan):
        refuses("scale is", prefix_prefill, *good.args(scale))
    for window in (-1, 0, 2**30 + 1):
        refuses(f"window is {window}", prefix_prefill, *good.args(0.125, window=window))
    query, kv_layer, batch, _ = good.args(0.125)
    refuses("query_starts is None: .* paged_decode", prefix_prefill, query, kv_layer, replace(batch, query_starts=None))
    no_seqs = replace(
        good, block_tables=good.block_tables[:0], query_starts=good.query_starts[:1], seq_lens=good.seq_lens[:0]
    )
    refuses("75 queries for 0 sequences", prefix_prefill, *no_seqs.args(0.125))
    refuses("3 queries for 4 sequences", prefix_prefill, *replace(good, query=good.query[:3]).args(0.125))
    for num_splits in (0, 1025):
        refuses("num_splits is", prefix_prefill, *good.args(0.125), num_splits=num_splits)


@pytest.mark.parametrize("wrong", [-1, 1000])
def test_block_ids_that_do_not_exist(wrong: int) -> None:
    """Where a kernel reads them; elsewhere they may be anything."""
    good = make_inputs(CASES["decode and prefill together"], torch.float32)
    tables = good.block_tables.clone()
    tables[2, 3] = wrong
    wrong_block = replace(good, block_tables=tables)
    out_of_window = replace(wrong_block, window=256 - 64).args(0.125)
    words = rf"block_tables\[2, 3\] is {wrong}: there are {good.kv_layer.size(0)} blocks"
    refuses(words, prefix_prefill, *wrong_block.args(0.125))
    refuses(words, prefix_prefill, *replace(wrong_block, window=256 - 63).args(0.125))
    prefix_prefill(*out_of_window)
    refuses(words, paged_decode, good.query[:4], *wrong_block.args(0.125)[1:])
    paged_decode(good.query[:4], *out_of_window[1:])


def test_scales_of_quantised_kv() -> None:
    good = quantised(make_inputs(CASES["decode"], torch.float32), torch.int8, per_key=True)
    assert good.kv_scales is not None
    per_key, two = good.kv_scales, torch.ones(2)
    refused: dict[str, Tensor | None] = {
        "None: int8 needs a scale per token and head": None,
        r"contiguous blocks of \[": two,
        "needs float32": per_key.double(),
        "needs contiguous blocks": per_key.transpose(2, 3).contiguous().transpose(2, 3),
        "kv_scales is on meta": per_key.to("meta"),
        "blocks overlap": per_key[:1].expand(per_key.shape),
    }
    for words, kv_scales in refused.items():
        for launcher in (prefix_prefill, paged_attention):
            refuses(words, launcher, *replace(good, kv_scales=kv_scales).args(0.125))
    refuses("query .* needs float32, bf", prefix_prefill, *replace(good, query=good.query.double()).args(1.0))
    plain = make_inputs(CASES["decode"], torch.float32)
    refuses("float32 has none", prefix_prefill, *replace(plain, kv_scales=per_key).args(1.0))


def test_scoring() -> None:
    good = make_inputs(CASES["decode"], torch.float32)
    refused = {
        "soft_cap is 0.0: needs to be positive": Scoring(soft_cap=0.0),
        "soft_cap is nan": Scoring(soft_cap=math.nan),
        "soft_cap is 10001: needs to be positive, at most 10,000, or None": Scoring(soft_cap=10_001),
        r"alibi_slopes .* needs contiguous float32 \[9\]": Scoring(alibi_slopes=torch.ones(3)),
        "sinks .* needs contiguous float32": Scoring(sinks=torch.ones(9, dtype=torch.bfloat16)),
        "sinks is on meta, query on cpu": Scoring(sinks=torch.ones(9, device="meta")),
    }
    for words, scoring in refused.items():
        for launcher in (prefix_prefill, paged_attention):
            refuses(words, launcher, *good.args(0.125, scoring=scoring))


def test_decode() -> None:
    good = make_inputs(CASES["decode"], torch.float32)
    tables, lens = good.block_tables, good.seq_lens
    refused: dict[str, dict[str, Tensor]] = {
        "block_tables .* needs shape": {"block_tables": tables[0]},
        "1 queries for 0 sequences": {
            "block_tables": tables[:0], "query_starts": good.query_starts[:1], "seq_lens": lens[:0]
        },
        "seq_lens .* needs shape": {"seq_lens": lens[:0]},
        "query_starts .* needs shape": {"query_starts": good.query_starts[1:]},
        "kv_layer is on meta": {"kv_layer": good.kv_layer.to("meta")},
    }  # fmt: skip
    for words, changed in refused.items():
        refuses(words, paged_decode, *replace(good, **changed).args(1.0))
    for num_splits in (0, 1025):
        refuses("num_splits is", paged_decode, *good.args(1.0), num_splits=num_splits)


@pytest.mark.parametrize("launcher", [prefix_prefill, paged_decode, paged_attention])
@pytest.mark.parametrize("hint", ["max_seq_len", "num_keys"])
def test_hints_that_cannot_be(hint: str, launcher: Callable[..., Tensor]) -> None:
    good = make_inputs(CASES["decode"], torch.float32)
    refuses(f"{hint} is -1", launcher, *good.args(1.0, **{hint: -1}))


def test_what_no_tile_can_hold() -> None:
    tables, lens = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    batch = AttentionBatch(tables, None, lens, scale=1.0)
    wide = torch.zeros(1, 2, 4, 1, 264)
    refuses("head_dim is 264: at most 256", paged_decode, torch.zeros(1, 1, 264), wide, batch)
    narrow = torch.zeros(1, 2, 4, 1, 16)
    large = sparse(2**31).view(1, 2, 2**26, 1, 16).view(torch.int8)
    scales = sparse(2**29).view(torch.float32).view(1, 2, 2**26, 1)
    refuses("blocks of 2,147,483,648 elements", paged_decode, torch.zeros(1, 1, 16), large, batch, scales)
    refuses("257 query heads for 1", paged_decode, torch.zeros(1, 257, 16), narrow, batch)


def test_kv_write() -> None:
    layer = torch.zeros(2, 2, 4, 3, 8)
    rows, index = torch.zeros(5, 3, 8), torch.arange(5)
    refuses("value .* needs kv_layer's", kv_write, layer, rows, rows.half(), index, index)
    refuses("block_ids .* needs shape", kv_write, layer, rows, rows, index[:4], index)
    refuses("offsets .* int32 or int64", kv_write, layer, rows, rows, index, index.float())
    meta = [tensor.to("meta") for tensor in (layer, rows, rows, index, index)]
    refuses("kv_layer is on meta", write_slots, *meta)


def test_block_copy() -> None:
    source, target, index = torch.zeros(4, 16), torch.zeros(6, 16), torch.arange(3)
    refuses(r"source .* needs \[rows, elements\]", block_copy, source[0], index, target, index)
    refuses("target .* needs contiguous rows", block_copy, source, index, target.t().contiguous().t(), index)
    refuses("target .* do not overlap", block_copy, source, index, target[:1].expand(6, -1), index)
    refuses("must be equal", block_copy, source, index, target[:, :8], index)
    refuses("must be equal", block_copy, source, index, target.int(), index)
    refuses("must be equal", block_copy, source, index, target.to("meta"), index)
    refuses("source is on meta", block_copy, source.to("meta"), index, target, index)
    refuses("source_rows .* int32 or int64", block_copy, source, index.float(), target, index)
    refuses("target_rows .* needs shape", block_copy, source, index, target, index[:2])
    refuses("source_rows is on meta", block_copy, source, index.to("meta"), target, index)
