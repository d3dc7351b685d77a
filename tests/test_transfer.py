"""Copies between host memory and arenas: any slots in any order, in few pieces."""

import mmap
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ClosedError, InvalidInputError
from kvtier.transfer import Arena, HostMemoryKV, _runs

NUM_SLOTS, NUM_BLOCKS, BLOCK_BYTES = 12, 20, 64

pairs = st.integers(0, NUM_SLOTS).flatmap(
    lambda count: st.tuples(
        st.permutations(range(NUM_SLOTS)).map(lambda slots: slots[:count]),
        st.permutations(range(NUM_BLOCKS)).map(lambda slots: slots[:count]),
    )
)


@given(pairs)
def test_every_block_lands_where_it_belongs(slots: tuple[list[int], list[int]]) -> None:
    arena_slots, device_slots = slots
    random = np.random.default_rng(0)
    arena = Arena(NUM_SLOTS, BLOCK_BYTES + 8)
    arena.rows[:] = random.integers(0, 256, arena.rows.shape, dtype=np.uint8)
    blocks = random.integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    expected = blocks.copy()
    for arena_slot, device_slot in zip(arena_slots, device_slots, strict=True):
        expected[device_slot] = arena.rows[arena_slot, :BLOCK_BYTES]
    kv = HostMemoryKV(blocks)
    kv.scatter(arena, arena_slots, device_slots)
    assert np.array_equal(blocks, expected)
    before = arena.rows.copy()
    kv.gather(device_slots, arena, arena_slots)
    assert np.array_equal(arena.rows, before), "the same blocks back in their places, and no byte beside them"
    arena.rows[:] = 0
    kv.gather(device_slots, arena, arena_slots)
    for arena_slot, device_slot in zip(arena_slots, device_slots, strict=True):
        assert np.array_equal(arena.rows[arena_slot, :BLOCK_BYTES], blocks[device_slot])
    arena.close()


@pytest.mark.parametrize(
    ("first", "second", "num_runs"),
    [
        ([], [], 0),
        ([3], [5], 1),
        (range(10), range(5, 15), 1),
        (range(9, -1, -1), range(10), 1),
        (range(0, 10, 2), range(20, 0, -4), 1),
        ([0, 1, 2, 7, 8], [4, 5, 6, 7, 8], 2),
        ([0, 1, 0, 1], [0, 1, 2, 3], 2),
    ],
)
def test_slots_that_follow_one_another_are_one_copy(first: list[int], second: list[int], num_runs: int) -> None:
    runs = list(_runs(first, second))
    assert len(runs) == num_runs
    slots = np.arange(32)
    assert [int(slot) for run, _ in runs for slot in slots[run]] == list(first)
    assert [int(slot) for _, run in runs for slot in slots[run]] == list(second)


def test_as_many_slots_on_both_sides() -> None:
    arena = Arena(2, BLOCK_BYTES)
    with pytest.raises(ValueError):
        HostMemoryKV(np.zeros((2, BLOCK_BYTES), dtype=np.uint8)).scatter(arena, [0, 1], [0])
    arena.close()


def test_a_shared_arena_is_one_memory() -> None:
    arena = Arena(4, mmap.PAGESIZE, shared=True)
    arena.view(2)[:] = b"x" * mmap.PAGESIZE
    assert os.pread(arena.descriptor, 4, 2 * mmap.PAGESIZE) == b"xxxx"
    assert len(arena.memory) == 4 * mmap.PAGESIZE
    with pytest.raises(OSError):
        os.ftruncate(arena.descriptor, 0)
    arena.close()
    arena.close()
    with pytest.raises(InvalidInputError):
        _ = arena.descriptor
    with pytest.raises(ClosedError):
        _ = arena.memory


def test_an_arena_that_is_not_shared_has_no_descriptor() -> None:
    arena = Arena(1, BLOCK_BYTES)
    with pytest.raises(InvalidInputError, match="not shared"):
        _ = arena.descriptor
    arena.close()
