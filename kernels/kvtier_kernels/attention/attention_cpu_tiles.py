"""Attention on CPU of which a query's bits depend on its own keys alone.

Keys are cut into tiles at fixed positions. A query meets all tiles up to its own, which is always of full size, in one
call with a mask; behind the first tiles, it meets those before its own without a mask, then its own with one, and the
two states are merged. How many keys are in each call follows from the query's position, not from what is cached or
computed beside it. Torch's fused attention goes through keys in a fixed order;
`rows_are_alike` says whether it gives a row the same bits whatever the number of rows.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

TILE_KEYS = 256
"""Large: decodes go through more padding. Small: a prefill is cut into more parts."""
_MERGED_FROM = 4 * TILE_KEYS
"""Queries of tiles from here on attend the keys before their tile in a call of its own, and the two are merged: a mask
over all keys would take longer. Before it, one call does, which saves most where few queries are computed."""
_FLOAT32_ROWS = 64
"""Float32 rows are padded to a multiple of this."""
_SPLIT_ROWS = 32
"""The library splits rows into runs of as many, or of multiples. A single row that is left over goes through products
of a matrix with a vector, which sum in another order: it gets a row of padding beside it."""
_TELLING_SCALE = 2.0**20
"""The factor that makes the rounding of scores decide which score is highest."""

_fused_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def padded_keys(num_keys: int) -> int:
    """How many keys whole tiles have room for."""
    return -(-num_keys // TILE_KEYS) * TILE_KEYS


def rows_are_alike(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether, on this machine, fused attention with these heads gives a row the same bits beside any number of rows.

    Tries all small numbers of queries, and those at which the library changes its way, with `_telling` inputs. Takes
    a tenth of a second for a small model, and up to a second for one of 32 heads of 128.
    """
    group = num_heads // num_kv_heads
    num_rows, own, all_keys = TILE_KEYS * group, slice(0, TILE_KEYS), slice(0, 3 * TILE_KEYS)
    of_own, of_all = (_causal_mask(dtype, group, before) for before in (0, 2 * TILE_KEYS))
    counts = {*range(1, 2 * _SPLIT_ROWS + 2), 191 // group, -(-192 // group), TILE_KEYS // 2} & set(range(TILE_KEYS))
    for rows, keys, values, scale in _telling(num_kv_heads, num_rows, head_dim, dtype):
        for span, mask in ((all_keys, None), (own, of_own), (all_keys, of_all)):
            whole = _attend(rows, keys[:, span], values[:, span], scale, mask)
            for some in (slice(num_rows - count * group, num_rows) for count in counts):
                of_some = None if mask is None else mask[some]
                parts = _attend(rows[:, some].contiguous(), keys[:, span], values[:, span], scale, of_some)
                if not all(torch.equal(of[:, some], part) for of, part in zip(whole, parts, strict=True)):
                    return False
    return True


def _telling(
    num_kv_heads: int, num_rows: int, head_dim: int, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
    """Rows, keys, values and scales whose results show in which order each of the two products was summed.

    The second half of each sum takes back what the first half has added, and what is left is the rounding of the sums
    between. First that decides all scores; then all scores are 0, and it is all of the result.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(num_rows: int, num_columns: int) -> Tensor:
        return torch.randn((num_kv_heads, num_rows, num_columns), generator=generator).to(dtype)

    half, odd = head_dim // 2, torch.zeros((num_kv_heads, 3 * TILE_KEYS, head_dim % 2), dtype=dtype)
    rows, keys, values = drawn(num_rows, half), drawn(3 * TILE_KEYS, half), drawn(3 * TILE_KEYS, head_dim)
    mirrored = torch.cat((rows, rows, odd[:, :1].expand(-1, num_rows, -1)), dim=2)
    yield mirrored, torch.cat((keys, -keys, odd), dim=2), values, _TELLING_SCALE
    values[:, 1::2] = -values[:, ::2]
    yield mirrored, torch.zeros_like(values), values, 1.0


def attend_in_tiles(query: Tensor, keys: Tensor, values: Tensor, scale: float, num_keys: int, out: Tensor) -> Tensor:
    """Attends the newest of `num_keys` tokens of one sequence causally.

    :param query: `[queries, num_heads, D]`, as is `out`.
    :param keys: `[num_kv_heads, padded_keys(num_keys), D]`, as are `values`; zeros from `num_keys` on.
    :returns: the log-sum-exp, `[queries, num_heads]`.
    """
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads = keys.size(0)
    group, before = num_heads // num_kv_heads, num_keys - num_queries
    # [num_kv_heads, queries, group, D]: the heads of one KV head lie side by side.
    grouped = query.view(num_queries, num_kv_heads, group, head_dim).transpose(0, 1)
    attended = out.view(num_queries, num_kv_heads, group, head_dim).transpose(0, 1)
    lse = torch.empty((num_kv_heads, num_queries, group))
    for tile in range(before // TILE_KEYS * TILE_KEYS, num_keys, TILE_KEYS):
        first, last = max(tile, before), min(tile + TILE_KEYS, num_keys)
        here = slice(first - before, last - before)
        rows = grouped[:, here].flatten(1, 2).contiguous()
        places, own = slice((first - tile) * group, (last - tile) * group), slice(tile, tile + TILE_KEYS)
        if tile < _MERGED_FROM:
            mask = _causal_mask(query.dtype, group, tile)[places]
            state = _attend(rows, keys[:, : own.stop], values[:, : own.stop], scale, mask)
        else:
            mask = _causal_mask(query.dtype, group)[places]
            state = _attend(rows, keys[:, own], values[:, own], scale, mask)
            state = _merge(_attend(rows, keys[:, :tile], values[:, :tile], scale), state)
        attended[:, here] = state[0].view(num_kv_heads, last - first, group, head_dim)
        lse[:, here] = state[1].view(num_kv_heads, last - first, group)
    return lse.transpose(0, 1).flatten(1, 2)


def _attend(
    rows: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`[num_kv_heads, rows, D]`, and the log-sum-exp."""
    num_rows, missing = rows.size(1), _padding(rows)
    if missing:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
        mask = None if mask is None else torch.nn.functional.pad(mask, (0, 0, 0, missing))
    out, lse = _fused_attention(
        rows.unsqueeze(1), keys.unsqueeze(1), values.unsqueeze(1),
        attn_mask=None if mask is None else mask[None, None], scale=scale,
    )  # fmt: skip
    return out[:, 0, :num_rows], lse[:, 0, :num_rows]


def _padding(rows: Tensor) -> int:
    """The number of rows to add, so that how many there are does not matter."""
    if rows.dtype == torch.float32:
        return -rows.size(1) % _FLOAT32_ROWS
    return int(rows.size(1) % _SPLIT_ROWS == 1)


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


@functools.lru_cache(maxsize=8)
def _causal_mask(dtype: torch.dtype, group: int, before: int = 0) -> Tensor:
    """What is added to scores of a tile behind so many keys: `[TILE_KEYS * group, before + TILE_KEYS]`, a row for each
    query and head."""
    unseen = torch.ones((TILE_KEYS, before + TILE_KEYS), dtype=torch.bool).triu_(before + 1)
    mask = torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, float("-inf"))
    return mask.repeat_interleave(group, dim=0)
