"""Tiles to try around the one that `kvtier_kernels.tiles` chooses."""

import itertools
from collections.abc import Iterator

from kvtier_kernels.tiles import Tile, padded_head_dim, shared_limit_bytes

_ROWS = (16, 32, 64, 128, 256)
_KEYS = (32, 64, 128)
_WARPS = (4, 8)
_STAGES = (1, 2, 3, 4)


def neighbours(
    default: Tile, *, head_dim: int, element_bytes: int, group: int, capability: tuple[int, int]
) -> list[Tile]:
    """The default first, then tiles that fit the chip, those that differ from it in the least first.

    Rows are halved and doubled at the most: a tile with far more or fewer serves another shape of work.

    :param group: query heads per KV head; a tile has a row for each of them.
    """
    columns, limit = padded_head_dim(head_dim), shared_limit_bytes(capability)

    def around() -> Iterator[Tile]:
        for rows, keys, num_warps, num_stages in itertools.product(_ROWS, _KEYS, _WARPS, _STAGES):
            if rows < group or not default.rows // 2 <= rows <= default.rows * 2:
                continue
            tile = Tile(rows, keys, num_warps, num_stages)
            if tile != default and tile.shared_bytes(columns, element_bytes) <= limit:
                yield tile

    return [default, *sorted(around(), key=lambda tile: _distance(tile, default))]


def label(tile: Tile) -> str:
    """`128x64 w8 s2`: rows, keys, warps, stages."""
    return f"{tile.rows}x{tile.keys} w{tile.num_warps} s{tile.num_stages}"


def _distance(tile: Tile, default: Tile) -> int:
    """Steps from one to the other; a step is a factor of 2, or a stage."""
    factors = ((tile.rows, default.rows), (tile.keys, default.keys), (tile.num_warps, default.num_warps))
    steps = sum(abs(a.bit_length() - b.bit_length()) for a, b in factors)
    return steps + abs(tile.num_stages - default.num_stages)
