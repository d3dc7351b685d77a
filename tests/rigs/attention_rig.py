"""Inputs of paged attention for tests, and how far two right answers to them may lie apart."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvtier_kernels import AttentionBatch
from kvtier_kernels.reference import dequantised
from kvtier_kernels.scoring import PLAIN, Scoring
from kvtier_kernels.selfcheck.accuracy import attention_bound, lse_bound, scoring_error

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-11}


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


SCORINGS = (
    ("soft_cap",),
    ("alibi_slopes",),
    ("sinks",),
    ("soft_cap", "sinks"),
    ("soft_cap", "alibi_slopes", "sinks"),
)
"""The fields of `Scoring` that `scored` takes."""


@dataclass
class Inputs:
    query: Tensor
    kv_layer: Tensor
    block_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    kv_scales: Tensor | None = None
    window: int | None = None
    scoring: Scoring = PLAIN

    def args(self, scale: float, **options: Any) -> tuple[Tensor, Tensor, AttentionBatch, Tensor | None]:
        """As functions of attention take them. `options` are other fields of `AttentionBatch`, or take our place."""
        fields = {"window": self.window, "scoring": self.scoring, **options}
        batch = AttentionBatch(self.block_tables, self.query_starts, self.seq_lens, scale=scale, **fields)
        return self.query, self.kv_layer, batch, self.kv_scales


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


def quantised(inputs: Inputs, dtype: torch.dtype, *, per_key: bool) -> Inputs:
    """The same with KV of int8 or float8_e4m3fn; poison, where NaN was, in the values or their scales.

    :param per_key: a scale per token and head, else one for keys and one for values.
    """
    values = inputs.kv_layer.float()
    largest = values.abs().nan_to_num(0).amax(4) if per_key else values.abs().nan_to_num(0).amax((0, 2, 3, 4))
    scales = largest / (127.0 if dtype == torch.int8 else 448.0)
    scales = torch.where(scales == 0, 1.0, scales)
    stored = values / (scales[..., None] if per_key else scales.view(2, 1, 1, 1))
    if per_key:
        scales = scales.masked_fill(values[..., 0].isnan(), math.nan)
        two_layers = torch.full((scales.size(0), 2, *scales.shape[1:]), math.nan)
        two_layers[:, 1] = scales
        scales = two_layers[:, 1]
    if dtype == torch.int8:
        stored = stored.round().nan_to_num(127)
    layer = torch.empty((stored.size(0), 2, *stored.shape[1:]), dtype=dtype)[:, 1]
    layer.copy_(stored)
    return replace(inputs, kv_layer=layer, kv_scales=scales)


def windowed(inputs: Inputs, window: int) -> Inputs:
    """The same with a window. Entries of `block_tables` that no query sees become a block of poison."""
    tables, tokens_per_block = inputs.block_tables.clone(), inputs.kv_layer.size(2)
    poison = min(set(range(inputs.kv_layer.size(0))) - set(tables.flatten().tolist()))
    for seq, first in enumerate((inputs.seq_lens - inputs.query_starts.diff() - window + 1).tolist()):
        tables[seq, : max(0, first) // tokens_per_block] = poison
    return replace(inputs, block_tables=tables, window=window)


def scored(inputs: Inputs, *rules: str) -> Inputs:
    """The same with scores changed by `rules`, which are names of `Scoring`'s; by numbers that matter to weights."""
    numbers = torch.linspace(-1.0, 2.0, inputs.query.size(1))
    every = {"soft_cap": 1.5, "alibi_slopes": torch.exp2(-3 * numbers), "sinks": 2 * numbers}
    return replace(inputs, scoring=Scoring(**{rule: every[rule] for rule in rules}))


def error_bound(inputs: Inputs, scale: float) -> float:
    """How far the fast path on CPU and the reference may lie apart.

    Scores are sums of D products in float32: each is off by at most (D + 2) u32 |q| |k| scale, which a softmax turns
    into a relative error of twice that in every weight, plus (n + 8) u32 for exp and the two sums over n keys; the
    reference has the same. In dtype u: weights, both partial results, the merge weight and the merged result are each
    rounded once, and every one of these errors is at most u max|v|. So are what a sink leaves of a result, and the
    factor. What `scoring` does to scores is bounded as for the kernels.
    """
    u32, unit = UNIT_ROUNDOFF[torch.float32], UNIT_ROUNDOFF[inputs.query.dtype]
    values = dequantised(inputs.kv_layer, inputs.kv_scales).nan_to_num(0)
    largest_value = values[:, 1].abs().max().item()
    largest_score = scale * inputs.query.float().norm(dim=-1).max().item() * values[:, 0].norm(dim=-1).max().item()
    num_keys = int(inputs.seq_lens.max())
    score_error = (inputs.query.size(2) + 2) * largest_score + scoring_error(inputs.scoring, num_keys)
    float32_part = 2 * (2 * score_error + num_keys + 8) * u32
    quantised_part = 0.0 if inputs.kv_layer.dtype == inputs.query.dtype else (2 * largest_score + 1) * unit
    num_roundings = 5 if inputs.scoring.sinks is None else 7
    return (float32_part + quantised_part + num_roundings * unit) * largest_value


def cpu_lse_error_bound(inputs: Inputs, scale: float) -> float:
    """The bound of the log-sum-exp: the kernels' own, and what rounding quantised keys to u does to a score."""
    values = dequantised(inputs.kv_layer, inputs.kv_scales).nan_to_num(0)
    largest_score = scale * inputs.query.float().norm(dim=-1).max().item() * values[:, 0].norm(dim=-1).max().item()
    rounding = 0.0 if inputs.kv_layer.dtype == inputs.query.dtype else UNIT_ROUNDOFF[inputs.query.dtype]
    return lse_error_bound(inputs, scale) + rounding * largest_score


def kernel_error_bound(inputs: Inputs, scale: float) -> float:
    """How far the Triton kernels and the reference may lie apart."""
    return attention_bound(*inputs.args(scale))


def lse_error_bound(inputs: Inputs, scale: float) -> float:
    return lse_bound(*inputs.args(scale))
