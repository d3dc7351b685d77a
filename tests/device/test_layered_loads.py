"""Loads whose layers come one after the other: what is queued on the device, who may do what meanwhile, and an engine
that computes while they come."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch

from cuda_rig import Driver, Notes
from engine_rig import PATIENCE_S, TOKENS_PER_BLOCK, EngineRig, MakeRig, rigs
from hierarchy_rig import Rig, chain, until
from kvtier.device.cuda import CudaKV
from kvtier.device.kv import Blocks, Fence
from kvtier.device.layered_loads import LayeredLoads
from kvtier.errors import InvalidInputError
from kvtier.memory.arena import Arena
from kvtier.offload import JobResult
from kvtier.offload.messages import LoadBatch
from kvtier_engine.model.paged_kv import PagedKV
from tiny_model import CONFIG

LAYERS, LAYER_BYTES, NUM_BLOCKS = 3, 32 << 10, 6
NUM_HOST_LOADS = 2
"""Loads from host memory at a time."""
CPU = torch.device("cpu")

make_rig = pytest.fixture(rigs)


def cuda_kv(notes: Notes, driver: Driver | None = None) -> tuple[CudaKV, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 256, (NUM_BLOCKS, LAYERS * LAYER_BYTES), dtype=torch.uint8, generator=generator)
    return CudaKV([rows], cuda=notes, driver=driver or Driver(notes)), rows


def random_arena(num_slots: int) -> Arena:
    arena = Arena(num_slots, LAYERS * LAYER_BYTES)
    arena.rows[:] = np.random.default_rng(2).integers(0, 256, arena.rows.shape, dtype=np.uint8)
    return arena


def test_the_first_layer_of_all_blocks_is_queued_first_and_an_event_is_behind_each() -> None:
    notes = Notes()
    driver = Driver(notes)
    kv, rows = cuda_kv(notes, driver)
    loads, arena = kv.by_layer(LAYERS), random_arena(4)
    assert loads is not None
    kv.attach(arena)
    driver.calls.clear()
    fence = kv.fence()
    notes.notes.clear()
    queued: list[int] = []

    def on_queued() -> None:
        queued.append(len(driver.calls))
        assert not [note for note in notes.notes if note[0] == "synchronize"], "the engine need not wait for the end"
        assert loads.are_under_way
        for layer in range(LAYERS):
            with notes.device(CPU):
                loads.wait(layer)

    loads.scatter(Blocks(arena, [3, 0], [1, 4]), after=fence, on_queued=on_queued)
    assert queued == [LAYERS]
    first, base = rows.data_ptr(), arena.rows.ctypes.data
    for layer, call in enumerate(driver.calls):
        inside = layer * LAYER_BYTES
        assert call.sizes == [LAYER_BYTES] * 2
        assert call.targets == [first + block * LAYERS * LAYER_BYTES + inside for block in (4, 1)]
        assert call.sources == [base + slot * LAYERS * LAYER_BYTES + inside for slot in (0, 3)]
    waits = [note for note in notes.notes if note[0] == "wait"]
    assert len(waits) == 1 + LAYERS, "the copies for the fence, and the engine for each layer"
    assert waits[0][1] is not notes.engine_stream
    assert all(stream is notes.engine_stream for _, stream, *_ in waits[1:])
    assert np.array_equal(rows[[1, 4]].numpy(), arena.rows[[3, 0]])
    assert not loads.are_under_way
    kv.close()


def test_whoever_makes_a_fence_meanwhile_comes_after_the_load() -> None:
    """Its device slots may be somebody else's by then, whose copies wait for that fence and for nothing else."""
    notes = Notes()
    kv, _ = cuda_kv(notes)
    loads, arena = kv.by_layer(LAYERS), random_arena(2)
    assert loads is not None
    kv.attach(arena)
    order: list[str] = []

    def on_queued() -> None:
        notes.notes.clear()
        kv.fence()
        order.extend(note[0] for note in notes.notes)
        assert notes.notes[0][1] is notes.engine_stream

    loads.scatter(Blocks(arena, [1], [0]), after=None, on_queued=on_queued)
    assert order == ["wait"]
    notes.notes.clear()
    kv.fence()
    assert not notes.notes, "afterwards there is nothing to wait for"
    kv.close()


def test_a_load_that_cannot_be_queued_is_nobodys_to_wait_for() -> None:
    notes = Notes()
    kv, _ = cuda_kv(notes)
    loads = kv.by_layer(LAYERS)
    assert loads is not None

    def never() -> None:
        raise AssertionError("it is not queued")

    with pytest.raises(InvalidInputError, match="device slot 6"):
        loads.scatter(Blocks(random_arena(2), [1], [NUM_BLOCKS]), after=None, on_queued=never)
    assert not loads.are_under_way
    kv.close()


