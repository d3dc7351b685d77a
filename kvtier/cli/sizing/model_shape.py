"""How many bytes of KV a token of a model takes, from the model's own `config.json` or GGUF file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.identity.gguf_file import SHAPE_NAMES
from kvtier.identity.gguf_header import read_gguf_header

DTYPE_BYTES: Mapping[str, float] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
"""Bytes of one number of KV, by the names that engines have for it."""
_FULL_ATTENTION = ("full_attention", "attention")
_WINDOWED = "sliding_attention"
_FULL_EVERY: Mapping[str, int] = {"gemma2": 2, "gemma3_text": 6}
"""Every so many layers, one keeps KV of the whole prompt and others of a window, where `layer_types` does not say."""
_PLAIN_IN_GGUF = ("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe")
"""Architectures all layers of which keep KV of the whole prompt: of others, GGUF does not say which layers do."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides how large the KV of a model is."""

    name: str
    kv_values_per_token: int
    """Numbers that all layers keep for each token, however long the prompt is."""
    num_windowed_layers: int
    """Layers that keep a window of tokens, or a state of one size: not counted in `kv_values_per_token`."""
    window_tokens: int = 0
    """How many tokens of a conversation are kept in layers with a sliding window."""
    window_values_per_token: int = 0
    """Numbers that these layers keep for each of those tokens."""

    def bytes_per_token(self, kv_dtype: str) -> int:
        """Returns the bytes of KV per token, over all ranks of an engine.

        :param kv_dtype: a key of `DTYPE_BYTES`.
        """
        return int(self.kv_values_per_token * DTYPE_BYTES[kv_dtype])

    def window_bytes(self, kv_dtype: str, conversation_tokens: int) -> int:
        """Returns the bytes of KV that layers with a sliding window keep of a conversation, likewise."""
        num_tokens = min(conversation_tokens, self.window_tokens)
        return int(num_tokens * self.window_values_per_token * DTYPE_BYTES[kv_dtype])


def load_model_shape(model: Path) -> ModelShape:
    """Reads `config.json` of a Hugging Face folder, or a `.gguf` file.

    Multi-head, grouped-query and latent attention (`kv_lora_rank`) are known, and sliding windows and layers without
    attention by `layer_types`. From GGUF, Llama and Qwen models are known.

    :raises ConfigError: the file cannot be read, or does not say how many layers and heads there are.
    """
    if model.suffix == ".gguf" and not model.is_dir():
        return _shape(model, model.stem, _config_of_gguf(model))
    path = model / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot read the model's shape: {error}; name a Hugging Face folder or a .gguf file"
        ) from error
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path}: not a table of settings; name a Hugging Face folder")
    # Models that also take images keep the language model's apart.
    return _shape(path, model.name, raw.get("text_config", raw))


def _config_of_gguf(path: Path) -> Mapping[str, Any]:
    fields = read_gguf_header(path)
    architecture = fields.get("general.architecture")
    if architecture not in _PLAIN_IN_GGUF:
        known = ", ".join(_PLAIN_IN_GGUF)
        raise ConfigError(
            f"{path}: architecture {architecture!r}: from GGUF the size of KV is known of {known}; name the model's "
            "Hugging Face folder"
        )
    names = {**SHAPE_NAMES, "head_dim": "attention.key_length"}
    return {name: fields.get(f"{architecture}.{key}") for name, key in names.items()}


def _shape(path: Path, name: str, text: Mapping[str, Any]) -> ModelShape:
    kinds = _kinds(text, _number(path, text, "num_hidden_layers"))
    full, of_layer = sum(kind in _FULL_ATTENTION for kind in kinds), _values_per_layer(path, text)
    window = text.get("sliding_window")
    return ModelShape(
        name=name,
        kv_values_per_token=full * of_layer,
        num_windowed_layers=len(kinds) - full,
        window_tokens=window if isinstance(window, int) else 0,
        window_values_per_token=kinds.count(_WINDOWED) * of_layer,
    )


def _kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """What each layer attends to, as `layer_types` names it."""
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and kinds:
        return kinds
    if not isinstance(text.get("sliding_window"), int) or not text.get("use_sliding_window", True):
        return [_FULL_ATTENTION[0]] * layers
    every = text.get("sliding_window_pattern") or _FULL_EVERY.get(str(text.get("model_type")), layers + 1)
    return [_WINDOWED if (index + 1) % every else _FULL_ATTENTION[0] for index in range(layers)]


def _values_per_layer(path: Path, text: Mapping[str, Any]) -> int:
    if isinstance(text.get("kv_lora_rank"), int):  # latent attention keeps one compressed vector, and a rotated key
        return int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim", 0))
    heads = _number(path, text, "num_attention_heads")
    kv_heads = heads if text.get("num_key_value_heads") is None else _number(path, text, "num_key_value_heads")
    head_dim = text.get("head_dim") or _number(path, text, "hidden_size") // heads
    return 2 * kv_heads * int(head_dim)


def _number(path: Path, text: Mapping[str, Any], name: str) -> int:
    value = text.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{path}: {name}: {value!r} is no whole number above 0, so the size of KV is not known")
    return value
