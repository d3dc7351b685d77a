"""The forward pass of a Llama, Qwen or Gemma model over paged KV."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier_engine.model.model_config import ModelConfig
from kvtier_engine.model.paged_kv import PagedKV
from kvtier_engine.model.products import InvariantProducts, PlainProducts, Products
from kvtier_engine.model.rope import RopeTable, rotate
from kvtier_engine.model.weights import LayerWeights, LlamaWeights
from kvtier_kernels import AttentionBatch, LayerAttention, Scoring, find_shared_prefixes, step_attention
from kvtier_kernels.attention.attention_cpu_trial import rows_are_alike

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one sequence, and where the sequence lives."""

    token_ids: Sequence[int]
    """The tokens to compute now, at least one."""
    start: int
    """Position of `token_ids[0]`: how many tokens of the sequence have KV in the blocks already."""
    block_table: Sequence[int]
    """Blocks of the sequence in order; enough for `start + len(token_ids)` tokens."""
    adapter: str | None = None
    """The name of the LoRA adapter that it is computed with: `AdaptedModel`. None: with none."""
    windowed_tables: Sequence[Sequence[int]] = ()
    """Block tables of the windowed groups of the KV; entries for blocks that the window has left are not read."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a forward pass takes, on the device."""

    token_ids: Tensor
    """int64 `[num_tokens]`, as `positions` is: the tokens of one sequence after those of another."""
    positions: Tensor
    attend: LayerAttention
    """Writes and reads the sequences' KV."""
    last_rows: Tensor | None
    """int64 `[num_seqs]`: which tokens are the last of their sequences. None where each sequence has one token."""
    attend_in_window: Sequence[LayerAttention] = ()
    """`attend` of the windowed layers of each windowed group, or of all of them where KV has one group."""


