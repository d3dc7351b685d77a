"""Blocks of a copy in order of their slots, in pieces and in runs."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.device.kv import Blocks
from kvtier.device.slot_batches import SlotBatch
from kvtier.errors import InvalidInputError
from kvtier.memory.arena import Arena


def batch_of(slots: list[int], device_slots: list[int] | None = None) -> SlotBatch:
    arena = Arena(64, 1)
    blocks = Blocks(arena, slots, device_slots or list(range(len(slots))))
    return SlotBatch.of(blocks, num_groups=2, blocks_per_group=50)


def test_blocks_go_by_slot() -> None:
    batch = batch_of([9, 3, 4], [1, 55, 49])
    assert batch.slots.tolist() == [3, 4, 9]
    assert list(zip(batch.groups.tolist(), batch.blocks.tolist(), strict=True)) == [(1, 5), (0, 49), (0, 1)]
    assert [piece.slots.tolist() for piece in batch.pieces(2)] == [[3, 4], [9]]
    assert list(batch_of([]).pieces(2)) == []


def test_slots_that_do_not_exist_are_refused() -> None:
    for slots, device_slots, words in (
        ([0, 64], [0, 1], "arena slot 64: there are 64"),
        ([-1, 0], [0, 1], "arena slot -1"),
        ([0, 1], [0, 100], "device slot 100: there are 100"),
        ([0, 1], [-1, 0], "device slot -1"),
        ([0, 1], [1], "1 device slots and 2 arena slots"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            batch_of(slots, device_slots)


@given(st.sets(st.integers(0, 63)), st.integers(1, 70))
def test_runs_are_as_long_as_they_may_be(slots: set[int], chunk_slots: int) -> None:
    batch = batch_of(sorted(slots, key=lambda slot: slot * 7 % 64))
    starts, lengths = batch.runs(chunk_slots, adjacent=True)
    runs = [batch.slots[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    assert [slot for run in runs for slot in run] == sorted(slots)
    for run in runs:
        assert run.tolist() == list(range(run[0], run[0] + len(run)))
        assert run[0] // chunk_slots == run[-1] // chunk_slots, "no transfer crosses the end of what was registered"
    for run, following in itertools.pairwise(runs):
        assert following[0] != run[-1] + 1 or following[0] % chunk_slots == 0
    starts, lengths = batch.runs(chunk_slots, adjacent=False)
    assert np.array_equal(starts, np.arange(len(slots)))
    assert set(lengths.tolist()) <= {1}
