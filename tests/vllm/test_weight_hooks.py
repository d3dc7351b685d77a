"""Calls of vLLM's workers that may change weights, all of which are noticed. No engine."""

import contextlib
import copy
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.v1.executor import uniproc_executor
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker
from weights_rig import Model, model_in

from kvtier_vllm.content.loaded_adapters import LoadedAdapters
from kvtier_vllm.messages import WeightsState
from kvtier_vllm.weights import weight_hooks
from kvtier_vllm.weights.weight_hooks import CHANGE_WEIGHTS, RELEASE_MEMORY, watching

model = pytest.fixture(model_in)

OF_033 = {"get_simple_cpu_offload_num_cpu_blocks"}
"""The methods that vLLM 0.32 has not."""
HARMLESS = frozenset(
    "add_lora annotate_profile check_health checkpoint_prepare compile_or_warm_up_model compute_weight_checksums "
    "determine_available_memory execute_dummy_batch execute_model get_cache_block_size_bytes "
    "get_compilation_match_table get_draft_model get_encoder_timing_stats get_kv_cache_spec "
    "get_kv_connector_handshake_metadata get_model "
    "get_model_inspection get_simple_cpu_offload_num_cpu_blocks get_supported_kv_cache_layouts "
    "get_supported_tasks handle_ft_command init_device "
    "init_weight_transfer_engine initialize_from_config list_loras pin_lora profile "
    "release_late_interaction_query_cache remove_lora reset_encoder_cache reset_mm_cache sample_tokens "
    "save_sharded_state save_tensorized_model set_kv_cache_layout shutdown shutdown_weight_transfer_engine "
    "supports_draft_weight_updates synchronize_device take_draft_token_ids update_config update_max_model_len".split()
)
"""Methods of vLLM's workers that leave weights alone, or load an adapter, which is noticed where it is loaded."""


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
    assert methods | OF_033 == HARMLESS | CHANGE_WEIGHTS | RELEASE_MEMORY | {"reload_weights"}
