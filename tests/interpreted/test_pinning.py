"""Host memory that `CudaKV` pins: arenas at their first copy, lent memory from `attach` to `detach`."""

import logging

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cuda_rig import BLOCK_BYTES, NUM_BLOCKS, Notes, filled_arena, random_rows
from kvtier import cuda_routes
from kvtier.errors import InvalidInputError
from kvtier.tiers.lending import SlotMemory
from kvtier.transfer import Arena, Blocks
from kvtier.transfer_cuda import CudaKV


def test_an_arena_is_pinned_once_and_until_close() -> None:
    notes = Notes()
    kv = CudaKV([random_rows(NUM_BLOCKS)], cuda=notes)
    first, second = filled_arena(4), filled_arena(6)
    for arena in (first, second, first):
        kv.gather([0], arena, [0], after=kv.fence())
    assert sorted(notes.registered.values()) == [4 * BLOCK_BYTES, 6 * BLOCK_BYTES]
    kv.close()
    kv.close()
    assert notes.registered == {}


def read_only(memory: Arena) -> SlotMemory:
    """The same memory as one that is mapped for reading."""
    rows = memory.rows.view()
    rows.flags.writeable = False

    class Lent:
        num_slots, slot_bytes = memory.num_slots, memory.slot_bytes

        @property
        def rows(self) -> npt.NDArray[np.uint8]:
            return rows

    return Lent()


@pytest.mark.filterwarnings("error::UserWarning")  # torch's, of an array that is not writable
@pytest.mark.parametrize("least_dma_bytes", [0, 2**20], ids=["by DMA", "by kernel"])
def test_memory_that_is_lent(least_dma_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned for reading from `attach` to `detach`; one lane copies from all of it."""
    monkeypatch.setattr(cuda_routes, "LEAST_DMA_BYTES", least_dma_bytes)
    notes, ours = Notes(), random_rows(NUM_BLOCKS)
    expected = ours.clone()
    kv = CudaKV([ours], staging_bytes=2 * BLOCK_BYTES, cuda=notes)
    arenas = [filled_arena(5, BLOCK_BYTES + 16), filled_arena(4)]
    lent = [read_only(arena) for arena in arenas]
    assert all(kv.attach(memory) for memory in lent)
    assert set(notes.flags.values()) == {1 | 8}, "portable, read-only"
    notes.notes.clear()
    kv.scatter_all([Blocks(lent[0], [4, 1, 2], [0, 7, 3]), Blocks(lent[1], [0, 3], [9, 5])], after=kv.fence())
    assert [note[0] for note in notes.notes] == ["enter", "wait", "synchronize", "leave"]
    for arena, slots, device_slots in ((arenas[0], [4, 1, 2], [0, 7, 3]), (arenas[1], [0, 3], [9, 5])):
        for slot, device_slot in zip(slots, device_slots, strict=True):
            expected[device_slot] = torch.from_numpy(arena.rows[slot][:BLOCK_BYTES])
    assert torch.equal(ours, expected)
    with pytest.raises(InvalidInputError, match="arena slot 4"):
        kv.scatter_all([Blocks(lent[0], [0], [0]), Blocks(lent[1], [4], [1])], after=kv.fence())
    kv.detach(lent[0])
    assert list(notes.registered.values()) == [4 * BLOCK_BYTES]
    kv.detach(lent[0])
    kv.close()
    assert notes.registered == {}


def test_memory_does_not_stay_pinned_for_a_kernel_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise RuntimeError("out of memory")

    notes, arena = Notes(), filled_arena(4)
    kv = CudaKV([random_rows(NUM_BLOCKS)], cuda=notes)
    monkeypatch.setattr(cuda_routes, "block_copy", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        kv.attach(read_only(arena))
    assert notes.registered == {}
    with pytest.raises(RuntimeError, match="out of memory"):
        kv.gather([5], arena, [2], after=kv.fence())
    assert notes.registered == {}
    kv.close()


@pytest.mark.parametrize("status", [1, 712, 801])
def test_lent_memory_that_cannot_be_pinned_is_not_attached(status: int, caplog: pytest.LogCaptureFixture) -> None:
    notes, lent = Notes(register_status=status), read_only(filled_arena(4))
    kv = CudaKV([random_rows(NUM_BLOCKS)], cuda=notes)
    is_pinned = status == 712  # by another one
    assert kv.attach(lent) == is_pinned
    assert (f"CUDA error {status}" in caplog.text) == (not is_pinned)
    kv.detach(lent)
    kv.close()


def test_memory_that_another_has_pinned_is_left_to_it(caplog: pytest.LogCaptureFixture) -> None:
    kv = CudaKV([random_rows(NUM_BLOCKS)], cuda=Notes(register_status=712))
    arena = filled_arena(4)
    with caplog.at_level(logging.WARNING):
        kv.gather([5], arena, [2], after=kv.fence())
    kv.close()
    assert bytes(arena.view(2)) == random_rows(NUM_BLOCKS)[5].numpy().tobytes()
    assert not caplog.records


def test_memory_that_cannot_be_pinned_works_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    kv = CudaKV([random_rows(NUM_BLOCKS)], cuda=Notes(register_status=2))
    arena = filled_arena(4)
    with caplog.at_level(logging.WARNING):
        kv.gather([5], arena, [2], after=kv.fence())
        kv.gather([6], arena, [3], after=kv.fence())
    assert bytes(arena.view(2)) == random_rows(NUM_BLOCKS)[5].numpy().tobytes()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "could not be pinned" in caplog.text
    kv.close()
