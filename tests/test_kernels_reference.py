"""The fast CPU attention and the KV write against the plain references: odd sizes, poisoned memory, derived bounds."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvtier_kernels import kv_write, kv_write_reference, paged_attention, paged_attention_reference

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}


@dataclass(frozen=True)
class Case:
    """Queries and keys per sequence, and the geometry."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    tokens_per_block: int = 16
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64


CASES = {
    "one token alone": Case((1,), (1,)),
    "decode": Case((1,), (33,)),
    "prefill": Case((37,), (37,)),
    "prefill over a cached prefix": Case((5,), (133,)),
    "prefix ends inside a block": Case((40,), (1047,)),
    "decode and prefill together": Case((1, 70, 1, 3), (17, 70, 256, 67)),
    "block of one token": Case((3, 1), (7, 5), tokens_per_block=1),
    "odd block, one head": Case((11, 2), (29, 2), tokens_per_block=7, num_heads=1, num_kv_heads=1, head_dim=24),
    "no grouping": Case((9,), (31,), num_heads=4, num_kv_heads=4, head_dim=32),
    "wide group": Case((13, 1), (300, 19), num_heads=8, num_kv_heads=1, head_dim=128),
}  # fmt: skip


@dataclass
class Inputs:
    query: Tensor
    kv_layer: Tensor
    block_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor

    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.query, self.kv_layer, self.block_tables, self.query_starts, self.seq_lens


