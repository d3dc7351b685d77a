"""Tiles to try beside those that `kvtier_kernels.tiles` chooses."""

import itertools

from kvtier_kernels.tiles import (
    MIN_DOT,
    Chips,
    Tile,
    decode_tile,
    next_power_of_two,
    padded_head_dim,
    prefill_tile,
    shared_limit_bytes,
)

_ROW_NUMBERS_PER_WARP = 2 * 32 * 160
"""Twice the registers of a warp that may hold sums, scores and the weights made of them, which are half as wide."""
_PREFILL_FIRST = {
    64: (Tile(128, 64, 4, 3), Tile(128, 32, 4, 3)),
    128: (Tile(128, 32, 4, 3), Tile(128, 32, 8, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 3)),
    256: (Tile(64, 32, 4, 2),),
}
"""The tiles that a sweep tries first on a chip with wgmma, by columns. Two or three programs of each of them, except
the last one of 128, fit a multiprocessor without spilling: while one computes weights, the other's products run.
`docs/gpu.md` has what speaks for them and against them."""


def prefill_candidates(head_dim: int, element_bytes: int, group: int, capability: tuple[int, int]) -> tuple[Tile, ...]:
    """Tiles for `prefix_prefill` that are worth timing on a chip of this capability, what `prefill_tile` takes first.

    Then the most promising ones, then others whose sums and scores fit into the registers of their threads. All fit
    into shared memory.
    """
    chosen = prefill_tile(head_dim, element_bytes, group, capability)
    if element_bytes == 4:
        return (chosen,)
    columns, least_rows = padded_head_dim(head_dim), max(MIN_DOT, next_power_of_two(group))
    first = _PREFILL_FIRST[max(64, columns)] if Chips.of(capability) is Chips.HOPPER else ()
    # A warp has 16 rows, or half of their columns where those are many.
    shapes = ((64, 4), (128, 8), (64, 8)) if columns > 128 else ((64, 4), (128, 8))
    others = (
        Tile(rows, keys, num_warps, num_stages)
        for (rows, num_warps), keys, num_stages in itertools.product(shapes, (32, 64, 128), (2, 3, 4))
        if rows * (2 * columns + 3 * keys) <= _ROW_NUMBERS_PER_WARP * num_warps
    )
    limit = shared_limit_bytes(capability)
    fitting = (
        tile
        for tile in (*first, *others)
        if tile.rows >= least_rows and tile.shared_bytes(columns, element_bytes) <= limit
    )
    return tuple(dict.fromkeys((chosen, *fitting)))


def decode_candidates(head_dim: int, element_bytes: int, group: int, capability: tuple[int, int]) -> tuple[Tile, ...]:
    """Does what `prefill_candidates` does, for `paged_decode`: gives what `decode_tile` takes first, then tiles of as
    many rows that fit the chip's shared memory, those that differ from it in the least first.

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
