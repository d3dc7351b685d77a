"""The calls by which vLLM's weights change while it runs: each is wrapped, since vLLM tells connectors nothing of it.

What writes to parameters past these calls is not seen: a thread of an application's own in the worker's process, say.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.executor.multiproc_executor import WorkerProc

from kvtier_vllm.compat import drafter, is_model_of_another_engine, is_of_another_engine
from kvtier_vllm.content.loaded_adapters import LoadedAdapters
from kvtier_vllm.weights.weights import Change, Weights

CHANGE_WEIGHTS = frozenset((
    "load_model", "reset_weights", "apply_model", "elastic_ep_execute", "checkpoint_restore",
    "start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update",
))  # fmt: skip
"""Methods of vLLM's workers after which nobody here knows the weights: they come from elsewhere, or a function that is
the caller's own has had them."""
RELEASE_MEMORY = frozenset(("sleep", "wake_up", "discard"))
"""Methods that take away and bring back the memory of weights, of KV or of both."""
_CALLERS = ("vllm.v1.executor.uniproc_executor", "vllm.v1.executor.ray_utils")
"""Modules that call a worker's methods by `run_method`; of vLLM 0.33 the first one alone."""

_Method = Callable[..., Any]
_Around = Callable[[_Method], _Method]
_IsTheirs = Callable[[Any], bool]
"""Whether what a wrapped call is first given is of another engine: all those of a process have the same classes."""


@contextlib.contextmanager
def watching(
    config: VllmConfig, weights: Weights, adapters: LoadedAdapters, quiesce: Callable[[], None]
) -> Iterator[None]:
    """Tells `weights` and `adapters` of every change in this process, which has one worker of this engine.

    :param quiesce: returns when no copy from or to the device is under way.
    """
    worker = resolve_obj_by_qualname(config.parallel_config.worker_cls)
    unknown = functools.partial(_changes, weights)
    workers = functools.partial(is_of_another_engine, config)
    models = functools.partial(is_model_of_another_engine, config)
    with contextlib.ExitStack() as stack:

        def wrap(owner: Any, name: str, around: _Around, is_theirs: _IsTheirs = workers) -> None:
            stack.enter_context(_wrapped(owner, name, lambda method: _unless(is_theirs, method, around(method))))

        wrap(worker, "reload_weights", lambda method: _reloads(weights, config, method))
        for name in CHANGE_WEIGHTS:
            wrap(worker, name, unknown)
        for name in RELEASE_MEMORY:
            wrap(worker, name, lambda method: _releases(weights, quiesce, method))
        extension = config.parallel_config.worker_extension_cls
        for name in _methods_of(resolve_obj_by_qualname(extension)) if extension else ():
            wrap(worker, name, unknown)
        # Training frameworks call it past the worker.
        drafting = drafter(config)
        for model in {get_model_cls(each) for each in (config.model_config, *(drafting[1:2] if drafting else ()))}:
            wrap(model, "load_weights", unknown, models)
        for module in map(sys.modules.get, _CALLERS):
            if hasattr(module, "run_method"):
                wrap(module, "run_method", lambda run: _runs(weights, run))
        wrap(
            WorkerProc,
            "_execute_worker_rpc",
            lambda execute: _executes(weights, execute),
            lambda process: workers(process.worker),
        )
        wrap(
            WorkerLoRAManager,
            "_load_adapter",
            lambda load: _loads_adapter(adapters, load),
            lambda manager: models(manager._adapter_manager.model),
        )
        yield


@contextlib.contextmanager
def _wrapped(owner: Any, name: str, around: _Around) -> Iterator[None]:
    """The method of a class or function of a module, with something around it."""
    original, is_own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, functools.wraps(original)(around(original)))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _unless(is_theirs: _IsTheirs, method: _Method, wrapped: _Method) -> _Method:
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        return (method if is_theirs(first) else wrapped)(first, *args, **kwargs)

    return call


def _methods_of(extension: type) -> list[str]:
    """The names of its methods. A static or class method has no worker whose weights it could change."""
    names = (name for name in dir(extension) if not name.startswith("__"))
    return [name for name in names if inspect.isfunction(inspect.getattr_static(extension, name))]


def _changes(weights: Weights, method: _Method) -> _Method:
    what = method.__qualname__

    def changes(*args: Any, **kwargs: Any) -> Any:
        with weights.changing(what, Change.UNKNOWN):
            return method(*args, **kwargs)

    return changes


def _reloads(weights: Weights, config: VllmConfig, method: _Method) -> _Method:
    def reload_weights(
        worker: Any,
        weights_iterator: Any = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> Any:
        # A drafter's KV is in the same blocks, and its weights stay what they were, whatever its folder holds now.
        from_files = weights_iterator is None and is_checkpoint_format and drafter(config) is None
        change = Change.FROM_FILES if from_files else Change.UNKNOWN
        with weights.changing("reload_weights", change, weights_path or ""):
            return method(worker, weights_iterator, weights_path, is_checkpoint_format)

    return reload_weights


def _releases(weights: Weights, quiesce: Callable[[], None], method: _Method) -> _Method:
    def releases(worker: Any, *args: Any, **kwargs: Any) -> Any:
        said = [*args, *kwargs.values()]
        loses = (method.__name__ == "sleep" and 2 in said) or (method.__name__ == "discard" and "weights" in str(said))
        with weights.changing(method.__qualname__, Change.UNKNOWN if loses else Change.NONE):
            quiesce()
            return method(worker, *args, **kwargs)

    return releases


def _runs(weights: Weights, run: _Method) -> _Method:
    def run_method(obj: Any, method: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(method, str):
            return run(obj, method, args, kwargs)
        with weights.changing("a function called in the worker", Change.UNKNOWN):
            return run(obj, method, args, kwargs)

    return run_method


def _executes(weights: Weights, execute: _Method) -> _Method:
    def execute_worker_rpc(process: Any, request: Any) -> Any:
        if isinstance(request[0], str):
            return execute(process, request)
        with weights.changing("a function called in the worker", Change.UNKNOWN):
            return execute(process, request)

    return execute_worker_rpc


def _loads_adapter(adapters: LoadedAdapters, load: _Method) -> _Method:
    def load_adapter(manager: Any, request: LoRARequest) -> Any:
        with adapters.loading(request):
            return load(manager, request)

    return load_adapter
