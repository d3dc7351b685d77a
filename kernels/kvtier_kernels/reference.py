"""Every operation in plain torch: slow, easy to read, the oracle of all faster paths."""

from collections.abc import Sequence

import torch
from torch import Tensor


def paged_attention_reference(
    query: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    lse: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence's newest tokens over all its keys; arithmetic in float32.

    Arguments as in `kvtier_kernels.attention.paged_attention`. Returns float32 `[num_tokens, num_heads,
    head_dim]`, whatever the dtype of the inputs. A query that sees no key, in a sequence with more queries than
    keys, gets zeros. `lse`, float32 `[num_tokens, num_heads]`, takes the natural log-sum-exp of each query's scores.
    """
    group = query.size(1) // kv_layer.size(3)
    out = torch.full(query.shape, float("nan"), dtype=torch.float32, device=query.device)
    for seq in range(seq_lens.numel()):
        start, stop = int(query_starts[seq]), int(query_starts[seq + 1])
        seq_len = int(seq_lens[seq])
        keys, values = _gather(kv_layer, block_tables[seq], seq_len)
        keys = keys.repeat_interleave(group, dim=1)
        values = values.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[start:stop].float(), keys) * scale
        query_positions = torch.arange(seq_len - (stop - start), seq_len, device=query.device)
        key_positions = torch.arange(seq_len, device=query.device)
        future = key_positions[None, :] > query_positions[:, None]
        scores = scores.masked_fill(future, float("-inf"))
        if lse is not None:
            lse[start:stop] = scores.logsumexp(dim=-1).t()
        weights = scores.softmax(dim=-1).masked_fill(future, 0.0)
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def merge_states_reference(parts: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """What `kvtier_kernels.merge_states.merge_states` gives, `out` and `lse`, in float64."""
    counted = part_lse != -torch.inf
    wide_lse = part_lse.double()
    lse = wide_lse.logsumexp(dim=2)
    base = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(2)
    weights = (wide_lse - base).exp()
    states = parts.double().masked_fill(~counted.unsqueeze(3), 0.0)
    return torch.einsum("rhs,rhsd->rhd", weights, states), lse


def kv_write_reference(kv_layer: Tensor, key: Tensor, value: Tensor, block_ids: Tensor, offsets: Tensor) -> None:
    """Token by token what `kvtier_kernels.write.kv_write` does."""
    for row in range(key.size(0)):
        block, offset = int(block_ids[row]), int(offsets[row])
        kv_layer[block, 0, offset] = key[row]
        kv_layer[block, 1, offset] = value[row]


def block_copy_reference(source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor) -> None:
    """Row by row what `kvtier_kernels.block_copy.block_copy` does."""
    for from_row, to_row in zip(source_rows.tolist(), target_rows.tolist(), strict=True):
        target[to_row].view(torch.uint8)[:] = source[from_row].view(torch.uint8)


def part_copy_reference(
    parts: Sequence[Tensor], block_ids: Tensor, staging: Tensor, staging_rows: Tensor, *, gather: bool
) -> None:
    """Part by part what `kvtier_kernels.part_copy.part_copy` does."""
    for block, row in zip(block_ids.tolist(), staging_rows.tolist(), strict=True):
        columns = torch.split(staging[row], [part.size(1) for part in parts])
        for part, column in zip(parts, columns, strict=True):
            source, target = (part[block], column) if gather else (column, part[block])
            target.copy_(source)


def _gather(kv_layer: Tensor, block_table: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[seq_len, num_kv_heads, head_dim]` of one sequence, in float32."""
    tokens_per_block = kv_layer.size(2)
    rows = [
        kv_layer[int(block_table[position // tokens_per_block]), :, position % tokens_per_block].float()
        for position in range(seq_len)
    ]
    keys_and_values = torch.stack(rows)
    return keys_and_values[:, 0], keys_and_values[:, 1]
