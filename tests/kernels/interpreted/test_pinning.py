"""Host memory that `CudaKV` pins from `attach` to `detach`, in chunks."""

import logging
import mmap
import threading
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cuda_rig import BLOCK_BYTES, NUM_BLOCKS, Driver, Notes, filled_arena, random_rows
from kvtier.device import cuda_routes, pinned_memory
from kvtier.device.cuda import CudaKV
from kvtier.device.cuda_routes import LEAST_PART_BYTES
from kvtier.device.kv import Blocks
from kvtier.device.pinned_memory import pins_read_only
from kvtier.errors import ConfigError, InvalidInputError
from kvtier.memory.arena import Arena
from kvtier.memory.slot_memory import SlotMemory

PAGES_OF_SLOTS = 256
"""Slots of `BLOCK_BYTES` that are whole pages: 80 and 4096 have the factor 16 in common."""


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is pinned in chunks of 512 slots."""
    monkeypatch.setattr(pinned_memory, "_CHUNK_BYTES", 700 * BLOCK_BYTES)
    assert PAGES_OF_SLOTS * BLOCK_BYTES % mmap.PAGESIZE == 0


def test_an_arena_is_pinned_once_and_until_it_is_detached() -> None:
    notes = Notes()
    kv = CudaKV([random_rows(NUM_BLOCKS)], cuda=notes)
    first, second = filled_arena(4), filled_arena(6)
    for arena in (first, second, first):
        assert kv.attach(arena)
        kv.gather([0], arena, [0], after=kv.fence())
    assert sorted(notes.registered.values()) == [4 * BLOCK_BYTES, 6 * BLOCK_BYTES]
    assert kv.memory_use.pinned_bytes == 10 * BLOCK_BYTES
    kv.detach(first)
    assert list(notes.registered.values()) == [6 * BLOCK_BYTES]
    kv.close()
    kv.close()
    assert notes.registered == {}
    assert kv.memory_use.pinned_bytes == 0


def test_an_arena_that_nobody_attached_is_pinned_by_its_first_copy() -> None:
    notes, arena = Notes(), filled_arena(4)
    kv = CudaKV([random_rows(NUM_BLOCKS)], cuda=notes)
    for _ in range(2):
        kv.gather([0], arena, [0], after=kv.fence())
        assert list(notes.registered.values()) == [4 * BLOCK_BYTES]
    kv.close()


@pytest.mark.usefixtures("small_chunks")
def test_large_memory_is_pinned_in_chunks_of_whole_slots_and_pages() -> None:
    notes, arena = Notes(), filled_arena(1200)
    kv = CudaKV([random_rows(NUM_BLOCKS)], cuda=notes)
    assert kv.attach(arena)
    start = arena.rows.ctypes.data
    chunks = [(start + slot * BLOCK_BYTES, slots * BLOCK_BYTES) for slot, slots in ((0, 512), (512, 512), (1024, 176))]
    assert list(notes.registered.items()) == chunks
    kv.detach(arena)
    assert notes.registered == {}
    kv.close()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("gather", [True, False])
def test_no_dma_goes_across_the_end_of_a_chunk(gather: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be refused: chunks are pinned one by one."""
    monkeypatch.setattr(cuda_routes, "LEAST_DMA_BYTES", 0)
    starts: list[tuple[int, int]] = []
    copy = torch.Tensor.copy_
    notes, ours, arena = Notes(), random_rows(NUM_BLOCKS), filled_arena(1200)

    def noting(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        host = into if gather else source
        starts.append(((host.data_ptr() - arena.rows.ctypes.data) // BLOCK_BYTES, host.size(0)))
        return copy(into, source, non_blocking=non_blocking)

    kv = CudaKV([ours], cuda=notes)
    kv.attach(arena)
    slots, device_slots = [*range(508, 516), 1023, 1024], list(range(10))
    expected = ours[:10].clone() if gather else torch.from_numpy(arena.rows[slots])
    monkeypatch.setattr(torch.Tensor, "copy_", noting)
    if gather:
        kv.gather(device_slots, arena, slots, after=kv.fence())
    else:
        kv.scatter(arena, slots, device_slots, after=kv.fence())
    monkeypatch.undo()
    assert [start for start in starts if start[1] < 12] == [(508, 4), (512, 4), (1023, 1), (1024, 1)]
    assert torch.equal(torch.from_numpy(arena.rows[slots]) if gather else ours[:10], expected)
    kv.close()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("num_granted", [0, 1, 2])
def test_memory_is_pinned_as_a_whole_or_not_at_all(num_granted: int, caplog: pytest.LogCaptureFixture) -> None:
    """A kernel that reaches over the bus would fault where it is not."""
    notes, arena = Notes(register_status=2), filled_arena(1200)
    notes.num_granted = num_granted
    kv = CudaKV([random_rows(NUM_BLOCKS)], cuda=notes)
    with caplog.at_level(logging.WARNING):
        assert [kv.attach(arena) for _ in range(2)] == [False, False]
        kv.gather([5], arena, [2], after=kv.fence())
    assert notes.registered == {}
    assert bytes(arena.view(2)) == random_rows(NUM_BLOCKS)[5].numpy().tobytes()
    (record,) = caplog.records
    assert f"CUDA error 2 (words for 2) at chunk {num_granted + 1} of 3" in record.getMessage()
    kv.close()


def test_copies_of_other_memory_go_on_while_memory_is_pinned() -> None:
    """Copies from and to the memory that is being pinned wait until all of it is pinned."""
    entered, may_go = threading.Event(), threading.Event()

    class Slow(Notes):
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            entered.set()
            assert may_go.wait(30)
            return super().cudaHostRegister(address, num_bytes, flags)

    notes, ready, slow = Slow(), filled_arena(4), filled_arena(6)
    kv, expected = CudaKV([random_rows(NUM_BLOCKS)], cuda=notes), random_rows(NUM_BLOCKS)[5].numpy().tobytes()
    may_go.set()
    kv.attach(ready)
    may_go.clear()
    entered.clear()

    def gather(arena: Arena) -> None:
        kv.gather([5], arena, [2], after=None)

    threads = [threading.Thread(target=kv.attach, args=(slow,)), threading.Thread(target=gather, args=(slow,))]
    threads[0].start()
    assert entered.wait(30)
    threads[1].start()
    gather(ready)
    assert bytes(ready.view(2)) == expected
    assert threads[1].is_alive()
    may_go.set()
    for thread in threads:
        thread.join(30)
    assert bytes(slow.view(2)) == expected
    assert sorted(notes.registered.values()) == [4 * BLOCK_BYTES, 6 * BLOCK_BYTES]
    kv.close()


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
    leased = [read_only(arena) for arena in arenas]
    assert all(kv.attach(memory) for memory in leased)
    assert set(notes.flags.values()) == {1 | 8}, "portable, read-only"
    notes.notes.clear()
    kv.scatter_all([Blocks(leased[0], [4, 1, 2], [0, 7, 3]), Blocks(leased[1], [0, 3], [9, 5])], after=kv.fence())
    assert [note[0] for note in notes.notes] == ["enter", "wait", "synchronize", "leave"]
    for arena, slots, device_slots in ((arenas[0], [4, 1, 2], [0, 7, 3]), (arenas[1], [0, 3], [9, 5])):
        for slot, device_slot in zip(slots, device_slots, strict=True):
            expected[device_slot] = torch.from_numpy(arena.rows[slot][:BLOCK_BYTES])
    assert torch.equal(ours, expected)
    with pytest.raises(InvalidInputError, match="arena slot 4"):
        kv.scatter_all([Blocks(leased[0], [0], [0]), Blocks(leased[1], [4], [1])], after=kv.fence())
    kv.detach(leased[0])
    assert list(notes.registered.values()) == [4 * BLOCK_BYTES]
    kv.detach(leased[0])
    kv.close()
    assert notes.registered == {}


def test_memory_does_not_stay_pinned_for_a_kernel_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise RuntimeError("out of memory")

    notes, arena = Notes(), filled_arena(4)
    kv = CudaKV([random_rows(NUM_BLOCKS)], cuda=notes)
    monkeypatch.setattr(cuda_routes, "block_copy", fail)
    for memory in (read_only(arena), arena):
        with pytest.raises(RuntimeError, match="out of memory"):
            kv.attach(memory)
        assert notes.registered == {}
    kv.close()


@pytest.mark.parametrize("status", [1, 712, 801])
def test_lent_memory_that_cannot_be_pinned_is_not_attached(status: int, caplog: pytest.LogCaptureFixture) -> None:
    notes, leased = Notes(register_status=status), read_only(filled_arena(4))
    kv = CudaKV([random_rows(NUM_BLOCKS)], cuda=notes)
    assert not kv.attach(leased)
    assert f"CUDA error {status}" in caplog.text
    kv.detach(leased)
    kv.close()


def test_the_node_is_that_of_the_devices_place_on_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = torch.device("cuda", 1), []

    class Cuda:
        def get_device_properties(self, of: torch.device) -> SimpleNamespace:
            assert of == device
            return SimpleNamespace(pci_domain_id=1, pci_bus_id=0x9B, pci_device_id=2)

    monkeypatch.setattr(pinned_memory, "node_of_pci", lambda *place: asked.append(place) or 3)
    assert pinned_memory.near_node(device, Cuda()) == 3
    assert asked == [(1, 0x9B, 2)]
    assert pinned_memory.near_node(torch.device("cpu"), Cuda()) is None


@pytest.mark.parametrize(("num_blocks", "num_lanes", "rows"), [(7, 3, 2), (3, 3, 1), (2, 2, 1), (100, 3, NUM_BLOCKS)])
def test_staging_memory_is_bounded(num_blocks: int, num_lanes: int, rows: int) -> None:
    """By what is given for all copies at a time, of which there are fewer rather than that it were more."""
    kv = CudaKV([random_rows(NUM_BLOCKS)], staging_bytes=num_blocks * BLOCK_BYTES, num_lanes=3, cuda=Notes())
    assert kv.memory_use.staging_bytes == num_lanes * rows * BLOCK_BYTES
    assert kv._lanes._free.qsize() == num_lanes


def test_staging_memory_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache\.staging_bytes: 79 bytes hold no block of 80"):
        CudaKV([random_rows(NUM_BLOCKS)], staging_bytes=BLOCK_BYTES - 1, cuda=Notes())


def test_what_is_not_staged_takes_no_staging_memory() -> None:
    notes = Notes()
    pages = torch.zeros(2, LEAST_PART_BYTES, dtype=torch.uint8)
    kv = CudaKV([pages], staging_bytes=1, cuda=notes, driver=Driver(notes))
    assert kv.memory_use.staging_bytes == 0


def test_whether_memory_can_be_pinned_for_reading_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    """Many discrete GPUs cannot, and say so (801, cudaErrorNotSupported)."""
    device, able, unable = torch.device("cpu"), Notes(), Notes(register_status=801)
    assert pins_read_only(device)
    assert pins_read_only(device, able)
    assert list(able.flags.values()) == [1 | 8]
    assert able.registered == {}, "the page is given back"
    with caplog.at_level(logging.INFO):
        assert not pins_read_only(device, unable)
    assert "cannot read them in place (CUDA error 801)" in caplog.text
