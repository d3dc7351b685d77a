"""Which weights a worker has after everything that may change them, and what it then refuses to copy. No engine."""

import contextlib
import copy
import inspect
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_llama
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.v1.executor import uniproc_executor
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from hierarchy_rig import BLOCK_BYTES, PATIENCE_S, Held, chain, memory_tier
from kvtier.device.kv import HostMemoryKV
from kvtier.identity.keys import NamespaceId
from kvtier.identity.weights_digest import weights_digest
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
from kvtier_vllm.messages import StepMetadata, WeightsState
from kvtier_vllm.weights import weight_hooks
from kvtier_vllm.weights.engine_weights import EngineWeights
from kvtier_vllm.weights.weight_hooks import CHANGE_WEIGHTS, RELEASE_MEMORY, watching
from kvtier_vllm.weights.weights import Change, Weights
from kvtier_vllm.worker import WorkerSide

HARMLESS = frozenset(
    "add_lora annotate_profile check_health checkpoint_prepare compile_or_warm_up_model compute_weight_checksums "
    "determine_available_memory execute_dummy_batch execute_model get_cache_block_size_bytes "
    "get_compilation_match_table get_draft_model get_encoder_timing_stats get_kv_cache_spec "
    "get_kv_connector_handshake_metadata get_model "
    "get_model_inspection get_supported_kv_cache_layouts get_supported_tasks handle_ft_command init_device "
    "init_weight_transfer_engine initialize_from_config list_loras pin_lora profile "
    "release_late_interaction_query_cache remove_lora reset_encoder_cache reset_mm_cache sample_tokens "
    "save_sharded_state save_tensorized_model set_kv_cache_layout shutdown shutdown_weight_transfer_engine "
    "supports_draft_weight_updates synchronize_device take_draft_token_ids update_config update_max_model_len".split()
)
"""Methods of vLLM's workers that leave weights alone, or load an adapter, which is noticed where it is loaded."""


class Model:
    """A folder of weights, and who computes with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.write(0)
        self.weights = Weights(self._namespace, self._files)

    def write(self, value: int, name: str = "weight") -> None:
        save_file({name: torch.full((8,), value)}, self.folder / "model.safetensors")

    def _files(self, path: str) -> list[Path]:
        return sorted(Path(path or self.folder).glob("*.safetensors"))

    def _namespace(self) -> bytes:
        return weights_digest(self._files(""), self.folder)

    def reload(self, meanwhile: Callable[[], None] = lambda: None) -> WeightsState:
        with self.weights.changing("reload_weights", Change.FROM_FILES):
            assert self.weights.state.namespace is None, "something could be loaded or saved in the middle of it"
            meanwhile()
        return self.weights.state


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path / "model")


def test_weights_from_files_are_what_is_in_them(model: Model) -> None:
    first = model.weights.state
    again = model.reload()
    assert (again.namespace, again.generation) == (first.namespace, 2)
    model.write(1)
    other = model.reload()
    assert other.namespace not in (None, first.namespace)
    model.write(0)
    assert model.reload().namespace == first.namespace


def test_files_that_change_while_they_are_read_say_nothing(model: Model) -> None:
    state = model.reload(meanwhile=lambda: model.write(1))
    assert state.namespace is None
    assert "have changed while" in state.why
    assert model.reload().namespace is not None


def test_a_part_of_the_weights_is_not_all_of_them(model: Model) -> None:
    """vLLM leaves the others as they were."""
    model.write(1, name="another weight")
    assert model.reload().namespace is None


def test_a_change_that_fails_leaves_weights_unknown(model: Model) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        model.reload(meanwhile=fail)
    assert model.weights.state == WeightsState(2, None, "reload_weights failed")
    assert model.reload().namespace is not None


def test_what_happens_within_a_change_counts(model: Model) -> None:
    def change(kind: Change) -> Callable[[], None]:
        def nested() -> None:
            with model.weights.changing("load_weights", kind):
                pass

        return nested

    first = model.weights.state.namespace
    assert model.reload(meanwhile=change(Change.UNKNOWN)).namespace == first, "this is how files are loaded"
    with model.weights.changing("wake_up", Change.NONE):
        change(Change.UNKNOWN)()
    assert model.weights.state.namespace is None
    model.weights.forget_device("an adapter")
    assert model.weights.state.namespace is None
    assert model.reload().namespace == first
    generation = model.weights.state.generation
    model.weights.forget_device("an adapter")
    assert (model.weights.state.namespace, model.weights.state.generation) == (first, generation + 2)


class FakeWorker:
    """Has the methods of vLLM's workers that matter here."""

    vllm_config: Any = None

    def reload_weights(self, *args: Any, **kwargs: Any) -> str:
        return "reloaded"

    def sleep(self, level: int = 1) -> str:
        return f"asleep {level}"

    def wake_up(self, tags: list[str] | None = None) -> str:
        return "awake"

    def discard(self, tags: tuple[str, ...]) -> str:
        return "discarded"

    def changes(self) -> str:
        return "changed"


