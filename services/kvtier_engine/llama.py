"""The forward pass of a Llama, Qwen2 or Qwen3 model over paged KV."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvtier_engine.model_config import ModelConfig
from kvtier_engine.paged_kv import PagedKV
from kvtier_engine.rope import RopeTable, rotate
from kvtier_engine.weights import LayerWeights, LlamaWeights
from kvtier_kernels import SharedPrefixes, find_shared_prefixes, kv_write, paged_attention


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one sequence, and where the sequence lives."""

    token_ids: Sequence[int]
    """At least one, the ones to compute now."""
    start: int
    """Position of `token_ids[0]`: how many tokens of the sequence have KV in the blocks already."""
    block_table: Sequence[int]
    """Blocks of the sequence in order; enough for `start + len(token_ids)` tokens."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Chunks as the tensors that kernels take."""

    token_ids: Tensor
    positions: Tensor
    block_ids: Tensor
    offsets: Tensor
    block_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    max_seq_len: int
    """The largest of `seq_lens`, known without asking the device."""
    num_keys: int
    """Their sum."""
    prefixes: SharedPrefixes | None
    """Of chunks of one token each that share blocks, where that is worth while."""


class LlamaModel:
    """Weights and arithmetic; holds no state of any sequence. One thread at a time calls `forward`."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights) -> None:
        self._config = config
        self._weights = weights
        with torch.device(weights.embedding.device):  # what it allocates, it allocates there
            self._rope = RopeTable(config, weights.embedding.dtype)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], kv: PagedKV) -> Tensor:
        """Computes the chunks' tokens, writes their KV into their blocks, and returns what follows each chunk.

        The same chunk over the same cached values gives the same bits, whichever blocks hold it, as
        long as the chunks beside it have the same lengths and, on CUDA, share as many blocks.

        :param chunks: of distinct sequences, at least one.
        :param kv: of this model's geometry and dtype, on the weights' device. Only the blocks of new tokens change.
        :returns: float32 `[len(chunks), vocab_size]`, on that device: logits after the last token of each chunk.
        """
        weights, config = self._weights, self._config
        batch = _gather_batch(chunks, kv, config.num_attention_heads)
        cos, sin = self._rope.at(batch.positions)
        hidden = F.embedding(batch.token_ids, weights.embedding)
        for index, layer in enumerate(weights.layers):
            normed = _rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
            hidden += self._attention(layer, normed, cos, sin, kv.layer(index), batch)
            normed = _rms_norm(hidden, layer.post_attention_norm, config.rms_norm_eps)
            hidden += _mlp(layer, normed)
        last = _rms_norm(hidden[batch.query_starts[1:].long() - 1], weights.final_norm, config.rms_norm_eps)
        return F.linear(last, weights.lm_head).float()

    def _attention(
        self, layer: LayerWeights, normed: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, batch: _Batch
    ) -> Tensor:
        heads, kv_heads, head_dim = (
            self._config.num_attention_heads,
            self._config.num_key_value_heads,
            self._config.head_dim,
        )
        fused = F.linear(normed, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, head_dim)
        query_key = fused[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            query_key = _rms_norm(query_key, layer.qk_norm, self._config.rms_norm_eps)
        rotated = rotate(query_key, cos, sin)
        kv_write(kv_layer, rotated[:, heads:], fused[:, heads + kv_heads :], batch.block_ids, batch.offsets)
        attended = paged_attention(
            rotated[:, :heads],
            kv_layer,
            batch.block_tables,
            batch.query_starts,
            batch.seq_lens,
            scale=head_dim**-0.5,
            max_seq_len=batch.max_seq_len,
            num_keys=batch.num_keys,
            prefixes=batch.prefixes,
        )
        return F.linear(attended.flatten(1), layer.attention_output)


def _mlp(layer: LayerWeights, normed: Tensor) -> Tensor:
    gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate).mul_(up), layer.down)


def _rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Hugging Face's order of roundings, in three passes: twice as fast as `F.rms_norm` on CPU."""
    wide = hidden.float()
    norms: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norms.square_().div_(hidden.size(-1)).add_(eps).rsqrt_()
    return (wide * scale).to(hidden.dtype).mul_(weight)


def _gather_batch(chunks: Sequence[Chunk], kv: PagedKV, num_heads: int) -> _Batch:
    tokens_per_block, device = kv.tokens_per_block, kv.tensor.device
    lengths = [len(chunk.token_ids) for chunk in chunks]
    widest = max(len(chunk.block_table) for chunk in chunks)
    tables = torch.zeros((len(chunks), widest), dtype=torch.int64)
    positions, block_ids = [], []
    for row, chunk in enumerate(chunks):
        tables[row, : len(chunk.block_table)] = torch.as_tensor(chunk.block_table, dtype=torch.int64)
        where = torch.arange(chunk.start, chunk.start + lengths[row])
        positions.append(where)
        block_ids.append(tables[row].index_select(0, where // tokens_per_block))
    all_positions = torch.cat(positions)
    seq_lens = torch.tensor([chunk.start + length for chunk, length in zip(chunks, lengths, strict=True)])
    decodes = max(lengths) == 1

    def there(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    return _Batch(
        token_ids=there(torch.cat([torch.as_tensor(chunk.token_ids, dtype=torch.int64) for chunk in chunks])),
        positions=there(all_positions),
        block_ids=there(torch.cat(block_ids)),
        offsets=there(all_positions % tokens_per_block),
        block_tables=there(tables),
        query_starts=there(torch.tensor([0, *lengths]).cumsum(0)),
        seq_lens=there(seq_lens),
        max_seq_len=int(seq_lens.max()),
        num_keys=int(seq_lens.sum()),
        prefixes=find_shared_prefixes(tables, seq_lens, kv.layer(0), num_heads) if decodes else None,
    )
