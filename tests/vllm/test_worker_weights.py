"""What a worker refuses to copy after its weights or adapters have changed, and whom it tells. No engine."""

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_llama
from vllm.lora.request import LoRARequest
from weights_rig import Model, model_in

from hierarchy_rig import BLOCK_BYTES, PATIENCE_S, Held, chain, memory_tier
from kvtier.device.kv import HostMemoryKV
from kvtier.identity.keys import NamespaceId
from kvtier.memory.arena import Arena
from kvtier.offload import InventoryLog, Mover, MoverTiers
from kvtier.offload.messages import (
    Cancelled,
    Copied,
    DiscardBatch,
    LoadBatch,
    Loaded,
    SaveBatch,
    StoreBatch,
    Stored,
    decode,
    encode,
)
from kvtier_vllm import worker
from kvtier_vllm.content.adapters import NO_SOURCE, AdapterSource, source_of
from kvtier_vllm.content.loaded_adapters import LoadedAdapters
from kvtier_vllm.messages import StepMetadata
from kvtier_vllm.weights.weights import Change
from kvtier_vllm.worker import WorkerSide

model = pytest.fixture(model_in)


class FakeMover:
    """Says what it was told to say."""

    def __init__(self) -> None:
        self.submitted: list[Any] = []
        self.answers: list[Any] = []
        self.num_at_device = 0

    def submit(self, messages: Sequence[Any], *, loads_after: object = None) -> None:
        self.submitted += messages

    def cancel_loads(self) -> None:
        pass

    @property
    def is_at_device(self) -> bool:
        return self.num_at_device > 0

    def copying(self, batch_ids: Collection[int]) -> Collection[int]:
        return ()

    def poll(self) -> list[Any]:
        answers, self.answers = self.answers, []
        return answers

    def wait(self, timeout_s: float) -> None:
        pass


SAVE, LOAD = SaveBatch(1, ["pool"], [b"a", b"b"], [0, 1], [4, 5]), LoadBatch(2, "pool", [b"c"], [2], [6])
BELOW = [StoreBatch(3, "pool", [b"d"], [3]), DiscardBatch(4, "disk", [b"e"])]


class Rank:
    """A worker's half without a worker."""

    def __init__(self, model: Model) -> None:
        anything: Any = SimpleNamespace(kv_cache_groups=[None])
        self.side, self.mover, self.weights = WorkerSide(anything, anything, anything), FakeMover(), model.weights
        mover: Any = self.mover
        self.side._mover, self.side._weights = mover, model.weights
        self.side._adapters = LoadedAdapters(model.weights.forget_device)

    def submit(self, *messages: Any, generation: int = 0, adapters: dict[int, AdapterSource] | None = None) -> None:
        encoded = [encode(message) for message in messages]
        self.side.submit(StepMetadata(encoded, generations=[generation], adapters=adapters or {}))

    def told(self) -> list[Any]:
        metadata = self.side.take_messages()
        return [] if metadata is None else [decode(data) for data in metadata.messages.get(0, [])]


@pytest.fixture
def rank(model: Model) -> Rank:
    return Rank(model)


REFUSED = [Copied(1, bytes(2)), Stored(1), Loaded(2, bytes(1), 0.0)]


def test_batches_of_earlier_weights_are_refused(rank: Rank, model: Model) -> None:
    """What does not touch the device is done: the arena holds what its keys say."""
    model.reload()
    rank.submit(SAVE, *BELOW, LOAD)
    assert rank.mover.submitted == BELOW
    assert rank.told() == REFUSED
    rank.submit(SAVE, LOAD, generation=2)
    assert rank.mover.submitted[2:] == [SAVE, LOAD]


def test_nothing_is_copied_while_weights_are_unknown(rank: Rank) -> None:
    with rank.weights.changing("update_weights", Change.UNKNOWN):
        rank.submit(SAVE, LOAD, generation=1)
    rank.submit(SAVE, LOAD, generation=2)
    assert rank.mover.submitted == []
    assert rank.told() == REFUSED * 2


def test_a_load_under_way_brings_nothing_to_other_weights(rank: Rank, model: Model) -> None:
    rank.submit(LOAD, SAVE)
    rank.mover.answers = [Copied(1, b"\1\1")]
    model.reload()
    rank.mover.answers += [Loaded(2, b"\1", 0.5)]
    assert rank.told() == [Copied(1, b"\1\1"), Loaded(2, bytes(1), 0.5)]
    rank.submit(LOAD, generation=2)
    rank.mover.answers = [Loaded(2, b"\1", 0.5)]
    assert rank.told() == [Loaded(2, b"\1", 0.5)]