def test_where_there_is_nothing_to_gain_loads_are_whole() -> None:
    notes = Notes()
    whole = torch.zeros(4, 3 * LAYER_BYTES, dtype=torch.uint8)
    halves = [torch.zeros(4, LAYER_BYTES, dtype=torch.uint8) for _ in range(2)]
    for groups, num_layers, driver in (
        ([[whole]], 2 * LAYERS, Driver(notes)),  # layers too small
        ([halves], 2, Driver(notes)),  # a part per layer: blocks of vLLM, whose forward pass is not ours
        ([[whole], [whole]], 3, Driver(notes)),  # two KV groups
    ):
        kv = CudaKV(*groups, cuda=notes, driver=driver)
        assert kv.by_layer(num_layers) is None
        kv.close()


class StandIn:
    """`CopiesByLayer` of a device that copies when it is told to."""

    def __init__(self) -> None:
        self.may_queue, self.may_end = threading.Event(), threading.Event()
        self.may_queue.set()
        self.num_begun = 0
        self.blocks: list[Blocks] = []

    def scatter(self, blocks: Blocks, *, after: Fence | None, on_queued: Callable[[], None]) -> None:
        self.num_begun += 1
        assert self.may_queue.wait(PATIENCE_S)
        self.blocks.append(blocks)
        on_queued()
        assert self.may_end.wait(PATIENCE_S)


def saved(num_blocks: int, **options: Any) -> tuple[Rig, list[Any]]:
    rig, keys = Rig(**options), chain(num_blocks)
    for start in range(0, num_blocks, 2):  # half of a small arena at a time
        rig.save(keys[start : start + 2], range(start, start + 2))
    return rig, list(zip(keys, range(10, 10 + num_blocks), strict=True))


def test_a_job_is_over_when_its_copies_are_queued_and_its_slots_when_they_are_done() -> None:
    layered = StandIn()
    rig, blocks = saved(4, num_slots=4, layered=layered)
    job = rig.hierarchy.start_load(blocks, by_layer=True)
    result = rig.result(job)
    assert (result.failed, result.tiers) == (frozenset(), ("host",) * 4)
    (given,) = layered.blocks
    assert list(given.device_slots) == [10, 11, 12, 13], "one message, however many blocks"
    assert rig.directory.is_moving
    others = chain(2, seed=1)
    assert rig.save(others, range(2)) is None, "no slot of the arena is free, and none is taken away"
    assert rig.tiers_of([key for key, _ in blocks]) == ["host"] * 4
    layered.may_end.set()
    rig.settle()
    assert rig.save(others, range(2)) is not None
    rig.close()


def test_a_load_by_layer_may_be_cancelled_until_its_copies_begin() -> None:
    layered = StandIn()
    layered.may_queue.clear()
    rig, blocks = saved(2, layered=layered)
    *first, last = [
        rig.hierarchy.start_load([(key, slot + 2 * load) for key, slot in blocks], by_layer=True)
        for load in range(NUM_HOST_LOADS + 1)
    ]
    until(lambda: layered.num_begun == NUM_HOST_LOADS or None)
    for job in (*first, last):
        rig.hierarchy.cancel(job)
    assert rig.result(last).failed == {0, 1}, "it waits behind the others"
    layered.may_queue.set()
    results: dict[int, JobResult] = {}

    def all_over() -> bool | None:
        results.update((result.job_id, result) for result in rig.hierarchy.poll())
        return len(results) == len(first) or None

    until(all_over)
    assert all(results[job].failed == frozenset() for job in first), "their device slots were being written to"
    layered.may_end.set()
    rig.settle()
    assert len(layered.blocks) == NUM_HOST_LOADS
    rig.close()


def test_blocks_that_are_not_all_in_host_memory_are_loaded_as_ever() -> None:
    layered = StandIn()
    rig, blocks = saved(2, layered=layered)
    missing = (chain(3)[2], 20)
    result = rig.result(rig.hierarchy.start_load([*blocks, missing], by_layer=True))
    assert (result.failed, layered.blocks) == (frozenset({2}), [])
    rig.settle()
    rig.close()


