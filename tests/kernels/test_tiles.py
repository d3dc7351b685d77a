"""The sizes of Triton programs: what must hold for all shapes. That they fit the chips is for the compiler to say."""

import heapq
import itertools

import pytest

from kvtier_bench.gpu.resources.candidates import prefill_candidates
from kvtier_kernels.copies.copy_tiles import (
    CopyTile,
    QuantiseTile,
    copy_tile,
    host_copy_programs,
    quantise_tile,
)
from kvtier_kernels.tiles import (
    MAX_SPLITS,
    Tile,
    decode_runs,
    decode_runs_of_any_length,
    decode_splits,
    decode_tile,
    merge_rows,
    next_power_of_two,
    padded_head_dim,
    prefill_splits,
    prefill_tile,
    shared_limit_bytes,
    shared_prefix_tile,
    worth_sharing,
)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_tiles_are_powers_of_two_with_a_row_for_each_head(capability: tuple[int, int]) -> None:
    for head_dim, element_bytes, group in itertools.product((1, 64, 80, 128, 256), (2, 4), (1, 3, 7, 40, 256)):
        for tile in (
            prefill_tile(head_dim, element_bytes, group, capability),
            decode_tile(head_dim, element_bytes, group, capability),
            shared_prefix_tile(head_dim, element_bytes, group, capability),
        ):
            assert isinstance(tile, Tile)
            assert tile.rows >= max(16, group)
            assert tile.keys >= 16
            assert all(size & (size - 1) == 0 for size in (tile.rows, tile.keys, tile.num_warps))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_tiles_of_16_bits_leave_room_for_keys_whatever_the_group(capability: tuple[int, int]) -> None:
    """But for the widest of all groups, where the queries alone are more than small chips have."""
    limit = shared_limit_bytes(capability)
    for head_dim, group in itertools.product((16, 64, 128, 256), (1, 8, 64, 128, 256)):
        columns = padded_head_dim(head_dim)
        for choose in (prefill_tile, decode_tile, shared_prefix_tile):
            tile = choose(head_dim, 2, group, capability)
            fits = tile.shared_bytes(columns, 2) <= limit
            assert fits == ((head_dim, group) != (256, 256) or limit >= 163 * 1024)


def test_narrow_groups_keep_their_keys_in_flight() -> None:
    assert decode_tile(128, 2, 8, (8, 6)) == decode_tile(128, 2, 8, (9, 0)) == Tile(16, 64, 4, 3)
    assert decode_tile(256, 2, 128, (8, 6)) == Tile(128, 32, 8, 1)


def test_float32_of_the_widest_groups_fits_no_chip() -> None:
    for tile in (prefill_tile(256, 4, 256, (9, 0)), decode_tile(256, 4, 256, (9, 0))):
        assert tile.shared_bytes(256, 4) == 295_936 > shared_limit_bytes((9, 0))


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


