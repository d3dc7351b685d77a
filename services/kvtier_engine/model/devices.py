"""What differs between an engine on CPU and one on CUDA: where tensors are, and who moves blocks."""

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvtier.device.kv import DeviceKV, HostMemoryKV
from kvtier.device.layered_loads import LayeredLoads
from kvtier.device.quantised import QuantisedHostKV
from kvtier.errors import ConfigError
from kvtier_engine.model.paged_kv import PagedKV
from kvtier_engine.model.weights import LayerWeights, LlamaWeights


def engine_device(name: str) -> torch.device:
    """The device that `engine.device` means.

    :param name: `cpu`, `cuda` (the first that the process may use) or `auto`: CUDA where it can be used.
    :raises ConfigError: CUDA is asked for and cannot be used.
    """
    lacking = _lacking_for_cuda()
    if name == "cuda" and lacking is not None:
        raise ConfigError(f'engine.device: "cuda", but {lacking}; or set it to "cpu"')
    return torch.device("cpu") if name == "cpu" or lacking is not None else torch.device("cuda", 0)


def weights_on(weights: LlamaWeights, device: torch.device) -> LlamaWeights:
    """Returns the same weights on `device`; what is there already is not copied. Tied tensors stay one.

    :raises ConfigError: there is no room for them.
    """
    with _room_for("the model's weights", device):
        embedding = weights.embedding.to(device)
        return LlamaWeights(
            embedding=embedding,
            layers=tuple(_layer_on(layer, device) for layer in weights.layers),
            final_norm=weights.final_norm.to(device),
            lm_head=embedding if weights.lm_head is weights.embedding else weights.lm_head.to(device),
        )


@contextlib.contextmanager
def device_kv(
    kv: PagedKV,
    *,
    num_copies: int,
    staging_bytes: int = 128 * 2**20,
    lossy_codec: str = "",
    checks_loads: bool = False,
) -> Iterator[DeviceKV]:
    """Copies blocks of `kv` to and from host memory. Call it in the engine's thread; leave it after the last copy.

    :param num_copies: at a time; more callers wait. So do some of these where the staging holds fewer blocks.
    :param staging_bytes: of a CUDA device, beside `engine.kv_bytes`.
    :param lossy_codec: in whose form blocks are in host memory, as the namespace has it; empty for as they are.
    :param checks_loads: whether a sample of what is loaded is verified on the device, which is CUDA then.
    :raises ConfigError: there is no room for that, it holds no block, or the codec does not take KV of this dtype.
    """
    layout = kv.record_layout(lossy_codec) if lossy_codec else None
    if kv.tensor.device.type == "cpu":
        yield HostMemoryKV(kv.byte_rows().numpy()) if layout is None else QuantisedHostKV(kv.byte_rows(), layout)
        return
    # Imported here: it needs triton, and engines on CPU do not.
    from kvtier.device.cuda import CudaKV

    with _room_for("cache.staging_bytes", kv.tensor.device):
        cuda_kv = CudaKV(
            [kv.byte_rows()],
            layout=layout,
            staging_bytes=staging_bytes,
            num_lanes=num_copies,
            checks_loads=checks_loads,
        )
    try:
        yield cuda_kv
    finally:
        cuda_kv.close()


def layered_loads(device: DeviceKV, kv: PagedKV) -> LayeredLoads | None:
    """Loads into `kv` that a forward pass waits for layer by layer; None where there is nothing to gain.

    :param device: of `kv`, by `device_kv`. Called once, in the engine's thread, before any copy.
    """
    if kv.tensor.device.type == "cpu":
        return None
    from kvtier.device.cuda import CudaKV

    return device.by_layer(kv.tensor.size(1)) if isinstance(device, CudaKV) else None


@contextlib.contextmanager
def _room_for(what: str, device: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"engine.kv_bytes: leaves no room on {device} for {what}; lower it, or stop what else uses the device"
        ) from error


def _lacking_for_cuda() -> str | None:
    """What keeps us from CUDA, and the remedy."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device: install a driver and a build of torch with CUDA"
    if importlib.util.find_spec("triton") is None:
        return "triton is missing: pip install triton"
    return None


def _layer_on(layer: LayerWeights, device: torch.device) -> LayerWeights:
    moved: dict[str, Any] = {}
    for field in dataclasses.fields(layer):
        tensor: Tensor | None = getattr(layer, field.name)
        moved[field.name] = None if tensor is None else tensor.to(device)
    return dataclasses.replace(layer, **moved)