class LlamaModel:
    """Weights and arithmetic; holds no state of any sequence. One thread at a time calls `forward`."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights, *, batch_invariant: bool = False) -> None:
        """
        :param batch_invariant: a token's KV and logits have the same bits whatever is computed beside it, and however
            the tokens before it came into their blocks.
        :raises ConfigError: this machine's products of matrices cannot be made so.
        """
        self.batch_invariant = batch_invariant
        self._products: Products = (
            _invariant(config, weights) if batch_invariant else PlainProducts(gelu=config.is_gemma)
        )
        self._config = config
        self._weights = weights
        with torch.device(weights.embedding.device):  # what it allocates, it allocates there
            self._rope = RopeTable(config, weights.embedding.dtype)
            theta = config.windowed_rope_theta
            self._windowed_rope = self._rope if theta is None else RopeTable(config, weights.embedding.dtype, theta)
        self._is_windowed = config.windowed_layers or (False,) * config.num_hidden_layers
        self.has_windows = any(self._is_windowed)
        """Whether some layers see the last tokens only."""

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], kv: PagedKV) -> Tensor:
        """Computes the chunks' tokens, writes their KV into their blocks, and returns what follows each chunk.

        The same chunk over the same cached values gives the same bits, whichever blocks hold it, as
        long as the chunks beside it have the same lengths and, on CUDA, share as many blocks; where the model is
        `batch_invariant`, whatever is beside it, and however the sequence was cut into chunks.

        :param chunks: of distinct sequences, at least one.
        :param kv: of this model's geometry and dtype, on the weights' device. Only the blocks of new tokens change.
        :returns: float32 `[len(chunks), vocab_size]`, on that device: logits after the last token of each chunk.
        """
        return self.compute(self._gather(chunks, kv), kv)

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return self._weights.embedding.device

    @property
    def scale(self) -> float:
        """The factor on the scores of attention."""
        scale = self._config.attention_scale
        return float(self._config.head_dim**-0.5) if scale is None else scale

    @property
    def num_heads(self) -> int:
        """The number of query heads."""
        return self._config.num_attention_heads

    def compute(self, batch: Batch, kv: PagedKV) -> Tensor:
        """`forward` of a batch whose tensors are there. Call it in inference mode.

        Nothing of it waits for the device, and what it launches depends on the tensors' shapes and the batch's `attend`
        alone.
        """
        weights, config = self._weights, self._config
        everywhere = (*self._rope.at(batch.positions), batch.attend)
        in_window = []
        if batch.attend_in_window:
            rope = self._windowed_rope.at(batch.positions)
            in_window = [(*rope, attend) for attend in batch.attend_in_window]
        hidden = F.embedding(batch.token_ids, weights.embedding)
        if config.is_gemma:
            hidden *= torch.tensor(config.hidden_size**0.5, dtype=hidden.dtype)
        for index, layer in enumerate(weights.layers):
            # Where KV has one group, that is 0, and `in_window` has one entry, which is also its last one.
            cos, sin, attend = in_window[kv.groups.group(index) - 1] if self._is_windowed[index] else everywhere
            normed = self._products.norm(hidden, layer.input_norm, config.rms_norm_eps)
            attended = self._attention(layer, normed, cos, sin, kv.layer(index), attend)
            hidden += self._normed(attended, layer.attention_output_norm)
            normed = self._products.norm(hidden, layer.pre_mlp_norm, config.rms_norm_eps)
            hidden += self._normed(self._products.gated(normed, layer.gate_up, layer.down), layer.mlp_output_norm)
        last = hidden if batch.last_rows is None else hidden[batch.last_rows]
        last = self._products.norm(last, weights.final_norm, config.rms_norm_eps)
        logits, cap = self._products.linear(last, weights.lm_head).float(), config.final_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _normed(self, added: Tensor, weight: Tensor | None) -> Tensor:
        return added if weight is None else self._products.norm(added, weight, self._config.rms_norm_eps)

    def _attention(
        self, layer: LayerWeights, normed: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, attend: LayerAttention
    ) -> Tensor:
        heads, kv_heads, head_dim = (
            self._config.num_attention_heads,
            self._config.num_key_value_heads,
            self._config.head_dim,
        )
        fused = self._products.linear(normed, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, head_dim)
        query_key = fused[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            query_key = self._products.norm(query_key, layer.qk_norm, self._config.rms_norm_eps)
        rotated = rotate(query_key, cos, sin)
        attended = attend(kv_layer, rotated[:, :heads], rotated[:, heads:], fused[:, heads + kv_heads :])
        return self._products.linear(attended.flatten(1), layer.attention_output)

    def _gather(self, chunks: Sequence[Chunk], kv: PagedKV) -> Batch:
        tokens_per_block, device = kv.tokens_per_block, kv.tensor.device
        lengths = [len(chunk.token_ids) for chunk in chunks]
        starts = [0, *itertools.accumulate(lengths)]
        # By numpy: a list goes into an array of it in a tenth of the time that a tensor takes.
        token_ids, positions, rows = (np.empty(starts[-1], np.int64) for _ in range(3))
        for row, chunk in enumerate(chunks):
            new = slice(starts[row], starts[row + 1])
            token_ids[new], rows[new] = chunk.token_ids, row
            positions[new] = np.arange(chunk.start, chunk.start + lengths[row])
        blocks, offsets = np.divmod(positions, tokens_per_block)
        tables = _table([chunk.block_table for chunk in chunks])
        seq_lens = torch.tensor([chunk.start + length for chunk, length in zip(chunks, lengths, strict=True)])
        tables_here, decodes = torch.from_numpy(tables), max(lengths) == 1

        def there(array: Numbers) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        query_starts = there(np.array(starts))
        prefixes = None
        if decodes and not self.batch_invariant:
            prefixes = find_shared_prefixes(tables_here, seq_lens, kv.layer(0), self.num_heads)
        offsets_there = there(offsets)
        attention = AttentionBatch(
            there(tables),
            query_starts,
            there(seq_lens.numpy()),
            scale=self.scale,
            scoring=Scoring(self._config.attention_soft_cap),
            max_seq_len=int(seq_lens.max()),
            num_keys=int(seq_lens.sum()),
            prefixes=prefixes,
            invariant=self.batch_invariant,
        )

        def attend(tables: Numbers, attention: AttentionBatch) -> LayerAttention:
            return step_attention((there(tables[rows, blocks]), offsets_there), attention)

        in_window: list[LayerAttention] = []
        if self.has_windows:
            windowed = replace(attention, window=self._config.sliding_window, prefixes=None)
            of_groups = [tables]
            if kv.groups.num_windowed:
                of_groups = list(map(_table, zip(*(chunk.windowed_tables for chunk in chunks), strict=True)))
            in_window = [attend(table, replace(windowed, block_tables=there(table))) for table in of_groups]
        return Batch(
            token_ids=there(token_ids),
            positions=there(positions),
            attend=attend(tables, attention),
            last_rows=None if decodes else query_starts[1:] - 1,
            attend_in_window=in_window,
        )


def over_all_blocks(kv: PagedKV, token_ids: Sequence[int], start: int = 0) -> Chunk:
    """Returns a chunk to compute for its time or its kernels alone, into blocks that nobody has: any of them."""
    every = range(kv.num_blocks)
    return Chunk(token_ids, start, every, windowed_tables=[every] * kv.groups.num_windowed)


def _table(of_chunks: Sequence[Sequence[int]]) -> Numbers:
    """`[num_seqs, most blocks]`: a row for each chunk."""
    table = np.zeros((len(of_chunks), max(map(len, of_chunks))), np.int64)
    for row, blocks in enumerate(of_chunks):
        table[row, : len(blocks)] = blocks
    return table


def _invariant(config: ModelConfig, weights: LlamaWeights) -> Products:
    """Products whose bits do not depend on how many tokens there are.

    :raises ConfigError: they, or attention, cannot be had so.
    """
    if weights.embedding.device.type == "cuda":
        # Imported here: triton is not everywhere to be had.
        from kvtier_engine.model.triton_products import TritonProducts

        return TritonProducts(gelu=config.is_gemma)
    if config.attention_soft_cap is not None or config.final_soft_cap is not None:
        raise ConfigError("engine.batch_invariant: not with soft caps (Gemma 2) on the CPU; set it to false")
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    if not rows_are_alike(*heads, weights.embedding.dtype):
        raise ConfigError(
            "engine.batch_invariant: in this machine's attention a query's last bits depend on how many there are; "
            "set it to false"
        )
    return InvariantProducts(weights, gelu=config.is_gemma)
