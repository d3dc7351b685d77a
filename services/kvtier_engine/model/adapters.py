"""LoRA adapters in PEFT's form: read, checked, and added to the weights of a model."""

import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.identity.weights_digest import weights_digest
from kvtier_engine.model.model_config import ModelConfig
from kvtier_engine.model.weights import LayerWeights, LlamaWeights

_FILE, _SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model.model.layers."
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_WITHOUT: Mapping[str, tuple[object, ...]] = {
    "use_dora": (None, False), "bias": (None, "none"), "modules_to_save": (None, []), "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}), "layer_replication": (None, []),
}  # fmt: skip
"""Settings that this engine takes with these values only."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A model's weights with an adapter added to them."""

    weights: LlamaWeights
    """What the adapter leaves as it is, the model's own tensors."""
    digest: bytes
    """32 bytes, of the adapter's content: the same for the same weights and scaling at any path."""


def load_adapter(folder: Path, weights: LlamaWeights, config: ModelConfig, cache_dir: Path) -> Adapter:
    """Reads an adapter and adds it to copies of the weights that it changes, each product computed in float32.

    :param cache_dir: remembers the file's digest, as `weights_digest` does.
    :raises ConfigError: names the folder, what is missing or not known here, and the remedy.
    """
    scale = _scale(folder)
    path = folder / _FILE
    if not path.is_file():
        raise ConfigError(f"{folder} has no {_FILE}; name a folder that PEFT has saved")
    with ExitStack() as stack:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
            names = list(file.keys())
            found = {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read: {error}; download it again") from error
    layers = tuple(
        _adapted(folder, layer, config, {name: found.pop(name) for name in _of_layer(found, index)}, scale)
        for index, layer in enumerate(weights.layers)
    )
    if found:
        raise ConfigError(f"{path}: {min(found)!r} is of no attention or MLP of this model; take one made for it")
    digest = hashlib.sha256(b"kvtier.lora.v1" + weights_digest([path], cache_dir) + repr(scale).encode()).digest()
    return Adapter(replace(weights, layers=layers), digest)


def _scale(folder: Path) -> float:
    path = folder / _SETTINGS
    try:
        raw: dict[str, Any] = json.loads(path.read_text("utf-8"))
        rank, alpha = int(raw["r"]), float(raw["lora_alpha"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read: {error!r}; name a folder that PEFT has saved") from error
    for name, values in _WITHOUT.items():
        if raw.get(name) not in values:
            raise ConfigError(f"{path}: {name} is {raw[name]!r}, which this engine does not compute")
    return alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank)


def _of_layer(found: Mapping[str, Tensor], index: int) -> list[str]:
    return [name for name in found if name.startswith(f"{_PREFIX}{index}.")]


def _adapted(
    folder: Path, layer: LayerWeights, config: ModelConfig, found: Mapping[str, Tensor], scale: float
) -> LayerWeights:
    rows, head_dim = config.num_attention_heads, config.head_dim
    kv_rows = config.num_key_value_heads * head_dim
    sizes = dict(zip(_ATTENTION, (rows * head_dim, kv_rows, kv_rows), strict=False))
    wide, deltas = config.intermediate_size, _deltas(folder, found, scale)
    fused = {
        "qkv": {name: sizes[name] for name in _ATTENTION[:3]},
        "attention_output": {"o_proj": config.hidden_size},
        "gate_up": {"gate_proj": wide, "up_proj": wide},
        "down": {"down_proj": config.hidden_size},
    }
    changed: dict[str, Any] = {}
    for field, parts in fused.items():
        weight: Tensor = getattr(layer, field)
        if not deltas.keys() & parts.keys():
            continue
        changed[field] = weight = weight.clone()
        start = 0
        for name, num_rows in parts.items():
            part, delta = weight[start : start + num_rows], deltas.pop(name, None)
            start += num_rows
            if delta is None:
                continue
            if delta.shape != part.shape:
                raise ConfigError(
                    f"{folder}: {name} is for {list(delta.shape)} and the model's is {list(part.shape)}; take an "
                    "adapter made for this model"
                )
            part.copy_(part.float() + delta.to(part.device))
    return replace(layer, **changed)


def _deltas(folder: Path, found: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """What is added to each projection, float32 `[out, in]`, by the projection's name."""
    deltas: dict[str, Tensor] = {}
    for name, down in found.items():
        *_, part, projection, kind, _ = ["", "", *name.split(".")]
        known = _ATTENTION if part == "self_attn" else _MLP if part == "mlp" else ()
        if projection not in known or kind not in ("lora_A", "lora_B"):
            raise ConfigError(f"{folder}: {name!r} is of no attention or MLP; this engine adapts these only")
        if kind == "lora_A":
            up = found.get(name.replace(".lora_A.", ".lora_B."))
            if up is None:
                raise ConfigError(f"{folder}: {name!r} has no lora_B; download the adapter again")
            deltas[projection] = scale * torch.matmul(up.float(), down.float())
    return deltas
