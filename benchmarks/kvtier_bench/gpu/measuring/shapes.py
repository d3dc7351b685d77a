"""Tensors to measure with: Llama 3 8B's attention, or as little as the interpreter takes in a second."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtier_bench.gpu.measuring.setting import Setting
from kvtier_kernels import AttentionBatch


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def kv_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """Keys and values."""
        return 2 * num_tokens * self.num_kv_heads * self.head_dim * element_bytes


LLAMA_8B, TINY = Heads(32, 8, 128), Heads(4, 2, 16)


def heads_of(setting: Setting) -> Heads:
    return TINY if setting.tiny else LLAMA_8B


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors of paged attention, on the device."""

    query: Tensor
    kv_layer: Tensor
    block_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor

    def arguments(self, heads: Heads, **options: Any) -> tuple[Tensor, Tensor, AttentionBatch]:
        """The arguments that functions of attention take. `options` are further fields of `AttentionBatch`."""
        index = self.block_tables, self.query_starts, self.seq_lens
        return self.query, self.kv_layer, AttentionBatch(*index, scale=heads.scale, **options)


def paged(
    setting: Setting, heads: Heads, *, num_seqs: int, new: int, cached: int, tokens_per_block: int = 16, shared: int = 0
) -> Batch:
    """Sequences of the same length, whose blocks lie anywhere, each block once.

    :param new: queries of each.
    :param cached: keys of each before them.
    :param shared: leading keys, whole blocks, that all sequences have in common: the very same blocks.
    """
    device, generator = setting.device, torch.Generator().manual_seed(0)
    blocks_each = -(-(new + cached) // tokens_per_block)
    num_shared = shared // tokens_per_block
    own = blocks_each - num_shared
    order = torch.randperm(num_shared + num_seqs * own, generator=generator).int()
    tables = torch.cat([order[:num_shared].expand(num_seqs, -1), order[num_shared:].view(num_seqs, own)], dim=1)
    shape = (len(order), 2, tokens_per_block, heads.num_kv_heads, heads.head_dim)
    query_shape = (num_seqs * new, heads.num_heads, heads.head_dim)
    return Batch(
        query=torch.randn(query_shape, dtype=setting.dtype, device=device),
        kv_layer=torch.randn(shape, dtype=setting.dtype, device=device),
        block_tables=tables.contiguous().to(device),
        query_starts=torch.arange(0, num_seqs * new + 1, new, dtype=torch.int32, device=device),
        seq_lens=torch.full((num_seqs,), new + cached, dtype=torch.int32, device=device),
    )


def sequence(batch: Batch, index: int) -> Batch:
    """One sequence of a batch, over the same keys."""
    first, last = batch.query_starts[index : index + 2].tolist()
    starts = batch.query_starts.new_tensor([0, last - first])
    one = slice(index, index + 1)
    return Batch(batch.query[first:last], batch.kv_layer, batch.block_tables[one], starts, batch.seq_lens[one])


def unpaged(batch: Batch, block_tokens: int) -> Batch:
    """The one sequence of a batch with all its keys in a single block.

    :param block_tokens: of that block, at least as many as there are: kernels are compiled for a size of blocks.
    """
    _, _, _, num_kv_heads, head_dim = batch.kv_layer.shape
    in_order = batch.kv_layer[batch.block_tables[0].long()].transpose(0, 1).flatten(1, 2)
    whole = in_order.new_zeros((1, 2, block_tokens, num_kv_heads, head_dim))
    whole[0, :, : in_order.size(1)] = in_order
    table = torch.zeros((1, 1), dtype=batch.block_tables.dtype, device=batch.query.device)
    return Batch(batch.query, whole, table, batch.query_starts, batch.seq_lens)


def dense(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The one sequence of a batch as torch takes it: query, key and value `[1, heads, tokens, head_dim]`."""
    num_keys = int(batch.seq_lens[0])
    keys, values = batch.kv_layer[batch.block_tables[0].long()].transpose(0, 1).flatten(1, 2)[:, :num_keys]
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0).contiguous() for tensor in (batch.query, keys, values))
    return query, key, value