def make_inputs(case: Case, dtype: torch.dtype, *, block_seed: int = 0, poison: float = math.nan) -> Inputs:
    """Values depend on the case alone; which physical blocks hold them depends on `block_seed`."""
    values = torch.Generator().manual_seed(1)
    shape = (case.num_kv_heads, case.head_dim)
    blocks_per_seq = [-(-n // case.tokens_per_block) for n in case.seq_lens]
    num_blocks = sum(blocks_per_seq) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(block_seed)).tolist()
    kv = torch.full((num_blocks, 2, 2, case.tokens_per_block, *shape), poison, dtype=dtype)
    layer = kv[:, 1]
    # -1: an entry that is read although it is beyond the sequence must not go unnoticed.
    tables = torch.full((len(case.seq_lens), max(blocks_per_seq) + 1), -1, dtype=torch.int32)
    for seq, seq_len in enumerate(case.seq_lens):
        mine = [order.pop() for _ in range(blocks_per_seq[seq])]
        tables[seq, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        for position in range(seq_len):
            block, offset = mine[position // case.tokens_per_block], position % case.tokens_per_block
            layer[block, :, offset] = torch.randn((2, *shape), generator=values).to(dtype)
    # Rows of query, key and value side by side, as a fused projection leaves them.
    fused = torch.randn(sum(case.query_lens), case.num_heads + 5, case.head_dim, generator=values).to(dtype)
    starts = torch.tensor([0, *torch.tensor(case.query_lens).cumsum(0).tolist()], dtype=torch.int32)
    return Inputs(fused[:, : case.num_heads], layer, tables, starts, torch.tensor(case.seq_lens, dtype=torch.int32))


def error_bound(inputs: Inputs, scale: float) -> float:
    """How far two right answers may lie apart.

    Scores are sums of D products in float32: each is off by at most (D + 2) u32 |q| |k| scale, which a softmax turns
    into a relative error of twice that in every weight, plus (n + 8) u32 for exp and the two sums over n keys; the
    reference has the same. In dtype u: weights, both partial results, the merge weight and the merged result are each
    rounded once, and every one of these errors is at most u max|v|.
    """
    u32, unit = UNIT_ROUNDOFF[torch.float32], UNIT_ROUNDOFF[inputs.query.dtype]
    keys = inputs.kv_layer[:, 0].float().nan_to_num(0)
    largest_value = inputs.kv_layer[:, 1].float().nan_to_num(0).abs().max().item()
    largest_score = scale * inputs.query.float().norm(dim=-1).max().item() * keys.norm(dim=-1).max().item()
    float32_part = 2 * (2 * (inputs.query.size(2) + 2) * largest_score + int(inputs.seq_lens.max()) + 8) * u32
    return (float32_part + 5 * unit) * largest_value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_fast_path_agrees_with_the_reference(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    scale = case.head_dim**-0.5
    out = paged_attention(*inputs.args(), scale=scale)
    expected = paged_attention_reference(*inputs.args(), scale=scale)
    assert out.dtype == dtype
    assert out.is_contiguous()
    worst = (out.float() - expected).abs().max().item()
    assert worst <= error_bound(inputs, scale)


def test_the_bound_notices_a_key_too_many() -> None:
    inputs = make_inputs(CASES["prefill over a cached prefix"], torch.float32)
    scale = 0.125
    out = paged_attention(*inputs.args(), scale=scale)
    shorter = inputs.seq_lens - 1
    other = paged_attention_reference(*inputs.args()[:4], shorter, scale=scale)
    assert (out - other).abs().max().item() > 20 * error_bound(inputs, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_physical_blocks_and_stale_bytes_do_not_change_a_bit(dtype: torch.dtype) -> None:
    case = CASES["decode and prefill together"]
    first = make_inputs(case, dtype, block_seed=0, poison=math.nan)
    second = make_inputs(case, dtype, block_seed=7, poison=1e30)
    assert not torch.equal(first.block_tables, second.block_tables)
    assert torch.equal(paged_attention(*first.args(), scale=0.125), paged_attention(*second.args(), scale=0.125))


def test_reference_agrees_with_dense_attention() -> None:
    inputs = make_inputs(CASES["prefill"], torch.float32)
    blocks = inputs.block_tables[0, :3].long()
    dense = inputs.kv_layer[blocks].transpose(0, 1).flatten(1, 2)[:, :37].repeat_interleave(3, dim=2).transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(
        inputs.query.transpose(0, 1), dense[0], dense[1], is_causal=True, scale=0.125
    )
    out = paged_attention_reference(*inputs.args(), scale=0.125)
    assert (out - expected.transpose(0, 1)).abs().max().item() <= error_bound(inputs, 0.125)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
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


def _swap(inputs: Inputs, **changed: Tensor) -> tuple[Tensor, ...]:
    return Inputs(**{**inputs.__dict__, **changed}).args()


def test_attention_refuses_what_does_not_fit() -> None:
    good = make_inputs(CASES["decode and prefill together"], torch.float32)
    refused = {
        "needs contiguous blocks": {"kv_layer": good.kv_layer.transpose(2, 3)},
        "needs float32 or bfloat16": {"kv_layer": good.kv_layer.half(), "query": good.query.half()},
        "needs kv_layer's": {"query": good.query.bfloat16()},
        "needs contiguous heads": {"query": good.query.transpose(1, 2).contiguous().transpose(1, 2)},
        "not a multiple": {"query": good.query[:, :7]},
        "needs shape": {"seq_lens": good.seq_lens[:2]},
        "needs int32 or int64": {"block_tables": good.block_tables.float()},
        "needs to be contiguous": {"block_tables": good.block_tables.t().contiguous().t()},
        "query_starts from": {"query": good.query[:-1]},
        "queries and": {"seq_lens": good.seq_lens - 20},
        "keys needs": {"seq_lens": good.seq_lens + 400},
        "blocks overlap": {"kv_layer": good.kv_layer[:1].expand(4, -1, -1, -1, -1)},
        "needs [B, 2, N, K, D]": {"kv_layer": good.kv_layer[0]},
    }
    for words, changed in refused.items():
        with pytest.raises(ValueError, match=words.replace("[", r"\[")):
            paged_attention(*_swap(good, **changed), scale=0.125)  # type: ignore[arg-type]


def test_block_ids_out_of_range_are_refused() -> None:
    inputs = make_inputs(CASES["decode"], torch.float32)
    tables = inputs.block_tables + 1000
    with pytest.raises(IndexError):
        paged_attention(*_swap(inputs, block_tables=tables), scale=0.125)  # type: ignore[arg-type]


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
