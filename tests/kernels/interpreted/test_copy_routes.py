"""The ways of `CudaKV`'s copies: what each asks for, in what order, and what it waits for."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cuda_rig import BLOCK_BYTES, NUM_BLOCKS, Driver, Notes, filled_arena, random_rows
from kvtier.device import cuda_lanes, cuda_routes
from kvtier.device.cuda import CudaKV
from kvtier.device.grouped_kv import GroupedKV
from kvtier.device.kv import Blocks, HostMemoryKV
from kvtier.device.kv_group import KVGroup
from kvtier.device.pinned_memory import PinnedMemory
from kvtier.memory.arena import Arena
from kvtier.memory.slot_memory import SlotMemory
from kvtier_kernels.records import LossyCodec, RecordLayout

DEVICE_SLOTS, SLOTS = [7, 0, 11, 3, 4], [5, 2, 3, 9, 4]


@pytest.fixture(params=["direct", "staged, by batches", "staged, by kernel", "staged, one by one"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CudaKV]:
    """Makes a `CudaKV` that goes this way."""
    route = request.param
    has_driver = route != "staged, one by one"
    monkeypatch.setattr(cuda_routes, "LEAST_DMA_BYTES", 0)
    monkeypatch.setattr(cuda_routes, "LEAST_PART_BYTES", 2**20 if route == "staged, by kernel" else 1)

    def made(*groups: Any, notes: Notes | None = None, **options: Any) -> CudaKV:
        notes = notes or Notes()
        # The route is chosen by the size of parts.
        least = 1 if route == "direct" else 2**20
        monkeypatch.setattr("kvtier.device.cuda.LEAST_PART_BYTES", least)
        kv = CudaKV(*groups, cuda=notes, driver=Driver(notes) if has_driver else None, **options)
        assert isinstance(kv._route, cuda_routes.Direct) == (route == "direct")
        return kv

    return made


@pytest.mark.parametrize("slot_bytes", [BLOCK_BYTES, BLOCK_BYTES + 7], ids=["tight slots", "roomy slots"])
@pytest.mark.parametrize("widths", [[(80,)], [(24, 24, 8, 24)], [(16, 64), (40,), (24, 24)]], ids=str)
def test_groups_of_blocks_in_parts(widths: list[tuple[int, ...]], slot_bytes: int, make: Callable[..., CudaKV]) -> None:
    """As the engine on CPU moves them; where a group's blocks are smaller, zeros follow."""
    ours = [[random_rows(NUM_BLOCKS, width + 8, 7 * g + n)[:, :width] for n, width in enumerate(group)]
            for g, group in enumerate(widths)]  # fmt: skip
    theirs = [[part.clone() for part in group] for group in ours]
    kv = make(*ours, staging_bytes=3 * 2 * BLOCK_BYTES)
    oracle = GroupedKV([HostMemoryKV(*(part.numpy() for part in group)) for group in theirs])
    arenas = [filled_arena(20, slot_bytes) for _ in range(2)]
    assert (kv.num_blocks, kv.block_bytes) == (oracle.num_blocks, oracle.block_bytes)
    random = np.random.default_rng(0)
    for _ in range(3):
        device_slots = random.permutation(kv.num_blocks)[:9].tolist()
        slots = [*range(4, 9), *random.permutation(np.arange(9, 20))[:4].tolist()]
        for either, arena in zip((kv, oracle), arenas, strict=True):
            either.gather(device_slots, arena, slots, after=either.fence())
            either.scatter_all(
                [
                    Blocks(arena, slots[:3], device_slots[3:6]),
                    Blocks(arena, slots[3:], device_slots[:3] + device_slots[6:]),
                ],
                after=either.fence(),
            )
        assert np.array_equal(arenas[0].rows, arenas[1].rows)
        for mine, reference in zip(ours, theirs, strict=True):
            assert all(torch.equal(*pair) for pair in zip(mine, reference, strict=True))
    kv.close()


