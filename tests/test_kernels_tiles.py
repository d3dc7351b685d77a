"""The sizes of Triton programs: what must hold for all shapes. That they fit the chips is for the compiler to say."""

import itertools

import pytest

from kvtier_kernels.tiles import (
    MAX_SPLITS,
    Tile,
    copy_words,
    decode_splits,
    decode_tile,
    next_power_of_two,
    padded_head_dim,
    prefill_tile,
)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_tiles_are_powers_of_two_with_a_row_for_each_head(capability: tuple[int, int]) -> None:
    for head_dim, element_bytes, group in itertools.product((1, 64, 80, 128, 256), (2, 4), (1, 3, 7, 40, 256)):
        for tile in (
            prefill_tile(head_dim, element_bytes, group, capability),
            decode_tile(head_dim, element_bytes, group),
        ):
            assert isinstance(tile, Tile)
            assert tile.rows >= max(16, group)
            assert tile.keys >= 16
            assert all(size & (size - 1) == 0 for size in (tile.rows, tile.keys, tile.num_warps))


def test_powers_of_two() -> None:
    assert [next_power_of_two(n) for n in (1, 2, 3, 4, 5, 255, 256)] == [1, 2, 4, 4, 8, 256, 256]
    assert [padded_head_dim(n) for n in (1, 16, 17, 80, 256)] == [16, 16, 32, 128, 256]


def test_sequences_are_split_as_far_as_it_fills_the_chip() -> None:
    chip = 132
    assert decode_splits(num_programs=8, max_keys=100_000, num_multiprocessors=chip) == 33
    assert decode_splits(num_programs=1, max_keys=100_000, num_multiprocessors=chip) == MAX_SPLITS
    assert decode_splits(num_programs=8, max_keys=700, num_multiprocessors=chip) == 3, "no run shorter than it pays"
    assert decode_splits(num_programs=1000, max_keys=100_000, num_multiprocessors=chip) == 1
    assert decode_splits(num_programs=8, max_keys=0, num_multiprocessors=chip) == 1


def test_copies_use_the_widest_words_that_fit() -> None:
    assert copy_words(16, 2**21) == (4, 4096)
    assert copy_words(8, 2**21) == (4, 4096)
    assert copy_words(2, 50) == (2, 32)
    assert copy_words(1, 51) == (1, 64)
