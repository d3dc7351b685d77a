"""Faults on purpose, one for each part: `python -m kvtier_bench.gpu --plant PART` must find it.

What a part measures is made wrong, and nothing of what compares it. For developers of this package: a part that
reports figures beside its planted fault compares too little. Call `plant` before the part's modules are imported: they
take what they measure by name.
"""

import importlib
import importlib.util
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

_planted: list[str] = []
"""The part whose fault is planted in this process; its main thread only."""


def plant(part: str) -> None:
    """Plants the fault of this part in the whole process."""
    _planted.append(part)
    _FAULTS[part]()


def planted() -> str:
    """The part whose fault is planted here, for processes that it starts; empty when there is none."""
    return _planted[0] if _planted else ""


def _alter(module: str, name: str, alter: Callable[[Any], Any]) -> None:
    """Replaces a function of a module, or a method of a class in it, where that can be imported."""
    if importlib.util.find_spec("triton") is None and module in _NEED_TRITON:
        return
    *path, last = name.split(".")
    owner: Any = importlib.import_module(module)
    for step in path:
        owner = getattr(owner, step)
    setattr(owner, last, alter(getattr(owner, last)))


_NEED_TRITON = {"kvtier.device.cuda"}

_DEVICES = (("kvtier.device.kv", "HostMemoryKV"), ("kvtier.device.cuda", "CudaKV"))


def _on_devices(method: str, alter: Callable[[Any], Any]) -> None:
    for module, name in _DEVICES:
        _alter(module, f"{name}.{method}", alter)


def _altered_byte(gather: Any) -> Any:
    """The first block that was copied to host memory has one byte altered."""

    def wrong(self: Any, device_slots: Any, arena: Any, arena_slots: Any, **options: Any) -> Any:
        result = gather(self, device_slots, arena, arena_slots, **options)
        if len(arena_slots):
            arena.rows[arena_slots[0]][0] ^= 1
        return result

    return wrong


def _dropped_save(gather: Any) -> Any:
    """The last block stays where it is."""

    def wrong(self: Any, device_slots: Any, arena: Any, arena_slots: Any, **options: Any) -> Any:
        return gather(self, device_slots[:-1], arena, arena_slots[:-1], **options)

    return wrong


def _dropped_load(scatter_all: Any) -> Any:
    """The last block of each memory stays where it is."""

    def wrong(self: Any, sources: Any, **options: Any) -> Any:
        fewer = [of._replace(slots=of.slots[:-1], device_slots=of.device_slots[:-1]) for of in sources]
        return scatter_all(self, fewer, **options)

    return wrong


def _wrong_block(scatter_all: Any) -> Any:
    """The first block of each memory is loaded in the place of the last one."""

    def wrong(self: Any, sources: Any, **options: Any) -> Any:
        others = [of._replace(slots=[*of.slots[:-1], *of.slots[:1]]) if len(of.slots) > 1 else of for of in sources]
        return scatter_all(self, others, **options)

    return wrong


def _altered_target(copy: Any) -> Any:
    """The first block that was copied has one byte altered."""

    def wrong(source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor, **options: Any) -> Any:
        result = copy(source, source_rows, target, target_rows, **options)
        target[int(target_rows[0]), 0] ^= 1
        return result

    return wrong


def _altered_number(attend: Any) -> Any:
    """One number of the result is off by the largest of all."""

    def wrong(*arguments: Any, **options: Any) -> Tensor:
        out: Tensor = attend(*arguments, **options).clone()
        out.view(-1)[-1] += out.abs().max()
        return out

    return wrong


def _altered_every_other_time(attend: Any) -> Any:
    """A candidate is tried after the default."""
    number, wrong = itertools.count(), _altered_number(attend)
    return lambda *arguments, **options: (wrong if next(number) % 2 else attend)(*arguments, **options)


def _dropped_by_layer(scatter: Any) -> Any:
    """The last block stays where it is, in every layer."""

    def wrong(self: Any, blocks: Any, **options: Any) -> Any:
        return scatter(self, blocks._replace(slots=blocks.slots[:-1], device_slots=blocks.device_slots[:-1]), **options)

    return wrong


def _refused(_attach: Any) -> Any:
    """The answer is as where the system lets nobody pin."""
    return lambda _self, _memory: False


def _kernels() -> None:
    _alter("kvtier_kernels.copies.block_copy", "block_copy", _altered_target)


def _copies() -> None:
    _kernels()
    _alter("kvtier_kernels.reference", "block_copy_reference", _altered_target)


def _attention(*launchers: str, alter: Callable[[Any], Any] = _altered_number) -> Callable[[], None]:
    def act() -> None:
        for name in launchers:
            _alter(f"kvtier_kernels.attention.{name}", name, alter)
        _alter("kvtier_kernels", "paged_attention", alter)  # in the place of kernels on the CPU

    return act


def _layers() -> None:
    _on_devices("scatter_all", _dropped_load)
    _alter("kvtier.device.layered_loads", "LayeredLoads.scatter", _dropped_by_layer)


def _altered_of_many(forward: Any) -> Any:
    """One number of the logits, where several sequences are computed together."""
    wrong = _altered_number(forward)
    return lambda self, chunks, kv: (wrong if len(chunks) > 1 else forward)(self, chunks, kv)


def _steps() -> None:
    _alter("kvtier_engine.model.llama", "LlamaModel.forward", _altered_of_many)
    _alter("kvtier_engine.model.decode_graphs", "GraphedModel.forward", _altered_of_many)


def _beside() -> None:
    _on_devices("gather", _dropped_save)
    _on_devices("scatter_all", _dropped_load)


def _races() -> None:
    from kvtier_bench.gpu.races.faults import Fault

    _alter("kvtier_bench.gpu.parts.races", "measure", lambda measure: partial(measure, fault=Fault.NO_FENCE))


def _nothing_planted() -> None:
    _alter("kvtier_bench.gpu.parts.races", "play", lambda play: lambda *of, fault, **options: play(*of, **options))


_FAULTS: dict[str, Callable[[], None]] = {
    "smoke": _kernels,
    "checks": _kernels,
    "beside": _beside,
    "pages": lambda: _on_devices("scatter_all", _wrong_block),
    "pinning": lambda: _on_devices("attach", _refused),
    "races": _races,
    "planted": _nothing_planted,
    "host-copies": lambda: _on_devices("gather", _altered_byte),
    "copies": _copies,
    "ttft": lambda: _on_devices("scatter_all", _wrong_block),
    "switches": lambda: _on_devices("scatter_all", _wrong_block),
    "spill": lambda: _on_devices("gather", _dropped_save),
    "prefill": _attention("prefix_prefill"),
    "decode": _attention("paged_decode"),
    "shared-decode": _attention("shared_prefix_decode"),
    "decode-step": _steps,
    "layers": _layers,
    "invariant": _steps,
    "sweep": _attention("prefix_prefill", "paged_decode", alter=_altered_every_other_time),
}


def faults() -> set[str]:
    """The parts that have one."""
    return set(_FAULTS)