def test_the_way_is_chosen_by_the_size_of_parts(caplog: pytest.LogCaptureFixture) -> None:
    """And by what the driver and the codec allow."""
    small, large = random_rows(4, (32 << 10) - 1), random_rows(4, 32 << 10)
    halves = torch.zeros(4, 32 << 10, dtype=torch.uint8)
    layout = RecordLayout(next(iter(LossyCodec)), torch.bfloat16, head_dim=64, num_vectors=256)
    assert layout.page_bytes == halves.size(1)
    for groups, layout_or_none, driver, direct in (
        ([[large]], None, Driver(), True),
        ([[large, large]], None, Driver(), True),
        ([[large, small]], None, Driver(), False),
        ([[large], [small]], None, Driver(), False),
        ([[large]], None, Driver(find_status=500), False),
        ([[large]], None, Driver(garbles=True), False),
        ([[halves]], layout, Driver(), False),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, "kvtier.device.cuda"):
            kv = CudaKV(*groups, layout=layout_or_none, num_lanes=2, cuda=Notes(), driver=driver)
        assert ("straight between" in caplog.text) == direct
        assert ("by way of staging memory" in caplog.text) != direct
        lanes = [kv._lanes._free.get() for _ in range(2)]
        assert all((lane.staging.numel() == 0) == direct for lane in lanes), "no device memory is taken for nothing"


def test_staging_is_divided_among_the_lanes() -> None:
    kv = CudaKV([random_rows(NUM_BLOCKS)], staging_bytes=9 * BLOCK_BYTES, num_lanes=4, cuda=Notes())
    assert [kv._lanes._free.get().staging.size(0) for _ in range(4)] == [2] * 4


def ordered(monkeypatch: pytest.MonkeyPatch, notes: Notes) -> None:
    """Has `notes` say when the KV is touched, and when the bus is crossed."""
    touch, cross = KVGroup.copy, cuda_routes.Staged._cross

    def touching(*args: Any, **options: Any) -> None:
        notes.note("touch", None)
        touch(*args, **options)

    def crossing(*args: Any, **options: Any) -> None:
        notes.note("cross", None)
        cross(*args, **options)

    monkeypatch.setattr(KVGroup, "copy", touching)
    monkeypatch.setattr(cuda_routes.Staged, "_cross", crossing)


def test_only_what_touches_the_kv_waits_for_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes()
    kv = CudaKV([random_rows(NUM_BLOCKS)], staging_bytes=3 * 3 * BLOCK_BYTES, cuda=notes)
    arena = filled_arena(10)
    kv.gather([0], arena, [0], after=None)  # pins
    ordered(monkeypatch, notes)
    for copy, expected in (
        (lambda: kv.gather(DEVICE_SLOTS, arena, SLOTS, after=kv.fence()),
         ["enter", "wait", "touch", "cross", "touch", "cross", "synchronize", "leave"]),
        (lambda: kv.scatter(arena, SLOTS, DEVICE_SLOTS, after=kv.fence()),
         ["enter", "cross", "wait", "touch", "cross", "touch", "synchronize", "leave"]),
        (lambda: kv.scatter(arena, SLOTS[:2], DEVICE_SLOTS[:2], after=None),
         ["enter", "cross", "touch", "synchronize", "leave"]),
    ):  # fmt: skip
        notes.notes.clear()
        copy()
        assert [note[0] for note in notes.notes] == expected
        streams = {note[1] for note in notes.notes if note[1] is not None}
        assert len(streams) == 1
        assert notes.engine_stream not in streams
        assert all(note[2] is notes.engine_stream for note in notes.notes if note[0] == "wait")


def test_a_direct_copy_waits_before_its_first_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.device.cuda.LEAST_PART_BYTES", 1)
    notes = Notes()
    driver, arena = Driver(notes), filled_arena(10)
    parts = random_rows(NUM_BLOCKS, 48), random_rows(NUM_BLOCKS, 32)
    kv = CudaKV(parts, cuda=notes, driver=driver)
    kv.gather([0], arena, [0], after=None)  # pins
    for copy, order in (
        (lambda: kv.gather(DEVICE_SLOTS, arena, SLOTS, after=kv.fence()), 1),
        (lambda: kv.scatter(arena, SLOTS, DEVICE_SLOTS, after=kv.fence()), 3),
    ):
        notes.notes.clear()
        driver.calls.clear()
        copy()
        assert [note[0] for note in notes.notes] == ["enter", "wait", "synchronize", "leave"]
        (call,) = driver.calls
        assert sorted(call.sizes) == [32] * 5 + [48] * 5
        assert call.order == order


