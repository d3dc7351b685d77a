"""Many copies in one call: the same bytes as one by one, and nothing outside of the memory they are in."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.device import kv as transfer
from kvtier.device.kv import HostMemoryKV
from kvtier.errors import InvalidInputError
from kvtier.memory import copy_ranges
from kvtier.memory.arena import Arena
from kvtier.memory.copy_ranges import copy_from, copy_to, ranges_of

NUM_BLOCKS, NUM_SLOTS = 3000, 2500
WIDTHS = (24, 40)
BLOCK_BYTES = sum(WIDTHS)


@pytest.fixture(autouse=True)
def _no_block_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_LARGE_BYTES", 1)
    monkeypatch.setattr(transfer, "_LARGE_GATHERED_BYTES", 1)


def test_linux_does_it_and_others_say_no() -> None:
    on_linux = sys.platform == "linux"
    source, into = np.arange(8192, dtype=np.uint8), np.zeros(8192, dtype=np.uint8)
    columns = [(source.ctypes.data, 4)], [(into.ctypes.data, 4)]
    theirs, ours = (ranges_of(range(2048), column, [4]) for column in columns)
    assert copy_from(theirs, ours) is on_linux
    assert np.array_equal(source, into) is on_linux
    into[:] = 7
    assert copy_to(theirs, ours) is on_linux
    assert np.array_equal(source, into) is on_linux


@given(st.randoms(use_true_random=False), st.booleans())
def test_scattered_blocks_in_parts(random: object, one_call: bool) -> None:
    rng = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
    count = int(rng.integers(0, NUM_SLOTS))
    device_slots = rng.permutation(NUM_BLOCKS)[:count].tolist()
    arena_slots = rng.permutation(NUM_SLOTS)[:count].tolist()
    padded = [rng.integers(0, 256, (NUM_BLOCKS, width + 8), dtype=np.uint8) for width in WIDTHS]
    parts = [rows[:, :width] for rows, width in zip(padded, WIDTHS, strict=True)]
    before = [rows.copy() for rows in padded]
    arena = Arena(NUM_SLOTS, BLOCK_BYTES + 16)
    kv = HostMemoryKV(*parts)
    kv._copies_ranges = one_call
    kv.gather(device_slots, arena, arena_slots, after=None)
    expected = np.zeros_like(arena.rows)
    expected[arena_slots, :BLOCK_BYTES] = np.concatenate(parts, axis=1)[device_slots]
    assert np.array_equal(arena.rows, expected)
    for part in parts:
        part[device_slots] = 0
    kv.scatter(arena, arena_slots, device_slots, after=None)
    assert all(np.array_equal(rows, was) for rows, was in zip(padded, before, strict=True)), "padding included"
    arena.close()


@pytest.mark.parametrize("slots", [[0, 1, 2, NUM_BLOCKS], [5, 1, -1, 3]])
def test_a_slot_that_is_not_there_is_refused(slots: list[int]) -> None:
    arena = Arena(8, BLOCK_BYTES)
    kv = HostMemoryKV(np.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8))
    with pytest.raises(InvalidInputError, match="of 3000"):
        kv.scatter(arena, [4, 1, 5, 2], slots, after=None)
    with pytest.raises(InvalidInputError, match="of 8"):
        kv.scatter(arena, [4, 1, 8, 2], [9, 1, 7, 3], after=None)
    arena.close()


def test_blocks_that_are_larger_than_a_slot_are_refused() -> None:
    arena = Arena(8, BLOCK_BYTES - 1)
    kv = HostMemoryKV(np.zeros((8, BLOCK_BYTES), dtype=np.uint8))
    with pytest.raises(InvalidInputError, match="in slots of 63"):
        kv.gather([0, 5, 1, 3], arena, [4, 1, 7, 2], after=None)
    arena.close()


@pytest.mark.parametrize(("gib", "per_call"), [(0.5, 3), (1.9, 1), (2.0, 1)])
def test_no_call_asks_for_more_than_linux_copies_at_once(
    monkeypatch: pytest.MonkeyPatch, gib: float, per_call: int
) -> None:
    """Nothing is copied here."""
    nbytes, calls = int(gib * 2**30), []

    def call(pid: int, ours: object, num_ours: int, theirs: object, num_theirs: int, flags: int) -> int:
        calls.append((num_ours, num_theirs))
        return min(num_ours * nbytes, 0x7FFFF000)

    monkeypatch.setattr(copy_ranges, "_READ", call)
    ranges = ranges_of(range(7), [(0, nbytes)], [nbytes])
    assert copy_from(ranges, ranges) is (gib < 2), "one that is larger goes another way"
    if gib < 2:
        assert [count for count, _ in calls] == [per_call] * (7 // per_call) + [1] * (7 % per_call)
        assert all(num_ours == num_theirs for num_ours, num_theirs in calls)


def test_a_system_that_refuses_gets_one_copy_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_ranges, "_READ", lambda *_: -1)
    rows = np.arange(8 * BLOCK_BYTES, dtype=np.uint8).reshape(8, BLOCK_BYTES)
    arena = Arena(8, BLOCK_BYTES)
    kv = HostMemoryKV(rows)
    kv.gather([0, 5, 1, 3], arena, [4, 1, 7, 2], after=None)
    assert np.array_equal(arena.rows[[4, 1, 7, 2]], rows[[0, 5, 1, 3]])
    arena.close()
