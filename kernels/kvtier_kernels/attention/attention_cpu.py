"""Attention over paged KV where queries are shorter than keys: the fast path on CPU.

Keys fall into two runs: those before the new tokens, which every query sees, and the new ones, which
are causal. Each run goes through torch's fused CPU attention, which returns the log-sum-exp of its
scores, and the two states are merged as in flash decoding (Dao et al., 2023). Over the first run,
which has no mask, the heads that share a KV head are folded into rows of queries, so that keys are
read once per KV head; over the second they are expanded by stride 0. Nothing is repeated in memory.

A window and quantised KV take plainer ways: a mask over the keys that some query sees, and a copy in query's dtype.
So do scores that torch's attention does not make. A sink takes its share of what has been attended.
"""

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kvtier_kernels.attention.attention_batch import AttentionBatch
from kvtier_kernels.attention.attention_cpu_tiles import CpuPart, OneSequence, plan_in_tiles
from kvtier_kernels.attention.gathered_values import GatheredValues
from kvtier_kernels.scoring import Scoring

_MAX_SCORES = 1 << 22

_fused_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def plan_on_cpu(query: Tensor, kv_layer: Tensor, batch: AttentionBatch) -> "CpuPlan":
    """How `paged_attention` of CPU tensors is computed, whose shapes have been checked there.

    :raises ValueError: on lengths that do not fit, or on an invariant batch with a scoring.
    """
    if batch.invariant and (batch.scoring.changes_scores or batch.scoring.sinks is not None):
        raise ValueError("invariant attention on CPU takes no scoring: leave out one or the other")
    starts, lengths, tokens_per_block = batch.starts_on_host(), batch.seq_lens.tolist(), kv_layer.size(2)
    if (starts[0], starts[-1]) != (0, query.size(0)):
        raise ValueError(f"query_starts from {starts[0]} to {starts[-1]}: needs 0 to {query.size(0)}")
    for seq, num_keys in enumerate(lengths):
        num_queries, num_blocks = starts[seq + 1] - starts[seq], -(-num_keys // tokens_per_block)
        if not (0 < num_queries <= num_keys):
            raise ValueError(f"sequence {seq} has {num_queries} queries and {num_keys} keys")
        if num_blocks > batch.block_tables.size(1):
            raise ValueError(f"sequence {seq} of {num_keys} keys needs {num_blocks} blocks")
    if batch.invariant:
        return CpuPlan(plan_in_tiles(batch, starts, lengths, tokens_per_block))
    spans = enumerate(itertools.pairwise(starts))
    return CpuPlan([_sequence(batch, seq, first, stop, tokens_per_block) for seq, (first, stop) in spans])


class CpuPlan:
    """An `AttentionPlan` for CPU tensors: parts that are computed one after the other. One thread."""

    def __init__(self, parts: Sequence[CpuPart]) -> None:
        """
        :param parts: together all queries of the batch.
        """
        self._parts = parts

    def run(
        self, query: Tensor, kv_layer: Tensor, kv_scales: Tensor | None = None, lse: Tensor | None = None
    ) -> Tensor:
        """`paged_attention` of one layer.

        :raises IndexError: on a block id that does not exist.
        """
        out = torch.empty(query.shape, dtype=query.dtype)
        for part in self._parts:
            part_lse = part.attend(query, part.values.of(kv_layer, kv_scales, query.dtype), out)
            if lse is not None:
                lse[part.queries] = part_lse
        return out


def _sequence(batch: AttentionBatch, seq: int, first: int, stop: int, tokens_per_block: int) -> OneSequence:
    """The sequence `seq`, whose queries are those from `first` to `stop`, and the keys that some of them sees."""
    num_keys = int(batch.seq_lens[seq])
    first_key = 0 if batch.window is None else max(0, num_keys - (stop - first) - batch.window + 1)
    first_block = first_key // tokens_per_block
    block_ids = batch.block_tables[seq : seq + 1, first_block : -(-num_keys // tokens_per_block)].contiguous()
    seen = slice(first_key - first_block * tokens_per_block, num_keys - first_block * tokens_per_block)
    attend = functools.partial(_attend, batch=batch)
    return OneSequence(slice(first, stop), GatheredValues(block_ids, seen), attend)


def _attend(query: Tensor, of_keys: tuple[Tensor, Tensor], out: Tensor, *, batch: AttentionBatch) -> Tensor:
    """Attends one sequence. `query`, `out`: `[queries, num_heads, D]`; keys and values: `[1, num_kv_heads, keys, D]`.

    Returns the log-sum-exp, `[queries, num_heads]`.
    """
    keys, values = (of.squeeze(0) for of in of_keys)
    scale, window, scoring = batch.scale, batch.window, batch.scoring
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads, num_keys, _ = keys.shape
    group = num_heads // num_kv_heads
    # [num_kv_heads, queries, group, D]: the heads of one KV head lie side by side.
    grouped = query.view(num_queries, num_kv_heads, group, head_dim).transpose(0, 1).contiguous()
    # A single query sees every key: there is no causal run.
    num_causal = num_queries if num_queries > 1 else 0
    num_seen = num_keys - num_causal
    if scoring.changes_scores:
        attended, lse = _attend_scored(grouped, keys, values, scale, window, scoring)
    elif window is not None:
        attended, lse = _attend_masked(grouped, keys, values, scale, _window_mask(num_queries, num_keys, window))
    elif not num_causal:
        attended, lse = _attend_seen(grouped, keys, values, scale)
    elif not num_seen:
        attended, lse = _attend_causal(grouped, keys, values, scale)
    else:
        seen, seen_lse = _attend_seen(grouped, keys[:, :num_seen], values[:, :num_seen], scale)
        new, new_lse = _attend_causal(grouped, keys[:, num_seen:], values[:, num_seen:], scale)
        weight = torch.sigmoid(new_lse - seen_lse).unsqueeze(-1).to(query.dtype)
        attended, lse = torch.lerp(seen, new, weight), torch.logaddexp(seen_lse, new_lse)
    if scoring.sinks is not None:
        sinks = scoring.sinks.view(num_kv_heads, 1, group)
        attended = attended * torch.sigmoid(lse - sinks).unsqueeze(-1).to(query.dtype)
        lse = torch.logaddexp(lse, sinks)
    out.view(num_queries, num_kv_heads, group, head_dim).copy_(attended.transpose(0, 1))
    return lse.transpose(0, 1).flatten(1, 2)


def _window_mask(num_queries: int, num_keys: int, window: int) -> Tensor:
    """`[queries, keys]`, true where the query sees the key; the last query stands at the last key."""
    distance = _distances(num_keys - num_queries, num_keys, num_keys)
    return (distance >= 0) & (distance < window)


def _distances(first: int, last: int, num_keys: int) -> Tensor:
    """int64 `[last - first, num_keys]`: of each key before a query at these positions; negative behind it."""
    return torch.arange(first, last)[:, None] - torch.arange(num_keys)[None, :]


def _attend_scored(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Attends causally in float32 where `scoring` changes scores, a few queries at a time: their scores take memory."""
    num_kv_heads, num_queries, group, _ = query.shape
    num_keys = keys.size(1)
    keys, values = keys.float(), values.float()
    out, lse = torch.empty(query.shape, dtype=query.dtype), torch.empty(query.shape[:3])
    before = num_keys - num_queries
    step = max(1, _MAX_SCORES // (num_kv_heads * group * num_keys))
    for first in range(0, num_queries, step):
        last = min(first + step, num_queries)
        some, distance = slice(first, last), _distances(before + first, before + last, num_keys)
        scores = torch.einsum("kqgd,knd->kqgn", query[:, some].float(), keys) * scale
        if scoring.soft_cap is not None:
            scores = scores.div_(scoring.soft_cap).tanh_().mul_(scoring.soft_cap)
        if scoring.alibi_slopes is not None:
            scores -= scoring.alibi_slopes.view(num_kv_heads, 1, group, 1) * distance[:, None, :]
        unseen = (distance < 0) | (distance >= (num_keys if window is None else window))
        scores.masked_fill_(unseen[:, None, :], float("-inf"))
        out[:, some] = torch.einsum("kqgn,knd->kqgd", scores.softmax(-1), values).to(query.dtype)
        lse[:, some] = scores.logsumexp(-1)
    return out, lse


def _attend_masked(query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attends with a mask `[queries, keys]`; a query sees the keys where the mask is true."""
    expanded = (-1, query.size(2), -1, -1)
    added = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    out, lse = _fused_attention(
        query.transpose(1, 2), keys.unsqueeze(1).expand(expanded), values.unsqueeze(1).expand(expanded),
        attn_mask=added[None, None], scale=scale,
    )  # fmt: skip
    return out.transpose(1, 2), lse.transpose(1, 2)


def _attend_seen(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """No mask. Returns `[num_kv_heads, queries, group, D]` and the log-sum-exp `[num_kv_heads, queries, group]`."""
    folded = query.flatten(1, 2).unsqueeze(1)
    out, lse = _fused_attention(folded, keys.unsqueeze(1), values.unsqueeze(1), scale=scale)
    return out.view(query.shape), lse.view(query.shape[:3])


def _attend_causal(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attends causally with as many keys as queries: query i sees keys 0 to i."""
    group = query.size(2)
    expanded = (-1, group, -1, -1)
    out, lse = _fused_attention(
        query.transpose(1, 2), keys.unsqueeze(1).expand(expanded), values.unsqueeze(1).expand(expanded),
        is_causal=True, scale=scale,
    )  # fmt: skip
    return out.transpose(1, 2), lse.transpose(1, 2)
