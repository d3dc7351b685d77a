"""Every operation in plain torch: slow, easy to read, the oracle of all faster paths."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvtier_kernels.attention.attention_batch import AttentionBatch


def paged_attention_reference(
    query: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    kv_scales: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence's newest tokens over all its keys; arithmetic in float64.

    `AttentionBatch` and its `check` describe the arguments. Returns float32 `[num_tokens, num_heads,
    head_dim]`, whatever the dtype of the inputs. A query that sees no key, in a sequence with more queries than
    keys, gets zeros. `lse`, float32 `[num_tokens, num_heads]`, takes the natural log-sum-exp of each query's scores.
    """
    window, scoring, starts = batch.window, batch.scoring, batch.starts_on_host()
    group = query.size(1) // kv_layer.size(3)
    out = torch.full(query.shape, float("nan"), dtype=torch.float32, device=query.device)
    for seq, seq_len in enumerate(batch.seq_lens.tolist()):
        start, stop = starts[seq], starts[seq + 1]
        first_position = seq_len - (stop - start)
        # Nobody sees what is before: its block ids need not be any.
        first_key = 0 if window is None else max(0, first_position - window + 1)
        keys, values = _gather(kv_layer, kv_scales, batch.block_tables[seq], range(first_key, seq_len))
        keys = keys.repeat_interleave(group, dim=1)
        values = values.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[start:stop].double(), keys) * batch.scale
        if scoring.soft_cap is not None:
            scores = scoring.soft_cap * (scores / scoring.soft_cap).tanh()
        query_positions = torch.arange(first_position, seq_len, device=query.device)[:, None]
        key_positions = torch.arange(first_key, seq_len, device=query.device)[None, :]
        if scoring.alibi_slopes is not None:
            scores -= scoring.alibi_slopes.double()[:, None, None] * (query_positions - key_positions)
        unseen = key_positions > query_positions
        if window is not None:
            unseen |= key_positions <= query_positions - window
        scores = scores.masked_fill(unseen, float("-inf"))
        if scoring.sinks is not None:  # a last key that everybody sees, without a value
            sinks = scoring.sinks.double()[:, None, None].expand(-1, stop - start, 1)
            scores, unseen = torch.cat([scores, sinks], 2), torch.nn.functional.pad(unseen, (0, 1), value=True)
            values = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, 1))
        if lse is not None:
            lse[start:stop] = scores.logsumexp(dim=-1).t()
        weights = scores.softmax(dim=-1).masked_fill(unseen, 0.0)
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def dequantised(kv: Tensor, kv_scales: Tensor | None) -> Tensor:
    """The values that `kv` stands for, in float64.

    :param kv: `[num_blocks, 2, tokens_per_block, num_kv_heads, head_dim]`.
    :param kv_scales: `[num_blocks, 2, tokens_per_block, num_kv_heads]`, or `[2]`, or None, which stands for 1.
    """
    if kv_scales is None:
        return kv.double()
    return kv.double() * kv_scales.double().view((2, 1, 1, 1) if kv_scales.dim() == 1 else (*kv_scales.shape, 1))


def merge_states_reference(parts: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """What `kvtier_kernels.attention.merge_states.merge_states` gives, `out` and `lse`, in float64."""
    counted = part_lse != -torch.inf
    wide_lse = part_lse.double()
    lse = wide_lse.logsumexp(dim=2)
    base = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(2)
    weights = (wide_lse - base).exp()
    states = parts.double().masked_fill(~counted.unsqueeze(3), 0.0)
    return torch.einsum("rhs,rhsd->rhd", weights, states), lse


def kv_write_reference(kv_layer: Tensor, key: Tensor, value: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
    """Token by token what `kvtier_kernels.writes.kv_write.kv_write` does."""
    for row in range(key.size(0)):
        block, offset = int(block_ids[row]), int(offsets[row])
        kv_layer[block, 0, offset] = key[row]
        kv_layer[block, 1, offset] = value[row]


def block_copy_reference(source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor) -> None:
    """Row by row what `kvtier_kernels.copies.block_copy.block_copy` does."""
    for from_row, to_row in zip(source_rows.tolist(), target_rows.tolist(), strict=True):
        target[to_row].view(torch.uint8)[:] = source[from_row].view(torch.uint8)


def part_copy_reference(
    parts: Sequence[Tensor], block_ids: Tensor, staging: Tensor, staging_rows: Tensor, *, gather: bool
) -> None:
    """Part by part what `kvtier_kernels.copies.part_copy.part_copy` does."""
    if staging.dim() == 2:
        staging = staging.view(staging.size(0), len(parts), -1).transpose(0, 1)
    for part, staged in zip(parts, staging, strict=True):
        for block, row in zip(block_ids.tolist(), staging_rows.tolist(), strict=True):
            source, target = (part[block], staged[row]) if gather else (staged[row], part[block])
            target.copy_(source)


def block_checksum_reference(parts: Sequence[Tensor], block_ids: Tensor, prefixes: Tensor) -> Tensor:
    """xxh3_64 of each prefix and the block behind it, by xxHash itself, as signed integers: int64 `[n]`, on the CPU.

    :param parts: uint8 `[num_blocks, part_bytes]` each, of any sizes.
    :param prefixes: int64 `[n, prefix_words]`.
    """
    import xxhash  # not everywhere beside torch, and needed for nothing else here

    sums = []
    for block, prefix in zip(block_ids.tolist(), prefixes.cpu(), strict=True):
        hasher = xxhash.xxh3_64(prefix.numpy().data)
        for part in parts:
            hasher.update(part[block].cpu().numpy().data)
        sums.append(hasher.intdigest())
    return torch.from_numpy(np.array(sums, dtype=np.uint64).view(np.int64))


def _gather(kv_layer: Tensor, kv_scales: Tensor | None, block_table: Tensor, positions: range) -> tuple[Tensor, Tensor]:
    """Keys and values `[len(positions), num_kv_heads, head_dim]` of one sequence, in float64."""
    tokens_per_block = kv_layer.size(2)
    blocks = block_table[positions.start // tokens_per_block : -(-positions.stop // tokens_per_block)].long()
    scales = kv_scales if kv_scales is None or kv_scales.dim() == 1 else kv_scales[blocks]
    values = dequantised(kv_layer[blocks], scales)
    first = positions.start % tokens_per_block
    keys_and_values = values.transpose(0, 1).flatten(1, 2)[:, first : first + len(positions)]
    return keys_and_values[0], keys_and_values[1]