def test_no_multiprocessor_has_much_more_to_do_than_others() -> None:
    """264 programs are two for each; 30 runs of 9 would be 6 programs more, and a third round for all."""
    chip = 132
    assert decode_splits(num_programs=9, max_keys=100_000, num_multiprocessors=chip) == 29
    for num_programs in range(1, 600):
        splits = decode_splits(num_programs, 100_000, chip)
        most_of_one = -(-num_programs * splits // chip)
        assert num_programs * splits >= min(1.5 * chip, num_programs * MAX_SPLITS)
        assert most_of_one <= 1.25 * max(1, num_programs * splits / chip)


def test_nobody_waits_for_the_longest_sequence() -> None:
    chip = 132
    assert decode_runs(num_programs=8, mean_keys=100_000, max_keys=100_000, num_multiprocessors=chip) == (33, 3031)
    assert decode_runs(num_programs=8, mean_keys=70_000, max_keys=100_000, num_multiprocessors=chip) == (33, 3031)
    # One of 32 sequences has 100,000 keys, the others 1,000: no run is more than a quarter of what
    # each multiprocessor has to do.
    splits, run_keys = decode_runs(num_programs=256, mean_keys=4093, max_keys=100_000, num_multiprocessors=chip)
    assert run_keys <= 256 * 4093 / chip / 4
    assert (splits - 1) * run_keys < 100_000 <= splits * run_keys
    # Where there are many sequences, one that is a little longer than others is not worth cutting.
    assert decode_runs(num_programs=2048, mean_keys=2000, max_keys=7000, num_multiprocessors=chip) == (1, 7757)
    assert decode_runs(num_programs=8, mean_keys=10, max_keys=10**6, num_multiprocessors=chip) == (MAX_SPLITS, 3907)
    assert decode_runs(num_programs=8, mean_keys=0, max_keys=0, num_multiprocessors=chip) == (1, 1)
    assert decode_runs(num_programs=0, mean_keys=0, max_keys=0, num_multiprocessors=chip) == (1, 1)


@pytest.mark.parametrize("num_seqs", [1, 4, 16, 64])
@pytest.mark.parametrize("kind", ["one long", "all long", "short", "mixed"])
def test_runs_of_any_length_keep_the_chip_busy(num_seqs: int, kind: str) -> None:
    """As `_decode_kernel` cuts them. Programs are dealt out to whichever multiprocessor has least to do."""
    chip, num_kv_heads, longest = 132, 8, 131_072
    lengths = {
        "one long": [longest] + [500] * (num_seqs - 1),
        "all long": [longest] * num_seqs,
        "short": [700] * num_seqs,
        "mixed": [longest >> row % 8 for row in range(num_seqs)],
    }[kind]
    num_splits, run_keys = decode_runs_of_any_length(num_seqs, num_kv_heads, longest, chip)
    runs: list[int] = []
    for length in lengths:
        num_runs = min(-(-length // run_keys), num_splits)
        runs += [-(-length // num_runs)] * num_runs * num_kv_heads
    assert min(runs) >= 200, "merging takes no less time than so many keys"
    busy = [0] * chip
    for run in runs:
        heapq.heapreplace(busy, busy[0] + run)
    ideal = sum(lengths) * num_kv_heads / chip
    assert max(busy) <= max(1.35 * ideal, ideal + 1000)


def test_runs_of_any_length_are_no_more_than_there_are_keys_for() -> None:
    assert decode_runs_of_any_length(1, 8, 100, 132) == (1, 256)
    assert decode_runs_of_any_length(16, 8, 131_072, 132) == (33, 256)
    assert decode_runs_of_any_length(256, 8, 4096, 132) == (2, 3840)


def test_sharing_pays_when_it_saves_more_than_a_launch_and_a_merge() -> None:
    """8 KV heads of 128 in 16 bits: 4 KiB per key; 32 query heads."""
    assert worth_sharing(num_saved_keys=15 * 1000, key_bytes=4096, num_rows=16 * 32, head_dim=128)
    assert not worth_sharing(num_saved_keys=15 * 500, key_bytes=4096, num_rows=16 * 32, head_dim=128)
    assert not worth_sharing(num_saved_keys=15 * 1000, key_bytes=1024, num_rows=16 * 32, head_dim=128)
    # Many sequences with a short prompt in common: merging two states of each is what it costs.
    assert not worth_sharing(num_saved_keys=511 * 24, key_bytes=4096, num_rows=512 * 32, head_dim=128)
    assert worth_sharing(num_saved_keys=511 * 48, key_bytes=4096, num_rows=512 * 32, head_dim=128)


def test_beside_a_replay_sharing_pays_when_it_saves_launching_the_step() -> None:
    for num_saved_keys, pays in ((15 * 1000, False), (15 * 17_000, False), (15 * 18_000, True)):
        assert worth_sharing(num_saved_keys, 4096, num_rows=16 * 32, head_dim=128, replayed=True) == pays


def test_merges_take_a_power_of_two_of_rows() -> None:
    assert [merge_rows(columns) for columns in (16, 128, 256, 8192)] == [256, 32, 16, 1]


def test_copies_use_the_widest_words_that_fit() -> None:
    assert copy_tile(16, 2**21, host=False) == CopyTile(rows=1, words=4096, word_bytes=4, num_warps=4)
    assert copy_tile(8, 2**21, host=False) == CopyTile(1, 4096, 4, 4)
    assert copy_tile(2, 50, host=False) == CopyTile(128, 32, 2, 4)
    assert copy_tile(1, 51, host=False) == CopyTile(64, 64, 1, 4)


def test_copies_beside_host_memory_have_more_in_flight_in_few_programs() -> None:
    assert copy_tile(16, 2**21, host=True) == CopyTile(rows=1, words=16384, word_bytes=4, num_warps=16)
    assert copy_tile(16, 4096, host=True) == CopyTile(16, 1024, 4, 16), "as much of small parts"
    assert [host_copy_programs(chip) for chip in (1, 66, 108, 132)] == [2, 2, 3, 4]


def test_prefills_are_split_where_it_fills_the_chip() -> None:
    chip = 132
    assert prefill_splits(num_programs=16, max_keys=32768, num_multiprocessors=chip) == 8
    assert prefill_splits(num_programs=1, max_keys=131_072, num_multiprocessors=chip) == 56
    assert prefill_splits(num_programs=chip, max_keys=32768, num_multiprocessors=chip) == 1
    assert prefill_splits(num_programs=152, max_keys=32768, num_multiprocessors=chip) == 4, "not a second turn for few"
    assert prefill_splits(num_programs=4000, max_keys=32768, num_multiprocessors=chip) == 1
    assert prefill_splits(num_programs=8, max_keys=1000, num_multiprocessors=chip) == 1, "merging would cost more"
    assert prefill_splits(num_programs=8, max_keys=0, num_multiprocessors=chip) == 1


def test_prefill_candidates_fit_and_begin_with_the_choice() -> None:
    for capability, head_dim, group in itertools.product(
        ((8, 0), (9, 0), (10, 0), (12, 0)), (64, 80, 128, 256), (1, 7)
    ):
        candidates = prefill_candidates(head_dim, 2, group, capability)
        assert candidates[0] == prefill_tile(head_dim, 2, group, capability)
        limit, columns = shared_limit_bytes(capability), padded_head_dim(head_dim)
        assert len(set(candidates)) == len(candidates) >= (1 if capability == (12, 0) else 4)
        assert all(tile.shared_bytes(columns, 2) <= limit and tile.rows >= group for tile in candidates)
    assert prefill_candidates(128, 4, 1, (9, 0)) == (prefill_tile(128, 4, 1, (9, 0)),)


def test_sweeps_of_prefill_try_two_programs_on_a_multiprocessor_first() -> None:
    """227 KiB of shared memory, and 1 KiB more for the system, are for two; that registers are is for the compiler."""
    for head_dim, how_many in ((64, 2), (128, 3), (256, 1)):
        first = prefill_candidates(head_dim, 2, 4, (9, 0))[1 : 1 + how_many]
        assert all(2 * (tile.shared_bytes(head_dim, 2) + 1024) <= 228 * 1024 for tile in first)
    assert prefill_candidates(128, 2, 4, (9, 0))[1] == Tile(128, 32, 4, 3)
    assert prefill_candidates(128, 2, 128, (9, 0))[3].rows == 128, "a row for each head"
    assert Tile(128, 32, 4, 3) not in prefill_candidates(128, 2, 4, (8, 0))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (11, 0), (12, 0)])
def test_what_takes_registers_takes_fewer_keys_or_as_many(capability: tuple[int, int]) -> None:
    for head_dim in (16, 64, 80, 128, 192, 256):
        plain = prefill_tile(head_dim, 2, 4, capability)
        windowed, scored = (
            prefill_tile(head_dim, 2, 4, capability, **{which: True}) for which in ("windowed", "scored")
        )
        converting = prefill_tile(head_dim, 2, 4, capability, kv_bytes=1)
        assert converting.keys <= scored.keys == windowed.keys <= plain.keys
        assert converting == prefill_tile(head_dim, 2, 4, capability, kv_bytes=1, windowed=True, scored=True)


def test_prefills_have_keys_on_their_way_for_a_whole_iteration() -> None:
    for capability, head_dim in itertools.product(((8, 0), (8, 6), (9, 0), (10, 0), (12, 0)), (64, 80, 128, 256)):
        for kv_bytes, windowed in itertools.product((1, 2), (False, True)):
            tile = prefill_tile(head_dim, 2, 4, capability, kv_bytes=kv_bytes, windowed=windowed)
            assert tile.num_stages == 3
            assert tile.rows == 128 or head_dim == 256


def test_quantising_takes_whole_vectors() -> None:
    assert quantise_tile(128, host=False) == QuantiseTile(vectors=32, columns=128, num_warps=4)
    assert quantise_tile(80, host=True) == QuantiseTile(128, 128, 16)
    assert quantise_tile(576, host=False) == QuantiseTile(4, 1024, 4)
