"""Attention on CPU of which a query's bits depend on its own keys alone.

Keys are cut into tiles at fixed positions. A query meets all tiles up to its own, which is always of full size, in one
call with a mask; behind the first tiles, it meets those before its own without a mask, then its own with one, and the
two states are merged. With a window, it meets its own tile and those that its tile's first query reaches into in one
call with a mask. How many keys are in each call follows from the query's position, not from what is cached or computed
beside it. Torch's fused attention goes through keys in a fixed order; `attention_cpu_trial.rows_are_alike` says whether
it gives a row the same bits whatever the number of rows.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvtier_kernels.attention.attention_batch import AttentionBatch
from kvtier_kernels.attention.gathered_values import GatheredValues

TILE_KEYS = 256
"""Large: decodes go through more padding. Small: a prefill is cut into more parts."""
_MERGED_FROM = 4 * TILE_KEYS
"""Queries of tiles from here on attend the keys before their tile in a call of its own, and the two are merged: a mask
over all keys would take longer. Before it, one call does, which saves most where few queries are computed."""
_MOST_KEYS_TOGETHER = 16_384
"""Keys of several sequences are gathered at once up to so many, which bounds the memory that they take."""
_FLOAT32_ROWS = 64
"""Float32 rows are padded to a multiple of this."""
SPLIT_ROWS = 32
"""The library splits rows into runs of as many, or of multiples."""
_LEAST_ROWS = 4
"""Rows that are left over are padded to as many. A single one goes through products of a matrix with a vector, which
sum in another order; on processors with AVX-512 but without AMX, so do up to three bfloat16 rows."""

_fused_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def padded_keys(num_keys: int) -> int:
    """How many keys whole tiles have room for."""
    return -(-num_keys // TILE_KEYS) * TILE_KEYS


class CpuPart(Protocol):
    """Some queries of a batch, and how they attend. One thread."""

    @property
    def queries(self) -> slice | Tensor:
        """Which of the batch's."""
        ...

    @property
    def values(self) -> GatheredValues:
        """Their keys and values."""
        ...

    def attend(self, query: Tensor, values: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        """Writes to `out`, `[queries of the batch, num_heads, D]` as `query` is; returns the log-sum-exp of its own."""
        ...


def plan_in_tiles(
    batch: AttentionBatch, starts: Sequence[int], lengths: Sequence[int], tokens_per_block: int
) -> list[CpuPart]:
    """Each sequence of several queries alone, and those of one query together with others of as many tiles of keys.

    :param starts: `query_starts` of the batch, and `lengths` its `seq_lens`.
    """
    parts, single, reach = list[CpuPart](), defaultdict[int, list[int]](list), Reach(batch.scale, batch.window)

    def gathered(seqs: Sequence[int], first_query: int, stop: int) -> GatheredValues:
        """What these sequences' queries meet, of which the first stands in the tile of `first_query`."""
        span = reach.first_key(first_query // TILE_KEYS * TILE_KEYS), stop
        num_keys = [lengths[seq] for seq in seqs]
        seen = [reach.first_seen(lengths[seq] - (starts[seq + 1] - starts[seq])) for seq in seqs]
        return GatheredValues.padded(batch.block_tables, seqs, num_keys, span, tokens_per_block, seen)

    for seq, num_keys in enumerate(lengths):
        stop, num_queries = padded_keys(num_keys), starts[seq + 1] - starts[seq]
        if num_queries == 1:
            single[stop].append(seq)
            continue
        values = gathered([seq], num_keys - num_queries, stop)
        attend = functools.partial(attend_in_tiles, reach=reach, num_keys=num_keys)
        parts.append(OneSequence(slice(starts[seq], starts[seq + 1]), values, attend))
    for stop, of_stop in single.items():
        tile = stop - TILE_KEYS
        step = max(1, _MOST_KEYS_TOGETHER // (stop - reach.first_key(tile)))
        for seqs in (of_stop[first : first + step] for first in range(0, len(of_stop), step)):
            places = [lengths[seq] - 1 - tile for seq in seqs]
            rows = torch.tensor([starts[seq] for seq in seqs])
            parts.append(_NewestTokens(rows, gathered(seqs, tile, stop), places, tile, reach))
    return parts


@dataclass(frozen=True, slots=True)
class Reach:
    """How queries attend, and to which keys."""

    scale: float
    window: int | None = None
    """The window of `AttentionBatch`."""

    def first_seen(self, query: int) -> int:
        """The first key that the query at this position sees."""
        return 0 if self.window is None else max(0, query - self.window + 1)

    def first_key(self, tile: int) -> int:
        """The first key that the queries of the tile at this position meet, where a tile begins."""
        return self.first_seen(tile) // TILE_KEYS * TILE_KEYS


@dataclass(frozen=True, slots=True, eq=False)
class OneSequence:
    """Queries of one sequence."""

    queries: slice
    values: GatheredValues
    attend_one: Callable[[Tensor, tuple[Tensor, Tensor], Tensor], Tensor]
    """Attends them: query and out `[queries, num_heads, D]`, keys and values `[1, num_kv_heads, keys, D]`, in the order
    query, (keys, values), out. Returns the log-sum-exp."""

    def attend(self, query: Tensor, values: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        return self.attend_one(query[self.queries], values, out[self.queries])


@dataclass(frozen=True, slots=True, eq=False)
class _NewestTokens:
    """One query each of sequences whose last tile stands at the same position."""

    queries: Tensor
    values: GatheredValues
    places: Sequence[int]
    """The place of each in that tile."""
    tile: int
    reach: Reach

    def attend(self, query: Tensor, values: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        num_kv_heads, head_dim = values[0].size(1), query.size(2)
        group = query.size(1) // num_kv_heads
        mask = _tile_mask(query.dtype, group, self.tile, self.reach).view(TILE_KEYS, 1, group, -1)[self.places]
        rows = query[self.queries].view(len(self.places), num_kv_heads, group, head_dim)
        attended, lse = _attend_tile(rows, values, self.reach, self.tile, mask)
        out[self.queries] = attended.flatten(1, 2)
        return lse.flatten(1, 2)


def attend_in_tiles(
    query: Tensor, values: tuple[Tensor, Tensor], out: Tensor, *, reach: Reach, num_keys: int
) -> Tensor:
    """Attends the newest of `num_keys` tokens of one sequence causally.

    :param query: `[queries, num_heads, D]`, as is `out`.
    :param values: keys and values, `[1, num_kv_heads, keys, D]`: those that the first query's tile meets, and all
        behind them up to `padded_keys(num_keys)`; zeros from `num_keys` on.
    :returns: the log-sum-exp, `[queries, num_heads]`.
    """
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads = values[0].size(1)
    group, before = num_heads // num_kv_heads, num_keys - num_queries
    # [num_kv_heads, queries, group, D]: the heads of one KV head lie side by side.
    grouped = query.view(num_queries, num_kv_heads, group, head_dim).transpose(0, 1)
    attended = out.view(num_queries, num_kv_heads, group, head_dim).transpose(0, 1)
    lse = torch.empty((num_kv_heads, num_queries, group))
    for tile in range(before // TILE_KEYS * TILE_KEYS, num_keys, TILE_KEYS):
        first, last = max(tile, before), min(tile + TILE_KEYS, num_keys)
        here, stop = slice(first - before, last - before), tile + TILE_KEYS - padded_keys(num_keys)
        rows = grouped[:, here].flatten(1, 2).contiguous()
        mask = _tile_mask(query.dtype, group, tile, reach)[(first - tile) * group : (last - tile) * group]
        met = values[0][:, :, : stop or None], values[1][:, :, : stop or None]
        tile_out, tile_lse = _attend_tile(rows[None], met, reach, tile, mask)
        attended[:, here] = tile_out[0].view(num_kv_heads, last - first, group, head_dim)
        lse[:, here] = tile_lse[0].view(num_kv_heads, last - first, group)
    return lse.transpose(0, 1).flatten(1, 2)


def _attend_tile(
    rows: Tensor, values: tuple[Tensor, Tensor], reach: Reach, tile: int, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """`attend_rows` of queries of the tile at this position over keys and values, which end with that tile's."""

    def attend(first: int | None, stop: int | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return attend_rows(rows, values[0][:, :, first:stop], values[1][:, :, first:stop], reach.scale, mask)

    if reach.window is not None or tile < _MERGED_FROM:
        return attend(-(tile + TILE_KEYS - reach.first_key(tile)), None, mask)
    return _merge(attend(None, -TILE_KEYS, None), attend(-TILE_KEYS, None, mask))


def attend_rows(
    rows: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`[seqs, num_kv_heads, rows, D]`, as `rows` is, and the log-sum-exp.

    :param mask: `[rows, keys]`, or `[seqs, 1, rows, keys]`.
    """
    num_rows, missing = rows.size(2), _padding(rows)
    if missing:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
        mask = None if mask is None else torch.nn.functional.pad(mask, (0, 0, 0, missing))
    mask = mask[None, None] if mask is not None and mask.dim() == 2 else mask
    out, lse = _fused_attention(rows, keys, values, attn_mask=mask, scale=scale)
    return out[:, :, :num_rows], lse[:, :, :num_rows]


def _padding(rows: Tensor) -> int:
    """The number of rows to add, so that how many there are does not matter."""
    if rows.dtype == torch.float32:
        return -rows.size(2) % _FLOAT32_ROWS
    left_over = rows.size(2) % SPLIT_ROWS
    return max(0, _LEAST_ROWS - left_over) if left_over else 0


def _merge(seen: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two states as one.

    Each step is rounded as IEEE 754 says, so that it does not matter which elements a vector instruction takes. What
    has no such rule, exponentials and logarithms, is computed in float64, and only then rounded.
    """
    (seen_out, seen_lse), (own_out, own_lse) = seen, own
    seen_weight = torch.sigmoid(seen_lse.double() - own_lse)
    own_weight = 1 - seen_weight
    lse = seen_lse - seen_weight.log()
    seen_part = seen_out.float().mul_(seen_weight.float().unsqueeze(-1))
    own_part = own_out.float().mul_(own_weight.float().unsqueeze(-1))
    return seen_part.add_(own_part).to(seen_out.dtype), lse.float()


def _tile_mask(dtype: torch.dtype, group: int, tile: int, reach: Reach) -> Tensor:
    """The mask of all queries of the tile at this position, over the keys that `_attend_tile` masks."""
    if reach.window is not None:
        return causal_mask(dtype, group, tile - reach.first_key(tile), reach.window)
    return causal_mask(dtype, group, tile if tile < _MERGED_FROM else 0)


@functools.lru_cache(maxsize=16)
def causal_mask(dtype: torch.dtype, group: int, before: int = 0, window: int | None = None) -> Tensor:
    """What is added to scores of a tile behind so many keys: `[TILE_KEYS * group, before + TILE_KEYS]`, a row for each
    query and head."""
    every = torch.ones((TILE_KEYS, before + TILE_KEYS), dtype=torch.bool)
    unseen = every.triu(before + 1)
    if window is not None:
        unseen |= every.tril(before - window)
    mask = torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, float("-inf"))
    return mask.repeat_interleave(group, dim=0)
