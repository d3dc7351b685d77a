"""Copies between host memory and arenas: any slots in any order, in few pieces."""

import mmap
import os
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.device import kv as transfer
from kvtier.device.kv import _LARGE_BYTES, Blocks, HostMemoryKV, _pieces
from kvtier.errors import ClosedError, InvalidInputError
from kvtier.memory.arena import Arena
from kvtier.memory.copy_ranges import copy_to
from kvtier.memory.slot_memory import SlotMemory

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
    kv.scatter(arena, arena_slots, device_slots, after=None)
    assert np.array_equal(blocks, expected)
    before = arena.rows.copy()
    kv.gather(device_slots, arena, arena_slots, after=None)
    assert np.array_equal(arena.rows, before), "the same blocks back in their places, and no byte beside them"
    arena.rows[:] = 0
    kv.gather(device_slots, arena, arena_slots, after=None)
    for arena_slot, device_slot in zip(arena_slots, device_slots, strict=True):
        assert np.array_equal(arena.rows[arena_slot, :BLOCK_BYTES], blocks[device_slot])
    arena.close()


@pytest.mark.parametrize(
    ("device_slots", "arena_slots", "num_pieces"),
    [
        ([], [], 0),
        ([3], [5], 1),
        ([9, 2, 30, 4], range(5, 9), 1),
        ([9, 2, 30, 4], range(8, 0, -2), 1),
        (range(6), [4, 5, 6, 9, 8, 7], 2),
        (range(6), [4, 4, 4, 4, 1, 1], 2),
        (range(30), [i * i for i in range(30)], 1),
    ],
    ids=["nothing", "one block", "a run", "a run downwards", "two runs", "the same slot again", "all over the place"],
)
def test_a_batch_is_copied_in_few_pieces(device_slots: list[int], arena_slots: list[int], num_pieces: int) -> None:
    pieces = list(_pieces(list(device_slots), list(arena_slots)))
    assert len(pieces) == num_pieces
    slots = np.arange(900)
    assert [int(slot) for places, _ in pieces for slot in slots[places]] == list(device_slots)
    assert [int(slot) for _, places in pieces for slot in slots[places]] == list(arena_slots)


@pytest.mark.parametrize("apart", [False, True], ids=["in one memory", "apart"])
@given(pairs)
def test_parts_that_are_alike_are_copied_together(apart: bool, slots: tuple[list[int], list[int]]) -> None:
    arena_slots, device_slots = slots
    memory = np.random.default_rng(0).integers(0, 256, (3, NUM_BLOCKS, 24), dtype=np.uint8)
    parts = [(rows.copy() if apart else rows)[:, :16] for rows in memory]
    before = memory.copy()
    expected = np.concatenate(parts, axis=1)
    arena = Arena(NUM_SLOTS, 50)
    kv = HostMemoryKV(*parts)
    assert apart or len(kv._layers) == 1
    kv.gather(device_slots, arena, arena_slots, after=None)
    assert np.array_equal(arena.rows[arena_slots, :48], expected[device_slots])
    for part in parts:
        part[:] = 0
    kv.scatter(arena, arena_slots, device_slots, after=None)
    expected[[block for block in range(NUM_BLOCKS) if block not in device_slots]] = 0
    assert np.array_equal(np.concatenate(parts, axis=1), expected)
    assert np.array_equal(memory[:, :, 16:], before[:, :, 16:]), "what lies between the rows"
    arena.close()


def read_only(memory: Arena) -> SlotMemory:
    """The same memory as one that is mapped for reading."""
    rows = memory.rows.view()
    rows.flags.writeable = False
    return SimpleNamespace(num_slots=memory.num_slots, slot_bytes=memory.slot_bytes, rows=rows)


@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, 2 * _LARGE_BYTES], ids=["numpy", "one system call"])
def test_from_several_memories_at_once(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(transfer, "copy_to", lambda into, source: calls.append(len(into)) or copy_to(into, source))
    random = np.random.default_rng(3)
    arenas = [Arena(4, block_bytes + 64), Arena(3, block_bytes)]
    for arena in arenas:
        arena.rows[:] = random.integers(0, 256, arena.rows.shape, dtype=np.uint8)
    device = np.zeros((8, block_bytes), dtype=np.uint8)
    kv = HostMemoryKV(device)
    sources = [Blocks(read_only(arenas[0]), [3, 0, 2], [5, 1, 0]), Blocks(read_only(arenas[1]), [1, 2], [7, 2])]
    kv.scatter_all(sources, after=None)
    expected = np.zeros_like(device)
    for arena, (_, slots, device_slots) in zip(arenas, sources, strict=True):
        expected[list(device_slots)] = arena.rows[list(slots), :block_bytes]
    assert np.array_equal(device, expected)
    assert calls == ([] if block_bytes < _LARGE_BYTES else [5])
    with pytest.raises(InvalidInputError, match="slots 3 to 3, of 3"):
        kv.scatter_all([Blocks(arenas[0], [1], [0]), Blocks(arenas[1], [3], [0])], after=None)
    assert np.array_equal(device, expected), "refused as a whole"
    kv.scatter_all([], after=None)


def test_a_gather_takes_no_memory_for_blocks_that_it_does_not_copy() -> None:
    num_parts, part_bytes, num_blocks, wanted = 4, 64, 4096, [7, 4000, 90, 2048]
    memory = np.random.default_rng(5).integers(0, 256, (num_parts, num_blocks + 1, part_bytes), dtype=np.uint8)
    kv = HostMemoryKV(*memory[:, :num_blocks])  # a gap behind each part, as between the layers of an engine
    arena = Arena(4, num_parts * part_bytes)
    tracemalloc.start()
    try:
        kv.gather(wanted, arena, [0, 1, 2, 3], after=None)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.array_equal(arena.rows, np.concatenate(memory[:, wanted], axis=1))
    assert peak_bytes < memory.nbytes // 8
    arena.close()


def test_as_many_slots_on_both_sides() -> None:
    arena = Arena(2, BLOCK_BYTES)
    with pytest.raises(InvalidInputError, match="1 device slots and 2 arena slots"):
        HostMemoryKV(np.zeros((2, BLOCK_BYTES), dtype=np.uint8)).scatter(arena, [0, 1], [0], after=None)
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
