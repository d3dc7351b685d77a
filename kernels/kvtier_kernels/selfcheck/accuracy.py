"""How far a Triton kernel and the reference may lie apart: derived from the arithmetic, not measured."""

import math

import torch
from torch import Tensor

from kvtier_kernels.attention.attention_batch import AttentionBatch
from kvtier_kernels.reference import dequantised
from kvtier_kernels.scoring import Scoring

_UNIT_FLOAT32 = 2.0**-23
"""Relative error of a sum or product in float32; tensor cores cut where others round to 2**-24."""


def attention_bound(query: Tensor, kv_layer: Tensor, batch: AttentionBatch, kv_scales: Tensor | None = None) -> float:
    """Largest difference between `prefix_prefill` or `paged_decode` and `paged_attention_reference`.

    A score in base 2 is a sum of D products times the key's scale, scale and log2(e), less the peak: in natural units
    it is off by (D + 6) u32 |q| |k| scale, twice that in a normalised weight. exp2 adds 4 u32. Both sums run over n
    keys with at most n / 16 rescalings, the factors of which are the same in both, and splits are merged by one more
    sum of at most n terms: together less than (3 n + 16) u32. The reference, in float64, rounds its result. Below
    float32, weights (times the value's scale, where there is one) are rounded to u before they meet the values
    (u max|v|, and half a subnormal each where the dtype underflows, times the largest stored number), and so is the
    result. What the batch's `scoring` adds to the error of a score is in `scoring_error`; a sink is one more key.

    :param kv_layer: may hold NaN where no key is.
    """
    dtype, num_keys = query.dtype, int(batch.seq_lens.max())
    values = dequantised(kv_layer, kv_scales)
    largest_value, largest_stored = _largest(values[:, 1]), _largest(kv_layer[:, 1].double())
    score = _largest_score(query, values, batch.scale)
    score_error = (query.size(2) + 6) * score + scoring_error(batch.scoring, num_keys)
    float32_part = 2 * score_error + 3 * num_keys + 17
    limits = torch.finfo(dtype)
    underflow = num_keys * limits.smallest_normal * limits.eps / 2
    rounded = (float32_part * _UNIT_FLOAT32 + 2 * limits.eps / 2) * largest_value
    return rounded + underflow * max(largest_value, largest_stored)


def lse_bound(query: Tensor, kv_layer: Tensor, batch: AttentionBatch, kv_scales: Tensor | None = None) -> float:
    """Largest difference between the log-sum-exp of `prefix_prefill` or `paged_decode` and that of the reference.

    It is off by no more than a score is, and by the relative error of the sum; the result, of at most the largest
    score plus log(n), is rounded three times.
    """
    num_keys = int(batch.seq_lens.max())
    score = _largest_score(query, dequantised(kv_layer, kv_scales), batch.scale)
    sums = (query.size(2) + 6) * score + scoring_error(batch.scoring, num_keys) + 3 * num_keys + 16
    return (sums + 6 * (score + math.log(num_keys))) * _UNIT_FLOAT32


def merge_bound(parts: Tensor, part_lse: Tensor, dtype: torch.dtype) -> float:
    """Largest difference between what `merge_states` writes as `dtype` and `merge_states_reference`.

    A weight is exp(x), x <= 0 being a log-sum-exp less the largest: rounding x makes it wrong by x exp(x) u32, at most
    u32, and exp by 4 u32 more. Both sums have S terms; peaks that come later rescale them at most S times, by two
    roundings and once more the errors of a weight each. Every such error is at most max|part|.

    :param parts: may hold NaN where the log-sum-exp is -inf.
    """
    num_states, limits = parts.size(2), torch.finfo(dtype)
    float32_part = 2 * (8 * num_states + 8) * _UNIT_FLOAT32
    largest = parts.float()[part_lse != -math.inf].abs().amax().item() if (part_lse != -math.inf).any() else 0.0
    return (float32_part + limits.eps / 2) * largest + limits.smallest_normal * limits.eps / 2


def merge_lse_bound(part_lse: Tensor) -> float:
    """Largest difference of the merged log-sum-exp: the sum's relative error, and three roundings of its size."""
    num_states, counted = part_lse.size(2), part_lse[part_lse != -math.inf]
    largest = counted.abs().amax().item() if counted.numel() else 0.0
    return (8 * num_states + 8 + 3 * (largest + math.log(num_states))) * _UNIT_FLOAT32


def scoring_error(scoring: Scoring, num_keys: int) -> float:
    """What `scoring` adds to the error of a score, in u32, and to what a log-sum-exp is rounded from.

    The t in cap * (1 - 2 / (t + 1)) is wrong by 4 u32 for exp2 and by its exponent's error, which t / (t + 1)^2 makes
    small: 3 u32 in all; the quotient adds 4, the sum under it 2, difference and product 3. A slope, its product with
    the distance and the sum are rounded, and that less the peak. A sink is the score of one key more.
    """
    error = 0.0 if scoring.soft_cap is None else 12 * scoring.soft_cap
    if scoring.alibi_slopes is not None:
        error += 5 * num_keys * _largest(scoring.alibi_slopes)
    return error if scoring.sinks is None else error + 9 * _largest(_counted(scoring.sinks)) + 3


def _counted(sinks: Tensor) -> Tensor:
    """Replaces sinks of -inf by 0: they take no share, and no error comes of them."""
    return sinks.masked_fill(sinks == -math.inf, 0.0)


def _largest_score(query: Tensor, values: Tensor, scale: float) -> float:
    """An upper bound of all |scores|."""
    keys = values[:, 0].nan_to_num(0)
    longest: list[float] = [rows.norm(dim=-1).max().item() for rows in (query.double(), keys)]
    return scale * longest[0] * longest[1]


def _largest(values: Tensor) -> float:
    largest: float = values.nan_to_num(0).abs().max().item()
    return largest