def test_the_scheduler_hears_of_each_change_once(rank: Rank, model: Model) -> None:
    assert rank.side.take_messages() is None
    state = model.reload()
    metadata = rank.side.take_messages()
    assert metadata is not None
    assert metadata.weights == {0: state}
    assert rank.side.take_messages() is None


def test_sleep_waits_for_copies(rank: Rank) -> None:
    rank.submit(SAVE, LOAD)
    rank.mover.num_at_device = 2

    def end_one(timeout_s: float) -> None:
        rank.mover.answers = [Copied(1, b"\1\1")] if rank.mover.num_at_device == 2 else [Loaded(2, b"\1", 0.5)]
        rank.mover.num_at_device -= 1

    rank.mover.wait = end_one  # type: ignore[method-assign]
    rank.side._wait_for_copies()
    assert rank.mover.num_at_device == 0
    assert rank.told() == [Copied(1, b"\1\1"), Loaded(2, b"\1", 0.5)]


def test_sleep_waits_for_no_tier(rank: Rank) -> None:
    disk, namespace = Held(memory_tier("disk")), NamespaceId(bytes(16))
    mover = Mover(
        namespace=namespace,
        device=HostMemoryKV(np.zeros((4, BLOCK_BYTES), dtype=np.uint8)),
        arena=Arena(4, BLOCK_BYTES),
        tiers=MoverTiers(by_name={"disk": disk}, inventory=InventoryLog([], namespace)),
    )
    with contextlib.closing(disk), contextlib.closing(mover):
        disk.gate.clear()
        rank.side._mover = mover
        rank.submit(LoadBatch(2, "disk", [bytes(key) for key in chain(1)], [0], [0]))
        assert disk.entered.wait(PATIENCE_S)
        rank.side._wait_for_copies()
        assert rank.told() == [Cancelled(2)]
        disk.gate.set()


def test_the_time_that_a_step_has_waited_is_told(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0

    def wait(timeout_s: float) -> None:
        nonlocal now
        now += 4.0

    monkeypatch.setattr(worker, "MONOTONIC", lambda: now)
    monkeypatch.setattr(rank.mover, "wait", wait)
    monkeypatch.setattr(rank.mover, "copying", lambda batch_ids: batch_ids if now < 124 else set())
    rank.side.flush(StepMetadata(flush=[1, 2]))
    waited = [record.getMessage() for record in caplog.records]
    assert waited == [f"a step has waited {seconds} s for 2 copies to host memory" for seconds in (8, 12, 16, 24)]


def test_an_adapter_that_is_another_one_than_its_keys_say_is_noticed(rank: Rank, tmp_path: Path) -> None:
    adapters, folder = rank.side._adapters, tmp_path / "adapter"
    assert adapters is not None
    tiny_llama.make_adapter(folder, seed=1)
    request = LoRARequest("any", 1, str(folder))
    source = source_of(request)
    with adapters.loading(request):
        pass
    rank.submit(SAVE, adapters={1: source})
    with adapters.loading(request):  # it had to make room for others in between
        pass
    assert rank.weights.state.generation == 0
    tiny_llama.make_adapter(folder, seed=2)
    with adapters.loading(request):
        pass
    rank.submit(SAVE)
    assert len(rank.mover.submitted) == 1
    metadata = rank.side.take_messages()
    assert metadata is not None
    assert (metadata.weights[0].generation, metadata.adapters) == (2, {1: source_of(request)})
    # Keys from files that are not those that were loaded: found out with the step that brings them.
    generation = rank.weights.state.generation
    rank.submit(SAVE, generation=generation, adapters={1: source})
    assert len(rank.mover.submitted) == 1
    assert rank.weights.state.generation > generation


def test_an_adapter_that_changes_while_it_is_loaded_is_none_that_anybody_knows(rank: Rank, tmp_path: Path) -> None:
    adapters, folder = rank.side._adapters, tmp_path / "adapter"
    assert adapters is not None
    tiny_llama.make_adapter(folder, seed=1)
    request = LoRARequest("any", 1, str(folder))
    rank.submit(adapters={1: source_of(request)})
    with adapters.loading(request):
        os.utime(folder / "adapter_config.json")
    assert rank.weights.state.generation == 2
    assert adapters.take_untold() == {1: NO_SOURCE}


def test_an_adapter_loaded_again_in_another_way_is_another_one(rank: Rank, tmp_path: Path) -> None:
    adapters, folder = rank.side._adapters, tmp_path / "adapter"
    assert adapters is not None
    tiny_llama.make_adapter(folder, seed=1)
    for is_3d, generation in ((False, 0), (True, 2), (True, 2)):
        with adapters.loading(LoRARequest("any", 1, str(folder), is_3d_lora_weight=is_3d)):
            pass
        assert rank.weights.state.generation == generation