for _name in CHANGE_WEIGHTS:
    setattr(FakeWorker, _name, FakeWorker.changes)


class Layer(torch.nn.Module):
    pass


class Extension:
    def update_by_hand(self) -> str:
        return "updated"


class FakeModel(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def load_weights(self, weights: Any) -> str:
        return "loaded"


class WithExtension(FakeWorker, Extension):
    pass


class Watched:
    """A worker's process in which changes of weights are noticed."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights, self.quiet = model.weights, 0
        self.worker = WithExtension()
        parallel = SimpleNamespace(worker_cls=f"{__name__}.WithExtension", worker_extension_cls=f"{__name__}.Extension")
        self.layer = Layer()
        self.config: Any = SimpleNamespace(parallel_config=parallel, model_config=None, speculative_config=None)
        self.config.instance_id = "this one"
        self.config.compilation_config = SimpleNamespace(static_forward_context={"a layer": self.layer})
        self.worker.vllm_config = copy.copy(self.config)
        self.adapters = LoadedAdapters(self.weights.forget_device)
        resolved = {parallel.worker_cls: WithExtension, parallel.worker_extension_cls: Extension}
        monkeypatch.setattr(weight_hooks, "resolve_obj_by_qualname", resolved.__getitem__)
        monkeypatch.setattr(weight_hooks, "get_model_cls", lambda config: FakeModel)

    def quiesce(self) -> None:
        self.quiet += 1


@pytest.fixture
def watched(model: Model, monkeypatch: pytest.MonkeyPatch) -> Any:
    watched = Watched(model, monkeypatch)
    with watching(watched.config, watched.weights, watched.adapters, watched.quiesce):
        yield watched


CALLS: dict[str, Callable[[Watched], object]] = {
    **{name: (lambda watched, name=name: getattr(watched.worker, name)()) for name in sorted(CHANGE_WEIGHTS)},
    "reload from memory": lambda watched: watched.worker.reload_weights([("weight", None)]),
    "reload as kernels have it": lambda watched: watched.worker.reload_weights(is_checkpoint_format=False),
    "sleep deeply": lambda watched: watched.worker.sleep(2),
    "sleep deeply, named": lambda watched: watched.worker.sleep(level=2),
    "discard weights": lambda watched: watched.worker.discard(("weights",)),
    "extension": lambda watched: watched.worker.update_by_hand(),
    "past the worker": lambda watched: FakeModel(watched.layer).load_weights([]),
    "a function": lambda watched: uniproc_executor.run_method(watched.worker, lambda worker: "ran", (), {}),
}
SAFE: dict[str, Callable[[Watched], object]] = {
    "reload": lambda watched: watched.worker.reload_weights(),
    "sleep": lambda watched: watched.worker.sleep(),
    "wake up": lambda watched: watched.worker.wake_up(["weights"]),
    "discard KV": lambda watched: watched.worker.discard(("kv_cache",)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_after_which_nobody_knows_the_weights(watched: Watched, call: Callable[[Watched], object]) -> None:
    assert call(watched) is not None, "the call itself was not made"
    assert watched.weights.state.namespace is None
    assert watched.weights.state.generation == 2


@pytest.mark.parametrize("call", SAFE.values(), ids=SAFE)
def test_calls_after_which_the_weights_are_known(watched: Watched, call: Callable[[Watched], object]) -> None:
    """What is on the device is of an earlier generation all the same."""
    before = watched.weights.state
    assert call(watched) is not None
    assert watched.weights.state == WeightsState(2, before.namespace, "")


def test_what_other_engines_of_the_process_do_changes_nothing(watched: Watched) -> None:
    before = watched.weights.state
    ours, watched.worker, watched.layer = watched.worker, WithExtension(), Layer()
    watched.worker.vllm_config = SimpleNamespace(instance_id="another", compilation_config=SimpleNamespace())
    for call in (*CALLS.values(), *SAFE.values()):
        assert call(watched) is not None
    assert watched.weights.state == before
    assert watched.quiet == 0
    ours.load_model()
    assert watched.weights.state.namespace is None


def test_an_adapter_of_another_engine_is_not_ours(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(layer: Layer) -> None:
        manager = WorkerLoRAManager.__new__(WorkerLoRAManager)
        of_model: Any = SimpleNamespace(model=FakeModel(layer))
        manager._adapter_manager = of_model
        with pytest.raises(AttributeError):  # it has nothing of what vLLM needs to load one
            manager._load_adapter(LoRARequest("any", 1, "/nowhere"))

    seen: list[int] = []
    monkeypatch.setattr(watched.adapters, "loading", lambda request: contextlib.nullcontext(seen.append(1)))
    load(Layer())
    assert seen == []
    load(watched.layer)
    assert seen == [1]


def test_memory_is_not_taken_away_while_it_is_copied(watched: Watched) -> None:
    for call in (watched.worker.sleep, watched.worker.wake_up):
        call()
    watched.worker.discard(("kv_cache",))
    assert watched.quiet == 3


def test_a_function_sent_to_a_worker_in_its_own_process_is_noticed(watched: Watched) -> None:
    process = SimpleNamespace(worker=watched.worker, rank=0, handle_output=lambda output: None)
    execute: Any = WorkerProc._execute_worker_rpc
    execute(process, ("wake_up", (), {}, 0))
    assert watched.weights.state.namespace is not None
    execute(process, (b"not even one", (), {}, 0))
    assert watched.weights.state.namespace is None


def test_afterwards_vllm_is_as_before(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def parts() -> list[object]:
        owners = (WithExtension, FakeWorker, FakeModel, WorkerProc, WorkerLoRAManager, uniproc_executor)
        return [dict(vars(owner)) for owner in owners]

    watched, before = Watched(model, monkeypatch), parts()
    with watching(watched.config, watched.weights, watched.adapters, watched.quiesce):
        assert parts() != before
    assert parts() == before


def test_every_method_of_vllms_workers_was_thought_of() -> None:
    """Another version may have another one that changes weights."""
    methods = {
        name
        for kind in (Worker, CPUWorker)
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }
    assert methods == HARMLESS | CHANGE_WEIGHTS | RELEASE_MEMORY | {"reload_weights"}


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


def test_all_ranks_say_which_weights_an_engine_has() -> None:
    weights = EngineWeights([b"one", b"two"])
    assert (weights.digest, weights.are_known, weights.generations) == (None, True, [0, 0])
    weights.note({0: WeightsState(2, b"three", ""), 1: WeightsState(2, b"four", "")})
    other = weights.digest
    assert other is not None
    weights.note({1: WeightsState(3, None, "update_weights")})
    assert (weights.are_known, weights.generations) == (False, [2, 3])
    weights.note({0: WeightsState(5, b"one", ""), 1: WeightsState(5, b"two", "")})
    assert (weights.digest, weights.are_known) == (None, True)
    weights.note({0: WeightsState(7, b"three", ""), 1: WeightsState(7, b"four", "")})
    assert weights.digest == other