def test_a_fence_stands_where_it_was_made() -> None:
    """Behind what the thread's stream held then, not when the copy comes to it; the stream may be another each time."""
    notes = Notes()
    kv, arena = CudaKV([random_rows(NUM_BLOCKS)], cuda=notes), filled_arena(10)
    fence = kv.fence()
    first, notes.engine_stream = notes.engine_stream, type(notes.engine_stream)(notes)
    notes.notes.clear()
    kv.gather([0], arena, [0], after=fence)
    kv.gather([0], arena, [0], after=kv.fence())
    assert [note[2] for note in notes.notes if note[0] == "wait"] == [first, notes.engine_stream]


def test_seconds_that_a_copy_waited_for_the_engine() -> None:
    kv, arena = (
        CudaKV([random_rows(NUM_BLOCKS)], staging_bytes=BLOCK_BYTES, num_lanes=1, cuda=Notes()),
        filled_arena(10),
    )
    assert kv.scatter(arena, SLOTS, DEVICE_SLOTS, after=kv.fence()) == 0.25
    assert kv.scatter(arena, SLOTS, DEVICE_SLOTS, after=None) == 0.0, "no time of the copy before"
    assert kv.scatter_all([Blocks(arena, SLOTS, DEVICE_SLOTS)] * 2, after=kv.fence()) == 0.25


def test_transfers_end_where_registered_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten slots in a row, registered by fours."""
    of = PinnedMemory.of

    def in_chunks(self: PinnedMemory, memory: SlotMemory) -> Any:
        return dataclasses.replace(of(self, memory), chunk_slots=4)

    monkeypatch.setattr(PinnedMemory, "of", in_chunks)
    monkeypatch.setattr(cuda_routes, "LEAST_PART_BYTES", 1)
    notes = Notes()
    driver, arena = Driver(notes), filled_arena(12)
    kv = CudaKV([random_rows(NUM_BLOCKS)], cuda=notes, driver=driver)
    driver.calls.clear()
    kv.gather(range(10), arena, range(1, 11), after=None)
    kv.scatter(arena, range(1, 11), range(10), after=None)
    assert [call.sizes for call in driver.calls] == [[3 * BLOCK_BYTES, 4 * BLOCK_BYTES, 3 * BLOCK_BYTES]] * 2
    assert driver.calls[0].targets == driver.calls[1].sources == [arena.rows[slot].ctypes.data for slot in (1, 4, 8)]


def test_numbers_on_the_device_are_written_anew_when_they_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of more pieces than there is room for numbers waits in between."""
    monkeypatch.setattr(cuda_lanes, "_LEAST_NUMBERS", 1)
    ours, notes = random_rows(NUM_BLOCKS), Notes()
    kv, arena = CudaKV([ours], staging_bytes=2 * BLOCK_BYTES, num_lanes=1, cuda=notes), filled_arena(NUM_BLOCKS)
    kv.gather([0], arena, [0], after=None)  # pins
    notes.notes.clear()
    kv.gather(range(NUM_BLOCKS), arena, range(NUM_BLOCKS), after=None)
    assert np.array_equal(arena.rows, ours.numpy())
    assert sum(note[0] == "synchronize" for note in notes.notes) > 1


def test_memory_that_could_not_be_pinned_is_copied_all_the_same(make: Callable[..., CudaKV]) -> None:
    ours = random_rows(NUM_BLOCKS)
    kv, arena = make([ours], notes=Notes(register_status=2)), filled_arena(10)
    kv.gather(DEVICE_SLOTS, arena, SLOTS, after=kv.fence())
    assert np.array_equal(arena.rows[SLOTS], ours[DEVICE_SLOTS].numpy())


def test_slots_too_small_for_a_block_are_refused(make: Callable[..., CudaKV]) -> None:
    kv, arena = make([random_rows(NUM_BLOCKS)]), Arena(4, BLOCK_BYTES - 1)
    with pytest.raises(Exception, match="blocks of 80 bytes in slots of 79"):
        kv.gather([0], arena, [0], after=None)


def test_a_refused_transfer_fails_the_copy_and_the_lane_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.device.cuda.LEAST_PART_BYTES", 1)
    notes = Notes()
    driver, arena = Driver(notes), filled_arena(4)
    kv = CudaKV([random_rows(NUM_BLOCKS)], num_lanes=1, cuda=notes, driver=driver)
    driver._status = 719
    with pytest.raises(RuntimeError, match="CUDA error 719"):
        kv.gather([0], arena, [0], after=kv.fence())
    driver._status = 0
    kv.gather([3], arena, [1], after=kv.fence())
    assert bytes(arena.view(1)) == random_rows(NUM_BLOCKS)[3].numpy().tobytes()
