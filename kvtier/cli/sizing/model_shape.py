"""How many bytes of KV a token of a model takes, from the model's own `config.json`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError

DTYPE_BYTES: Mapping[str, float] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
"""Bytes of one number of KV, by the names that engines have for it."""
_FULL_ATTENTION = ("full_attention", "attention")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides how large the KV of a model is."""

    name: str
    kv_values_per_token: int
    """Numbers that all layers keep for each token, however long the prompt is."""
    num_windowed_layers: int
    """Layers that keep a window of tokens, or a state of one size: not counted in `kv_values_per_token`."""

    def bytes_per_token(self, kv_dtype: str) -> int:
        """Returns the bytes of KV per token, over all ranks of an engine.

        :param kv_dtype: a key of `DTYPE_BYTES`.
        """
        return int(self.kv_values_per_token * DTYPE_BYTES[kv_dtype])


def load_model_shape(folder: Path) -> ModelShape:
    """Reads `config.json` of a Hugging Face folder.

    Multi-head, grouped-query and latent attention (`kv_lora_rank`) are known, and sliding windows and layers without
    attention by `layer_types`.

    :raises ConfigError: the file cannot be read, or does not say how many layers and heads there are.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot read the model's shape: {error}; name a Hugging Face folder") from error
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path}: not a table of settings; name a Hugging Face folder")
    text = raw.get("text_config", raw)  # models that also take images keep the language model's apart
    layers = _number(path, text, "num_hidden_layers")
    full = _full_layers(text, layers)
    return ModelShape(
        name=folder.name,
        kv_values_per_token=full * _values_per_layer(path, text),
        num_windowed_layers=layers - full,
    )


def _full_layers(text: Mapping[str, Any], layers: int) -> int:
    types = text.get("layer_types")
    if isinstance(types, list) and types:
        return sum(1 for kind in types if kind in _FULL_ATTENTION)
    has_window = isinstance(text.get("sliding_window"), int) and text.get("use_sliding_window", True)
    return 0 if has_window else layers


def _values_per_layer(path: Path, text: Mapping[str, Any]) -> int:
    if isinstance(text.get("kv_lora_rank"), int):  # latent attention keeps one compressed vector, and a rotated key
        return int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim", 0))
    heads = _number(path, text, "num_attention_heads")
    kv_heads = text.get("num_key_value_heads")
    head_dim = text.get("head_dim") or _number(path, text, "hidden_size") // heads
    return 2 * int(kv_heads if kv_heads is not None else heads) * int(head_dim)


def _number(path: Path, text: Mapping[str, Any], name: str) -> int:
    value = text.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{path}: {name}: {value!r} is no whole number above 0, so the size of KV is not known")
    return value
