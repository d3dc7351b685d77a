"""What `config.json` says about a Llama, Qwen or Gemma model, checked."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError

_WINDOWED = "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of low frequencies (`rope_type = "llama3"`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class _Family:
    """How a `model_type` differs from Llama."""

    qkv_bias: bool = False
    qk_norm: bool = False
    is_gemma: bool = False
    full_every: int = 1
    """Every so many layers, one attends to all tokens, where `layer_types` does not say which."""
    rope_theta: float = 10000.0


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm=True),
    "gemma2": _Family(is_gemma=True, full_every=2),
    "gemma3_text": _Family(is_gemma=True, full_every=6, qk_norm=True, rope_theta=1e6),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Geometry of a model. Names as in Hugging Face's `LlamaConfig`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    qkv_bias: bool = False
    """Query, key and value have a bias (Qwen2)."""
    qk_norm: bool = False
    """Every head of query and key is normed before it is rotated (Qwen3, Gemma 3)."""
    is_gemma: bool = False
    """Embeddings are multiplied by the root of their size, the MLP's gate is GELU, what attention and MLP give is
    normed before it is added, and weights of norms count from 1."""
    attention_scale: float | None = None
    """The factor on the scores of attention; None: `head_dim ** -0.5`."""
    attention_soft_cap: float | None = None
    """Scores stay below it (Gemma 2), as logits do below the next one."""
    final_soft_cap: float | None = None
    sliding_window: int | None = None
    """Queries of windowed layers see so many keys, their own and those right before."""
    windowed_layers: tuple[bool, ...] = ()
    """Which layers have the window; empty: none."""
    windowed_rope_theta: float | None = None
    """The base of rotation in windowed layers, without any scaling; None: they are rotated as the others."""


def load_model_config(folder: Path) -> ModelConfig:
    """Reads `config.json` and, where there is one, `generation_config.json` of `folder`.

    :raises ConfigError: a file cannot be read, a value is missing or impossible, or the model is not one that this
        engine computes (another family, other biases, a sliding window, another rope scaling, quantised weights).
    """
    path = folder / "config.json"
    raw = _read_json(path)
    family = _family(path, raw)
    if raw.get("quantization_config") is not None:
        raise ConfigError(
            f"{path}: quantization_config says that the weights are quantised; this engine computes with float32, "
            "bfloat16 or float16: use the model that is not quantised"
        )
    try:
        heads = int(raw["num_attention_heads"])
        config = ModelConfig(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_hidden_layers=int(raw["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
            max_position_embeddings=int(raw["max_position_embeddings"]),
            rms_norm_eps=float(raw["rms_norm_eps"]),
            rope_theta=float(_rope(raw).get("rope_theta", raw.get("rope_theta", family.rope_theta))),
            rope_scaling=_rope_scaling(path, _rope(raw)),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", family.is_gemma)),
            eos_token_ids=_eos_token_ids(folder, raw),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            **(_of_gemma(raw, family) if family.is_gemma else {}),
        )
    except KeyError as error:
        raise ConfigError(f"{path}: {error.args[0]!r} is missing; take the file from the model's publisher") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; take the file from the model's publisher") from error
    if config.num_attention_heads % config.num_key_value_heads or config.head_dim % 2:
        raise ConfigError(
            f"{path}: {config.num_attention_heads} heads over {config.num_key_value_heads} KV heads of "
            f"{config.head_dim}: heads must be a multiple of KV heads, head_dim even"
        )
    return config


def _family(path: Path, raw: Mapping[str, Any]) -> _Family:
    kind = raw.get("model_type", "llama")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ConfigError(f"{path}: model_type is {kind!r}; this engine computes {', '.join(_FAMILIES)}")
    expected: dict[str, object] = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}
    if family.is_gemma:  # the older `hidden_act` of its configs is not what it computes
        expected = {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False}
    if not family.qkv_bias:  # Qwen2 has its bias without saying so; that of the others is on the output too
        expected["attention_bias"] = False
    for key, want in expected.items():
        if raw.get(key) not in (None, want):
            raise ConfigError(f"{path}: {key} is {raw[key]!r}; this engine computes {kind} with {key} = {want!r} only")
    layers = raw.get("layer_types")
    known = {"full_attention", _WINDOWED} if family.is_gemma else {"full_attention"}
    others = sorted({str(layer) for layer in layers} - known) if isinstance(layers, list) else []
    if others:
        only = " and ".join(map(repr, sorted(known)))
        raise ConfigError(f"{path}: layer_types has {', '.join(others)}; this engine computes {only} only")
    return family


def _of_gemma(raw: Mapping[str, Any], family: _Family) -> dict[str, Any]:
    """The values of a Gemma."""
    num_layers = int(raw["num_hidden_layers"])
    every = int(raw.get("sliding_window_pattern") or family.full_every)
    kinds = raw.get("layer_types") or [_WINDOWED if (index + 1) % every else "" for index in range(num_layers)]
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    windowed = (raw.get("rope_parameters") or {}).get(_WINDOWED, {})
    local_theta = float(windowed.get("rope_theta", raw.get("rope_local_base_freq", 10000.0)))
    return {
        "is_gemma": True,
        "attention_scale": float(raw["query_pre_attn_scalar"]) ** -0.5,
        "attention_soft_cap": raw.get("attn_logit_softcapping"),
        "final_soft_cap": raw.get("final_logit_softcapping"),
        "sliding_window": int(raw["sliding_window"]),
        "windowed_layers": tuple(kind == _WINDOWED for kind in kinds),
        "windowed_rope_theta": local_theta if family.qk_norm else None,
    }


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Newer configs hold everything about rope in `rope_parameters`, older ones the scaling in `rope_scaling`."""
    rope: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    of_full: Mapping[str, Any] = rope.get("full_attention", rope)  # by the kind of layer, where kinds differ
    return of_full


def _rope_scaling(path: Path, rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"{path}: rope scaling {kind!r}; this engine knows 'default' and 'llama3'")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )


def _eos_token_ids(folder: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Any of them ends an answer. `generation_config.json` counts where it names some: chat models end turns there."""
    generation = folder / "generation_config.json"
    value = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    if value is None:
        value = raw.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; take it from the model's publisher") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is not a JSON object; take it from the model's publisher")
    return raw
