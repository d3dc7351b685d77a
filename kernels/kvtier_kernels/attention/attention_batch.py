"""What attention over paged KV is told of a batch: described and checked here, for all functions that compute it."""

import math
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from kvtier_kernels.arguments import check_index, check_kv_layer, check_kv_scales, check_lse, check_rows
from kvtier_kernels.attention.shared_prefixes import SharedPrefixes
from kvtier_kernels.scoring import PLAIN, Scoring

_MAX_WINDOW = 2**30
"""Kernels count keys in 32 bits, also those that a window reaches before the first one."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """Sequences whose newest tokens attend to all their keys, and how they do. It can be the same in all layers.

    What differs by layer stands beside it: `query`, `kv_layer`, `kv_scales` and `lse`, which `check` describes. Making
    a batch checks and copies nothing. The tensors stay the caller's, who may write other values into them between two
    launches, as a replayed CUDA graph needs it.
    """

    block_tables: Tensor
    """int32 or int64 `[num_seqs, max_blocks]`, contiguous, on `kv_layer`'s device, as are the next two; entries beyond
    a sequence's blocks are not read, nor those wholly before what `window` lets its queries see."""
    query_starts: Tensor | None
    """int32 or int64 `[num_seqs + 1]`, contiguous, from 0 to num_tokens, strictly rising: where in `query` each
    sequence begins. None where each sequence has one query; `prefix_prefill` needs it."""
    seq_lens: Tensor
    """int32 or int64 `[num_seqs]`, contiguous: keys of each sequence, its new tokens among them; at least its number of
    queries."""
    _: KW_ONLY
    scale: float
    """Factor on the scores, usually `head_dim ** -0.5`; positive."""
    window: int | None = None
    """A query sees this many keys, its own and those right before; all when None."""
    scoring: Scoring = PLAIN
    """What becomes of scores before the softmax."""
    max_seq_len: int | None = None
    """The most keys of a sequence. It is a hint for how work is split, and costs time where it is wrong; what
    `block_tables` has room for when None."""
    num_keys: int | None = None
    """Keys of all sequences together. Only a hint, likewise; all have as many when None."""
    prefixes: SharedPrefixes | None = None
    """What `find_shared_prefixes` says of this batch, whose sequences have one query each; on `kv_layer`'s device. Only
    how it is computed depends on it. Not used on CPU, nor with `window` or slopes."""
    invariant: bool = False
    """Whether the bits of a query's result depend on its own keys alone: not on the queries and sequences beside it,
    nor on how many of its keys are new. Not on CPU together with a `scoring`; on CUDA it takes longer,
    decodes of few long sequences above all, and `prefixes` are not used."""

    def starts_on_host(self) -> list[int]:
        """Returns `query_starts` as numbers, those of one query per sequence where it is None. Waits for its device."""
        if self.query_starts is None:
            return list(range(self.seq_lens.numel() + 1))
        starts: list[int] = self.query_starts.tolist()
        return starts

    def with_starts(self) -> "AttentionBatch":
        """The batch with `query_starts`, those of one query per sequence where it has none. Waits for nothing."""
        if self.query_starts is not None:
            return self
        return replace(self, query_starts=torch.arange(len(self.seq_lens) + 1, device=self.seq_lens.device))

    def check(self, query: Tensor, kv_layer: Tensor, kv_scales: Tensor | None, lse: Tensor | None) -> None:
        """All fits together: groups of query heads, a table and a length a sequence. Looks at no value on a device.

        :param query: `[num_tokens, num_heads, head_dim]`, the sequences one after the other. Only the stride between
            tokens is free.
        :param kv_layer: `[num_blocks, 2, tokens_per_block, num_kv_heads, head_dim]`, one layer's view of the paged KV,
            of query's dtype, or int8 or float8_e4m3fn, where a value is what is stored times its scale. Only the
            stride between blocks is free.
        :param kv_scales: float32 `[num_blocks, 2, tokens_per_block, num_kv_heads]`, a scale per token and head, of
            which only the block stride is free; int8 needs it. For float8_e4m3fn also `[2]`, one for keys and one for
            values, or None, which stands for 1. All are positive.
        :param lse: float32 `[num_tokens, num_heads]`, contiguous; takes the natural log-sum-exp of each query's scores,
            the sink among them; -inf where it saw no key and there is no sink.
        :raises ValueError: names what does not fit, and what it must be.
        """
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale is {self.scale}: needs to be positive")
        if self.window is not None and not 1 <= self.window <= _MAX_WINDOW:
            raise ValueError(f"window is {self.window}: needs 1 to {_MAX_WINDOW:,} keys, or None")
        for name, hint in (("max_seq_len", self.max_seq_len), ("num_keys", self.num_keys)):
            if hint is not None and hint < 0:
                raise ValueError(f"{name} is {hint}: needs at least 0, or None")
        check_kv_layer(kv_layer)
        check_kv_scales(kv_scales, kv_layer)
        if lse is not None:
            check_lse(lse, query)
        check_rows("query", query, kv_layer)
        self.scoring.check(query)
        heads, kv_heads = query.size(1), kv_layer.size(3)
        if kv_heads == 0 or heads == 0 or heads % kv_heads != 0:
            raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} KV heads")
        num_seqs = self.block_tables.size(0)
        check_index("block_tables", self.block_tables, (-1, -1), kv_layer.device)
        check_index("seq_lens", self.seq_lens, (num_seqs,), kv_layer.device)
        if self.query_starts is not None:
            check_index("query_starts", self.query_starts, (num_seqs + 1,), kv_layer.device)
