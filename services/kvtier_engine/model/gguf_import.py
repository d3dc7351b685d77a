"""A GGUF file as a Hugging Face folder: dequantised once, kept under the digest of the file's content."""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import ReaderTensor, dequantize
from safetensors.numpy import save_file

from kvtier.errors import ConfigError
from kvtier.identity.gguf_file import SHAPE_NAMES, read_gguf
from kvtier.system.atomic_files import folder_published_at
from kvtier_engine.model.gguf_tokenizer import build_tokenizer

_FORMAT = 1
"""Part of the folder's name: raise it when the content of imported folders changes."""

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_CONFIG_NAMES = {
    **SHAPE_NAMES,
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}

log = logging.getLogger(__name__)


def import_gguf(path: Path, cache_dir: Path) -> Path:
    """The folder with `path`'s model as config.json, model.safetensors and tokenizer files; made when missing.

    Weights are dequantised to float32: 4 bytes per weight on disk, and in memory during the import.
    The folder appears whole or not at all, so that processes may import the same file at once.

    :raises ConfigError: not a GGUF file, or a model or tokenizer that this engine does not compute.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}; download it again") from error
    folder = cache_dir / f"gguf{_FORMAT}-{digest[:32]}"
    if folder.is_dir():
        return folder
    reader, metadata = read_gguf(path)
    log.info("dequantising %s into %s", path, folder)
    config = _config(metadata, reader.tensors, path)
    tokenizer = build_tokenizer(metadata, str(path))
    with folder_published_at(folder) as draft:
        save_file(_tensors(reader.tensors, config, path), draft / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(str(draft / "tokenizer.json"))
        _write_json(draft / "config.json", config)
        _write_json(draft / "tokenizer_config.json", _tokenizer_config(metadata))
    return folder


def _config(metadata: Mapping[str, Any], tensors: list[ReaderTensor], path: Path) -> dict[str, Any]:
    if metadata.get("general.architecture") != "llama":
        raise ConfigError(
            f"{path}: architecture {metadata.get('general.architecture')!r}; this engine reads 'llama' from GGUF. "
            "Give it the model's Hugging Face folder instead"
        )
    missing = [key for key in _CONFIG_NAMES.values() if f"llama.{key}" not in metadata]
    if missing:
        raise ConfigError(f"{path}: the fields {missing} are missing; download the file again")
    config: dict[str, Any] = {name: metadata[f"llama.{key}"] for name, key in _CONFIG_NAMES.items()}
    heads = config["num_attention_heads"]
    head_dim = metadata.get("llama.attention.key_length", config["hidden_size"] // heads)
    _check_rope(metadata, head_dim, path)
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "head_dim": head_dim,
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        "vocab_size": metadata.get("llama.vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in tensors),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "dtype": "float32",
    }


def _check_rope(metadata: Mapping[str, Any], head_dim: int, path: Path) -> None:
    """Every dimension of a head is rotated, and no frequency scaled. (Llama 3's scaling comes as a tensor.)"""
    for key, plain in (
        ("scaling.type", ("none",)),
        ("scaling.factor", (0, 1)),  # llama.cpp takes a factor without a type for a linear one
        ("scale_linear", (0, 1)),  # its older name
        ("dimension_count", (head_dim,)),
    ):
        value = metadata.get(f"llama.rope.{key}", plain[0])
        if value not in plain:
            known = " or ".join(map(repr, plain))
            raise ConfigError(
                f"{path}: llama.rope.{key} is {value!r}; from GGUF this engine computes {known} only. Give it "
                "the model's Hugging Face folder instead"
            )


def _tensors(tensors: list[ReaderTensor], config: Mapping[str, Any], path: Path) -> dict[str, npt.NDArray[np.float32]]:
    result = {}
    for tensor in tensors:
        weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name.endswith("attn_q.weight"):
            weights = _halves_from_pairs(weights, config["num_attention_heads"])
        elif tensor.name.endswith("attn_k.weight"):
            weights = _halves_from_pairs(weights, config["num_key_value_heads"])
        result[_hugging_face_name(tensor.name, path)] = np.ascontiguousarray(weights)
    return result


def _hugging_face_name(name: str, path: Path) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    kind, _, rest = name.partition(".")
    layer, _, inner = rest.partition(".")
    if kind != "blk" or inner not in _LAYER_NAMES:
        raise ConfigError(f"{path}: tensor {name!r} is not part of a plain Llama model; use its Hugging Face folder")
    return f"model.layers.{layer}.{_LAYER_NAMES[inner]}"


def _halves_from_pairs(weights: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undoes llama.cpp's row order: it rotates neighbours (0, 1), Hugging Face rotates halves (0, head_dim / 2)."""
    rows, columns = weights.shape
    pairs = weights.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos"):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
