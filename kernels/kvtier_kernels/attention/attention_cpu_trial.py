"""Tries whether this machine's fused attention gives a row the same bits whatever is beside it."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvtier_kernels.attention.attention_cpu_tiles import SPLIT_ROWS, TILE_KEYS, attend_rows, causal_mask

_SEQS_TRIED = 4
"""Sequences of one query that are tried beside each other."""
_TELLING_SCALE = 2.0**20
"""The factor that makes the rounding of scores decide which score is highest."""


def rows_are_alike(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether, on this machine, fused attention with these heads gives a row the same bits beside any number of rows.

    Tries all small numbers of queries, those at which the library changes its way, and one query each of several
    sequences, with `_telling` inputs. Takes a tenth of a second for a small model, and up to a second for one of 32
    heads of 128.
    """
    group = num_heads // num_kv_heads
    num_rows, own, all_keys = TILE_KEYS * group, slice(0, TILE_KEYS), slice(0, 3 * TILE_KEYS)
    of_own, of_all = (causal_mask(dtype, group, before) for before in (0, 2 * TILE_KEYS))
    counts = {*range(1, 2 * SPLIT_ROWS + 2), 191 // group, -(-192 // group), TILE_KEYS // 2} & set(range(TILE_KEYS))
    for rows, keys, values, scale in _telling(num_kv_heads, num_rows, head_dim, dtype):
        for span, mask in ((all_keys, None), (own, of_own), (all_keys, of_all)):
            seen = keys[:, :, span], values[:, :, span]
            whole = attend_rows(rows, *seen, scale, mask)
            for some in (slice(num_rows - count * group, num_rows) for count in counts):
                part = attend_rows(rows[:, :, some].contiguous(), *seen, scale, None if mask is None else mask[some])
                if not all(torch.equal(of[:, :, some], again) for of, again in zip(whole, part, strict=True)):
                    return False
            # The last queries once more, each as the only one of a sequence.
            some = slice(num_rows - _SEQS_TRIED * group, num_rows)
            single = rows[0, :, some].reshape(num_kv_heads, _SEQS_TRIED, group, head_dim).transpose(0, 1).contiguous()
            of_single = None if mask is None else mask[some].view(_SEQS_TRIED, 1, group, -1)
            keys_each, values_each = (of.expand(_SEQS_TRIED, -1, -1, -1) for of in seen)
            of_each, lse_each = attend_rows(single, keys_each, values_each, scale, of_single)
            if not torch.equal(whole[0][0, :, some], of_each.transpose(0, 1).flatten(1, 2)):
                return False
            if not torch.equal(whole[1][0, :, some], lse_each.transpose(0, 1).flatten(1, 2)):
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
        return torch.randn((1, num_kv_heads, num_rows, num_columns), generator=generator).to(dtype)

    half, odd = head_dim // 2, torch.zeros((1, num_kv_heads, 3 * TILE_KEYS, head_dim % 2), dtype=dtype)
    rows, keys, values = drawn(num_rows, half), drawn(3 * TILE_KEYS, half), drawn(3 * TILE_KEYS, head_dim)
    mirrored = torch.cat((rows, rows, odd[:, :, :1].expand(-1, -1, num_rows, -1)), dim=3)
    yield mirrored, torch.cat((keys, -keys, odd), dim=3), values, _TELLING_SCALE
    values[:, :, 1::2] = -values[:, :, ::2]
    yield mirrored, torch.zeros_like(values), values, 1.0