def test_a_copy_that_fails_before_it_is_queued_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def scatter(self, blocks: Blocks, *, after: Fence | None, on_queued: Callable[[], None]) -> None:
            raise RuntimeError("CUDA error")

    rig, blocks = saved(2, layered=Broken())
    assert rig.result(rig.hierarchy.start_load(blocks, by_layer=True)).failed == {0, 1}
    rig.settle()
    assert "loading 2 blocks from host failed" in caplog.text
    rig.close()


def test_a_mover_without_copies_by_layer_computes_instead(caplog: pytest.LogCaptureFixture) -> None:
    rig, _ = saved(2)
    batch = LoadBatch(99, "host", [bytes(48)], [0], [5], "by_layer")
    rig.mover.submit([batch])
    rig.mover.wait(PATIENCE_S)
    until(lambda: "does not copy by layer" in caplog.text or None)
    rig.mover.poll()
    rig.close()


class Arriving:
    """`LayeredLoads` into the KV of a CPU engine: a layer arrives when the engine waits for it, and no sooner."""

    def __init__(self, kv: PagedKV) -> None:
        self._kv, self._lock = kv, threading.Lock()
        self._under_way: list[tuple[Blocks, set[int], threading.Event]] = []
        self.waited: list[int] = []
        self.num_loads = 0

    @property
    def are_under_way(self) -> bool:
        with self._lock:
            return bool(self._under_way)

    def scatter(self, blocks: Blocks, *, after: Fence | None, on_queued: Callable[[], None]) -> None:
        self._kv.tensor[list(blocks.device_slots)] = float("nan")
        is_over = threading.Event()
        with self._lock:
            self.num_loads += 1
            self._under_way.append((blocks, set(range(CONFIG.num_hidden_layers)), is_over))
        on_queued()
        assert is_over.wait(PATIENCE_S)

    def wait(self, layer: int) -> None:
        with self._lock:
            if self._under_way:
                self.waited.append(layer)
            for blocks, missing, is_over in self._under_way:
                if layer in missing:
                    self._copy(blocks, layer)
                    missing.discard(layer)
                if not missing:
                    is_over.set()
            self._under_way = [load for load in self._under_way if load[1]]

    def _copy(self, blocks: Blocks, layer: int) -> None:
        rows = self._kv.byte_rows().numpy()
        size = rows.shape[1] // CONFIG.num_hidden_layers
        part = slice(layer * size, (layer + 1) * size)
        rows[list(blocks.device_slots), part] = blocks.memory.rows[list(blocks.slots), part]


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 60, num_tokens).tolist()


def layered_rig(make_rig: MakeRig, **options: Any) -> tuple[EngineRig, Arriving]:
    rig = make_rig(layered=lambda kv: cast(LayeredLoads, Arriving(kv)), **options)
    return rig, cast(Arriving, rig.layered)


def forget_device(rig: EngineRig) -> None:
    """So that the next request with the same prefix loads it."""
    rig.block_pool.reset()


def test_an_engine_computes_while_layers_come(make_rig: MakeRig) -> None:
    tokens = prompt(8 * TOKENS_PER_BLOCK + 3)
    expected = make_rig(tiers=False, cache=False).ask(tokens).token_ids
    rig, arriving = layered_rig(make_rig)
    assert rig.ask(tokens).token_ids == expected
    forget_device(rig)
    completion = rig.ask(tokens)
    assert (completion.token_ids, completion.cached_by_tier) == (expected, {"host": 8 * TOKENS_PER_BLOCK})
    assert arriving.num_loads == 1
    assert arriving.waited[: CONFIG.num_hidden_layers] == [*range(CONFIG.num_hidden_layers)]


def test_requests_that_are_not_alone_wait_for_the_whole_load(make_rig: MakeRig) -> None:
    """All requests of a step wait for the slowest."""
    first, second = prompt(20, seed=1), prompt(24, seed=2)
    rig, arriving = layered_rig(make_rig)
    expected = [rig.ask(first).token_ids, rig.ask(second).token_ids]
    forget_device(rig)
    ids = [rig.add(first), rig.add(second)]
    rig.run()
    assert [rig.done[each].token_ids for each in ids] == expected
    assert arriving.num_loads == 0


def test_steps_that_waited_for_layers_say_nothing_of_the_speed_of_computing(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(8 * TOKENS_PER_BLOCK)
    rig, _ = layered_rig(make_rig)
    rig.ask(tokens, max_tokens=1)
    forget_device(rig)
    noted: list[Sequence[int]] = []
    monkeypatch.setattr(rig.cache, "note_computed", lambda num_tokens, _seconds: noted.append(num_tokens))
    rig.ask(tokens, max_tokens=2)
    assert noted == [(1,)], "the second token's step alone"
