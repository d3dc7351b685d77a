"""Tiles to try beside those that `kvtier_kernels.tiles` chooses."""

import itertools

from kvtier_kernels.tiles import Tile, decode_tile, padded_head_dim, shared_limit_bytes


def decode_candidates(head_dim: int, element_bytes: int, group: int, capability: tuple[int, int]) -> tuple[Tile, ...]:
    """As `kvtier_kernels.tiles.prefill_candidates`, for `paged_decode`: what `decode_tile` takes first, then tiles of
    as many rows that fit the chip's shared memory, those that differ from it in the least first.

    Rows are as few as hold a group: more would compute, not read.
    """
    chosen = decode_tile(head_dim, element_bytes, group, capability)
    columns, limit = padded_head_dim(head_dim), shared_limit_bytes(capability)
    tiles = (
        Tile(chosen.rows, keys, num_warps, num_stages)
        for keys, num_warps, num_stages in itertools.product((16, 32, 64, 128, 256), (2, 4, 8), (2, 3, 4, 5))
    )
    others = (tile for tile in tiles if tile != chosen and tile.shared_bytes(columns, element_bytes) <= limit)
    return (chosen, *sorted(others, key=lambda tile: _distance(tile, chosen)))


def label(tile: Tile) -> str:
    """`128x64 w8 s2`: rows, keys, warps, stages."""
    return f"{tile.rows}x{tile.keys} w{tile.num_warps} s{tile.num_stages}"


def _distance(tile: Tile, chosen: Tile) -> int:
    """Steps from one to the other; a step is a factor of 2, or a stage."""
    factors = ((tile.keys, chosen.keys), (tile.num_warps, chosen.num_warps))
    steps = sum(abs(a.bit_length() - b.bit_length()) for a, b in factors)
    return steps + abs(tile.num_stages - chosen.num_stages)
