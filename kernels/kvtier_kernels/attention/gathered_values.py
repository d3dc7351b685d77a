"""Keys and values of sequences, gathered from their blocks on CPU."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class GatheredValues:
    """Where the keys and values of some sequences lie; the same in all layers. One thread."""

    block_ids: Tensor
    """int32 or int64 `[seqs, blocks]`. What stands there for no block of a sequence is behind its `num_tokens`."""
    tokens: slice
    """Which of the tokens of these blocks, in order, are wanted."""
    num_tokens: Sequence[int] = ()
    """How many of the blocks' tokens each sequence has; the others are zeros. Empty: all of `tokens` are a sequence's
    own."""

    @classmethod
    def padded(
        cls, block_tables: Tensor, seqs: Sequence[int], num_tokens: Sequence[int], room: int, tokens_per_block: int
    ) -> "GatheredValues":
        """The tokens of these sequences, with zeros up to `room` tokens.

        :param block_tables: of a batch, of which `seqs` are rows; `num_tokens`, at most `room`, one for each of `seqs`.
        """
        num_blocks = -(-room // tokens_per_block)
        tables = block_tables[list(seqs), :num_blocks]
        tables = torch.nn.functional.pad(tables, (0, num_blocks - tables.size(1)))
        # What stands in a table behind a sequence's blocks need not be a block.
        firsts = torch.arange(0, num_blocks * tokens_per_block, tokens_per_block)
        return cls(tables.masked_fill_(firsts >= torch.tensor(num_tokens)[:, None], 0), slice(room), num_tokens)

    def of(self, kv_layer: Tensor, kv_scales: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, `[seqs, num_kv_heads, tokens, head_dim]` of `dtype`, fresh.

        :param kv_layer: as `AttentionBatch.check` describes it; `kv_scales` likewise.
        :raises IndexError: on a block id that does not exist.
        """
        return self._of(kv_layer, kv_scales, 0, dtype), self._of(kv_layer, kv_scales, 1, dtype)

    def _of(self, kv_layer: Tensor, kv_scales: Tensor | None, part: int, dtype: torch.dtype) -> Tensor:
        values = self._gathered(kv_layer[:, part])
        if kv_scales is not None:
            scales = kv_scales[part] if kv_scales.dim() == 1 else self._gathered(kv_scales[:, part]).unsqueeze(-1)
            values = values.float() * scales
        values = values.to(dtype)
        for index, num_tokens in enumerate(self.num_tokens):
            values[index, num_tokens:] = 0
        return values.transpose(1, 2)

    def _gathered(self, blocks: Tensor) -> Tensor:
        """`[seqs, tokens, num_kv_heads, ...]`, a view of fresh memory."""
        num_seqs, num_blocks = self.block_ids.shape
        gathered = torch.empty((num_seqs * num_blocks, *blocks.shape[1:]), dtype=blocks.dtype)
        # Into a buffer of our own: twenty times as fast as letting index_select allocate for a strided source.
        torch.index_select(blocks, 0, self.block_ids.view(-1), out=gathered)
        return gathered.view(num_seqs, num_blocks * blocks.size(1), *blocks.shape[2:])[:, self.tokens]
