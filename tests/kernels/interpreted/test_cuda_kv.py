"""`CudaKV` with its kernel in the interpreter and streams that only take notes: what is copied, and in what order.

Whether a GPU keeps the order is for a machine that has one; here it is asked for.
"""

import threading
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from cuda_rig import BLOCK_BYTES, NUM_BLOCKS, Notes, filled_arena, random_rows
from kvtier.codec.checksums import PREFIX_BYTES
from kvtier.device import cuda_routes, device_check, kv_group
from kvtier.device.cuda import CudaKV
from kvtier.device.kv import HostMemoryKV
from kvtier.device.quantised import QuantisedHostKV
from kvtier.errors import ClosedError, DeviceFaultError, InvalidInputError
from kvtier.memory.arena import Arena
from kvtier_kernels.copies import block_copy, part_copy, row_copy
from kvtier_kernels.records import LossyCodec, RecordLayout


@pytest.mark.parametrize("least_dma_bytes", [0, 2**20], ids=["by DMA", "by kernel"])
@pytest.mark.parametrize("slot_bytes", [BLOCK_BYTES, BLOCK_BYTES + 7], ids=["tight slots", "roomy slots"])
@pytest.mark.parametrize("staged_blocks", [1, 3, 100])
def test_copies_what_the_engine_on_cpu_copies(
    staged_blocks: int, slot_bytes: int, least_dma_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches larger and smaller than the staging buffer, arena slots in runs and alone."""
    monkeypatch.setattr(cuda_routes, "LEAST_DMA_BYTES", least_dma_bytes)
    ours, theirs = random_rows(NUM_BLOCKS), random_rows(NUM_BLOCKS)
    kv = CudaKV([ours], staging_bytes=staged_blocks * BLOCK_BYTES, cuda=Notes())
    oracle = HostMemoryKV(theirs.numpy())
    arena, expected = filled_arena(10, slot_bytes), filled_arena(10, slot_bytes)
    assert (kv.num_blocks, kv.block_bytes) == (oracle.num_blocks, oracle.block_bytes)
    device_slots, arena_slots = [7, 0, 11, 3, 4], [5, 2, 3, 9, 4]
    kv.gather(device_slots, arena, arena_slots, after=kv.fence())
    for device_slot, arena_slot in zip(device_slots, arena_slots, strict=True):
        expected.rows[arena_slot][:BLOCK_BYTES] = theirs[device_slot].numpy()
    assert np.array_equal(arena.rows, expected.rows)
    kv.scatter(arena, [9, 0, 5, 6, 1], [1, 2, 9, 0, 10], after=kv.fence())
    for device_slot, arena_slot in zip([1, 2, 9, 0, 10], [9, 0, 5, 6, 1], strict=True):
        theirs[device_slot] = torch.from_numpy(expected.rows[arena_slot][:BLOCK_BYTES])
    assert torch.equal(ours, theirs)
    kv.gather([], arena, [], after=kv.fence())
    kv.scatter(arena, [], [], after=kv.fence())
    kv.close()


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("codec", list(LossyCodec))
def test_blocks_in_the_form_of_a_lossy_codec(codec: LossyCodec, num_parts: int) -> None:
    """As the engine on CPU has them; where a block has several parts, their records follow one another."""
    layout = RecordLayout(codec, torch.bfloat16, head_dim=10, num_vectors=5)
    values = torch.randn(num_parts, NUM_BLOCKS, 50, generator=torch.Generator().manual_seed(2)).bfloat16()
    ours, theirs = (values.clone().view(torch.uint8).unbind() for _ in range(2))
    block_bytes = num_parts * layout.record_bytes
    kv = CudaKV(ours, layout=layout, staging_bytes=3 * block_bytes, cuda=Notes())
    arena, expected = filled_arena(10, block_bytes), filled_arena(10, block_bytes)
    assert kv.block_bytes == block_bytes
    kv.gather([7, 0, 11, 3, 4], arena, [5, 2, 3, 9, 4], after=kv.fence())
    kv.scatter(arena, [9, 5, 2], [1, 2, 9], after=kv.fence())
    for number, part in enumerate(theirs):
        oracle, records = QuantisedHostKV(part, layout), Arena(10, layout.record_bytes)
        here = expected.rows[:, number * layout.record_bytes :][:, : layout.record_bytes]
        records.rows[:] = here
        oracle.gather([7, 0, 11, 3, 4], records, [5, 2, 3, 9, 4], after=oracle.fence())
        oracle.scatter(records, [9, 5, 2], [1, 2, 9], after=oracle.fence())
        here[:] = records.rows
    assert np.array_equal(arena.rows, expected.rows)
    assert all(torch.equal(mine, reference) for mine, reference in zip(ours, theirs, strict=True))
    kv.close()
    with pytest.raises(InvalidInputError, match=r"KV in parts of 80 bytes: .* needs 100"):
        CudaKV([random_rows(4)], layout=layout, cuda=Notes())


@pytest.mark.parametrize("widths", [(16, 16, 16), (16, 24, 24, 8)], ids=["layers alike", "layers that differ"])
def test_blocks_in_parts(widths: tuple[int, ...]) -> None:
    ours = [random_rows(NUM_BLOCKS, width + 8, seed)[:, :width] for seed, width in enumerate(widths)]
    theirs = [part.clone() for part in ours]
    kv, oracle = CudaKV(ours, staging_bytes=2 * sum(widths), cuda=Notes()), HostMemoryKV(*(p.numpy() for p in theirs))
    arena, expected = filled_arena(10), filled_arena(10)
    assert (kv.num_blocks, kv.block_bytes) == (oracle.num_blocks, oracle.block_bytes)
    for either, memory in ((kv, arena), (oracle, expected)):
        either.gather([7, 0, 11, 3, 4], memory, [5, 2, 3, 9, 4], after=either.fence())
        either.scatter(memory, [9, 0, 5, 6, 1], [1, 2, 9, 0, 10], after=either.fence())
    assert np.array_equal(arena.rows, expected.rows)
    assert all(torch.equal(mine, reference) for mine, reference in zip(ours, theirs, strict=True))
    kv.close()


@pytest.mark.parametrize("widths", [(BLOCK_BYTES,), (16, 16)], ids=["one part", "two parts"])
def test_both_ways_are_compiled_before_the_first_copy(widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """And every lane has what a copy takes. Without a byte copied: the memory may be in use."""
    launched = []
    original = row_copy.copy_rows

    def copy_rows(paged: torch.Tensor, *args: Any, gather: bool, **options: Any) -> int:
        launched.append((gather, paged.data_ptr(), args[2].data_ptr()))
        return original(paged, *args, gather=gather, **options)

    for module in (block_copy, part_copy):
        monkeypatch.setattr(module, "copy_rows", copy_rows)
    parts = [random_rows(NUM_BLOCKS, width) for width in widths]
    kv = CudaKV(parts, num_lanes=3, cuda=Notes())
    assert len(set(launched)) == len(launched) == 6, "by each lane"
    assert all(torch.equal(part, random_rows(NUM_BLOCKS, width)) for part, width in zip(parts, widths, strict=True))
    kv.close()


def test_short_runs_cross_the_bus_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five blocks in two runs, where a DMA is worth two blocks, or three; and in memory that is not pinned, or that
    another one has pinned."""
    copied: list[tuple[int, int]] = []
    original = block_copy.block_copy

    def note(source: torch.Tensor, rows: torch.Tensor, target: torch.Tensor, *others: torch.Tensor) -> None:
        copied.append((source.data_ptr(), target.data_ptr()))
        original(source, rows, target, *others)

    monkeypatch.setattr(cuda_routes, "block_copy", note)
    for register_status, least_dma_bytes, by_kernel in (
        (0, BLOCK_BYTES * 2, False),
        (0, BLOCK_BYTES * 3, True),
        (2, BLOCK_BYTES * 3, False),
    ):
        monkeypatch.setattr(cuda_routes, "LEAST_DMA_BYTES", least_dma_bytes)
        kv, arena = CudaKV([random_rows(NUM_BLOCKS)], cuda=Notes(register_status)), filled_arena(10)
        kv.gather([8], arena, [0], after=kv.fence())  # pins, and compiles both ways
        for copy in (
            lambda kv=kv, arena=arena: kv.gather([7, 0, 11, 3, 4], arena, [5, 2, 3, 9, 4], after=kv.fence()),
            lambda kv=kv, arena=arena: kv.scatter(arena, [5, 2, 3, 9, 4], [7, 0, 11, 3, 4], after=kv.fence()),
        ):
            copied.clear()
            copy()
            assert len(copied) == by_kernel
            assert sum(arena.rows.ctypes.data in pointers for pointers in copied) == by_kernel
        kv.close()


@pytest.mark.parametrize(("least_dma_bytes", "num_kernels"), [(BLOCK_BYTES, 0), (BLOCK_BYTES + 1, 3)])
def test_nothing_is_compiled_for_blocks_that_always_go_by_dma(
    least_dma_bytes: int, num_kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy crosses without a kernel, or with a block too small for a DMA by one, and both before it."""
    monkeypatch.setattr(cuda_routes, "LEAST_DMA_BYTES", least_dma_bytes)
    kv, arena, copies = CudaKV([random_rows(NUM_BLOCKS)], cuda=Notes()), filled_arena(2), []
    original = block_copy.block_copy
    monkeypatch.setattr(cuda_routes, "block_copy", lambda *tensors: (copies.append(tensors), original(*tensors)))
    kv.gather([0], arena, [1], after=kv.fence())
    assert len(copies) == num_kernels
    kv.close()


def test_copies_come_after_the_engine_and_end_before_the_return() -> None:
    notes = Notes()
    kv = CudaKV([random_rows(NUM_BLOCKS)], cuda=notes)
    arena = filled_arena(4)
    kv.gather([0], arena, [0], after=kv.fence())  # pins
    for copy in (
        lambda: kv.gather([0], arena, [1], after=kv.fence()),
        lambda: kv.scatter(arena, [1], [0], after=kv.fence()),
    ):
        notes.notes.clear()
        copy()
        enter, wait, synchronize, leave = notes.notes
        lane_stream = enter[1]
        assert lane_stream is not notes.engine_stream
        assert wait == ("wait", lane_stream, notes.engine_stream)
        assert synchronize == ("synchronize", lane_stream)
        assert leave == ("leave", lane_stream)
    kv.close()


def test_a_copy_that_fails_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots will be given to others. And the lane is there for the next caller."""
    notes = Notes()
    kv = CudaKV([random_rows(NUM_BLOCKS)], num_lanes=1, cuda=notes)
    arena = filled_arena(4)
    kv.gather([0], arena, [0], after=kv.fence())  # pins

    def fail(*_args: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(kv_group, "block_copy", fail)
        notes.notes.clear()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            kv.gather([0], arena, [1], after=kv.fence())
        assert [note[0] for note in notes.notes][:3] == ["enter", "wait", "synchronize"]
    kv.gather([3], arena, [1], after=kv.fence())
    assert bytes(arena.view(1)) == random_rows(NUM_BLOCKS)[3].numpy().tobytes()
    kv.close()


def test_threads_share_the_lanes() -> None:
    blocks = random_rows(NUM_BLOCKS)
    kv = CudaKV([blocks], staging_bytes=2 * BLOCK_BYTES, num_lanes=2, cuda=Notes())
    arena = filled_arena(NUM_BLOCKS)

    def copy(first: int) -> None:
        slots = list(range(first, NUM_BLOCKS, 4))
        for _ in range(3):
            kv.gather(slots, arena, slots, after=kv.fence())
            kv.scatter(arena, slots, slots, after=kv.fence())

    threads = [threading.Thread(target=copy, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert np.array_equal(arena.rows, random_rows(NUM_BLOCKS).numpy())
    assert torch.equal(blocks, random_rows(NUM_BLOCKS))
    kv.close()


def test_slots_that_do_not_exist_are_refused() -> None:
    kv = CudaKV([random_rows(NUM_BLOCKS)], cuda=Notes())
    arena, before = filled_arena(4), filled_arena(4)
    for slot in (-1, NUM_BLOCKS):
        with pytest.raises(InvalidInputError, match=f"device slot {slot}"):
            kv.gather([0, slot], arena, [0, 1], after=kv.fence())
        with pytest.raises(InvalidInputError, match=f"device slot {slot}"):
            kv.scatter(arena, [0, 1], [0, slot], after=kv.fence())
    for slot in (-1, 4):
        with pytest.raises(InvalidInputError, match=f"arena slot {slot}"):
            kv.gather([0, 1], arena, [0, slot], after=kv.fence())
    with pytest.raises(InvalidInputError, match="2 device slots and 1 arena slots"):
        kv.gather([0, 1], arena, [0], after=kv.fence())
    assert np.array_equal(arena.rows, before.rows)
    arena.close()
    with pytest.raises(ClosedError):
        kv.gather([0], arena, [0], after=kv.fence())
    with pytest.raises(InvalidInputError, match="need a uint8 view"):
        CudaKV([random_rows(4).float()], cuda=Notes())
    kv.close()


@pytest.mark.parametrize("num_groups", [1, 2])
def test_blocks_are_verified_by_their_writers_checksums(num_groups: int) -> None:
    groups = [[random_rows(NUM_BLOCKS, 128, seed=2 * group + part) for part in range(2)] for group in range(num_groups)]
    kv = CudaKV(*groups, cuda=Notes())
    assert kv.begin_verifying()
    last = NUM_BLOCKS * num_groups - 1
    slots, prefixes = [last, 0, 3], [bytes([place] * PREFIX_BYTES) for place in range(3)]
    blocks = [torch.cat([part[slot % NUM_BLOCKS] for part in groups[slot // NUM_BLOCKS]]) for slot in slots]
    sums = [
        xxhash.xxh3_64_intdigest(prefix + block.numpy().tobytes())
        for prefix, block in zip(prefixes, blocks, strict=True)
    ]
    assert kv.wrong_blocks(slots, prefixes, sums) == []
    assert kv.wrong_blocks(slots, prefixes, [sums[0] ^ 1, sums[1], sums[0]]) == [0, 2]
    groups[0][1][0, 127] ^= 1
    assert kv.wrong_blocks(slots, prefixes, sums) == [1]
    kv.close()


def test_blocks_that_are_others_in_host_memory_are_not_verified() -> None:
    for groups in (
        [[random_rows(NUM_BLOCKS, 129), random_rows(NUM_BLOCKS, 127)]],  # no whole words
        [[random_rows(NUM_BLOCKS, 256)], [random_rows(NUM_BLOCKS, 512)]],  # zeros follow in host memory
    ):
        kv = CudaKV(*groups, cuda=Notes())
        assert not kv.begin_verifying()
        kv.close()


@pytest.mark.parametrize("num_groups", [1, 2])
def test_loads_that_bring_other_bytes_are_noticed(num_groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [[random_rows(NUM_BLOCKS, 40, seed=part) for part in range(2)] for _ in range(num_groups)]
    notes, arena = Notes(), filled_arena(8)
    kv = CudaKV(*groups, checks_loads=True, cuda=notes)
    last = NUM_BLOCKS * num_groups - 1
    kv.scatter(arena, [1, 2, 3], [4, 5, last], after=kv.fence())
    monkeypatch.setattr(device_check.DeviceCheck, "_sample", lambda _self, num_blocks: list(range(num_blocks)))
    kv.scatter(arena, [1, 2, 3], [4, 5, last], after=kv.fence())
    original = cuda_routes.Staged.scatter

    def scatter(route: cuda_routes.Staged, *arguments: Any) -> None:
        original(route, *arguments)
        groups[-1][1][NUM_BLOCKS - 1, 39] ^= 1

    monkeypatch.setattr(cuda_routes.Staged, "scatter", scatter)
    with pytest.raises(DeviceFaultError, match=r"of 3 blocks, 1 that were looked at .* other bytes"):
        kv.scatter(arena, [1, 2, 3], [4, 5, last], after=kv.fence())
    kv.gather([last], arena, [0], after=kv.fence())  # the lane is there for the next caller
    kv.close()
