"""Keys and values of sequences, gathered from their blocks on CPU."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class GatheredValues:
    """The places of the keys and values of some sequences, which are the same in all layers. One thread."""

    block_ids: Tensor
    """int32 or int64 `[seqs, blocks]`. What stands there for no block of a sequence is behind its `num_tokens`."""
    tokens: slice
    """Which of the tokens of these blocks, in order, are wanted."""
    num_tokens: Sequence[int] = ()
    """How many of `tokens` each sequence has; the others are zeros. Empty: all of `tokens` are a sequence's own."""
    num_unseen: Sequence[int] = ()
    """How many of the first of `tokens` are zeros, for each sequence. Empty: none."""

    @classmethod
    def padded(
        cls,
        block_tables: Tensor,
        seqs: Sequence[int],
        num_tokens: Sequence[int],
        span: tuple[int, int],
        tokens_per_block: int,
        first_seen: Sequence[int] = (),
    ) -> "GatheredValues":
        """The tokens of these sequences at these positions, with zeros for those that a sequence does not have.

        :param block_tables: of a batch, of which `seqs` are rows; `num_tokens`, one for each of `seqs`.
        :param span: from which position to which, behind all of a sequence's tokens.
        :param first_seen: tokens before these are zeros, too, one for each of `seqs`; empty: none are.
        """
        first_block, num_blocks = span[0] // tokens_per_block, -(-span[1] // tokens_per_block)
        before, first_seen = first_block * tokens_per_block, first_seen or [0] * len(seqs)
        tables = block_tables[list(seqs), first_block:num_blocks]
        tables = torch.nn.functional.pad(tables, (0, num_blocks - first_block - tables.size(1)))
        # What stands in a table before what is seen, and behind a sequence's blocks, need not be a block.
        firsts = torch.arange(before, num_blocks * tokens_per_block, tokens_per_block)
        is_none = firsts >= torch.tensor(num_tokens)[:, None]
        is_none |= firsts + tokens_per_block <= torch.tensor(first_seen)[:, None]
        return cls(
            tables.masked_fill_(is_none, 0),
            slice(span[0] - before, span[1] - before),
            [num - span[0] for num in num_tokens],
            [max(0, first - span[0]) for first in first_seen],
        )

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
        for index, num_unseen in enumerate(self.num_unseen):
            values[index, :num_unseen] = 0
        return values.transpose(1, 2)

    def _gathered(self, blocks: Tensor) -> Tensor:
        """`[seqs, tokens, num_kv_heads, ...]`, a view of fresh memory."""
        num_seqs, num_blocks = self.block_ids.shape
        gathered = torch.empty((num_seqs * num_blocks, *blocks.shape[1:]), dtype=blocks.dtype)
        # Into a buffer of our own: twenty times as fast as letting index_select allocate for a strided source.
        torch.index_select(blocks, 0, self.block_ids.view(-1), out=gathered)
        return gathered.view(num_seqs, num_blocks * blocks.size(1), *blocks.shape[2:])[:, self.tokens]
