"""Weights from safetensors: loaded, fused, and known by a digest of their content."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier_engine.model.model_config import ModelConfig

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Projections are `[out, in]`; those that read the same input are fused.

    Weights of norms are of the model's dtype, but those of Gemma float32: they are multiplied with before rounding.
    """

    input_norm: Tensor
    qkv: Tensor
    """`[(heads + 2 * kv_heads) * head_dim, hidden]`: query, then key, then value."""
    attention_output: Tensor
    pre_mlp_norm: Tensor
    gate_up: Tensor
    """`[2 * intermediate, hidden]`: gate, then up."""
    down: Tensor
    qkv_bias: Tensor | None = None
    """`[(heads + 2 * kv_heads) * head_dim]`, Qwen2's."""
    qk_norm: Tensor | None = None
    """`[heads + kv_heads, head_dim]`, Qwen3's: the weight of the norm over each head of query and key."""
    attention_output_norm: Tensor | None = None
    """Gemma's, as the next one: of what is added after attention, and after the MLP."""
    mlp_output_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    embedding: Tensor
    """`[vocab, hidden]`"""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Tensor
    """`[vocab, hidden]`; the embedding itself where the two are tied."""


def load_weights(files: Sequence[Path], config: ModelConfig, dtype: torch.dtype) -> LlamaWeights:
    """Reads the tensors of a model, converted to `dtype`, on CPU.

    :raises ConfigError: a file is torn, or a tensor is missing, quantised, or of another shape than `config` says.
    """
    with ExitStack() as stack:
        reader = _TensorReader(files, dtype, stack)
        hidden, vocab = config.hidden_size, config.vocab_size
        embedding = reader.read("model.embed_tokens.weight", vocab, hidden)
        return LlamaWeights(
            embedding=embedding,
            layers=tuple(_read_layer(reader, config, i) for i in range(config.num_hidden_layers)),
            final_norm=_read_norm(reader, config, "model.norm", hidden),
            lm_head=embedding if config.tie_word_embeddings else reader.read("lm_head.weight", vocab, hidden),
        )


def _read_layer(reader: "_TensorReader", config: ModelConfig, index: int) -> LayerWeights:
    read, base = reader.read, f"model.layers.{index}."
    attention, mlp = base + "self_attn.", base + "mlp."
    hidden, wide = config.hidden_size, config.intermediate_size
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    qkv_bias = qk_norm = None
    if config.qkv_bias:
        qkv_bias = torch.cat([read(f"{attention}{name}_proj.bias", n) for name, n in rows.items()])
    if config.qk_norm:
        norms = [
            _read_norm(reader, config, f"{attention}{name}_norm", head_dim).expand(n, -1)
            for name, n in (("q", heads), ("k", kv_heads))
        ]
        qk_norm = torch.cat(norms)
    norms_of_layer = {
        "input_norm": "input_layernorm",
        "pre_mlp_norm": "pre_feedforward_layernorm" if config.is_gemma else "post_attention_layernorm",
    }
    if config.is_gemma:
        norms_of_layer |= {
            "attention_output_norm": "post_attention_layernorm",
            "mlp_output_norm": "post_feedforward_layernorm",
        }
    return LayerWeights(
        qkv=torch.cat([read(f"{attention}{name}_proj.weight", n, hidden) for name, n in rows.items()]),
        attention_output=read(attention + "o_proj.weight", hidden, heads * head_dim),
        gate_up=torch.cat([read(f"{mlp}{name}_proj.weight", wide, hidden) for name in ("gate", "up")]),
        down=read(mlp + "down_proj.weight", hidden, wide),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        **{norm: _read_norm(reader, config, base + name, hidden) for norm, name in norms_of_layer.items()},
    )


def _read_norm(reader: "_TensorReader", config: ModelConfig, name: str, size: int) -> Tensor:
    weight = reader.read(f"{name}.weight", size)
    return weight.float() + 1 if config.is_gemma else weight


class _TensorReader:
    """Finds tensors by name in open safetensors files."""

    def __init__(self, files: Sequence[Path], dtype: torch.dtype, stack: ExitStack) -> None:
        self._dtype = dtype
        self._files = files
        self._handles = dict(_open_tensors(files, stack))

    def read(self, name: str, *shape: int) -> Tensor:
        handle = self._handles.get(name)
        if handle is None:
            raise ConfigError(
                f"{self._files[0].parent}: the weights have no tensor {name!r}; download all of the model's "
                "*.safetensors files again"
            )
        tensor: Tensor = handle.get_tensor(name)  # type: ignore[no-untyped-call]
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{self._files[0].parent}: {name!r} is {list(tensor.shape)} but config.json says {list(shape)}; "
                "weights and config.json are of different models"
            )
        if tensor.dtype not in _DTYPES:
            raise ConfigError(
                f"{self._files[0].parent}: {name!r} is {tensor.dtype}; this engine computes with weights in float32, "
                "bfloat16 or float16: use the model that is not quantised"
            )
        return tensor.to(self._dtype)


def _open_tensors(files: Sequence[Path], stack: ExitStack) -> Iterator[tuple[str, safe_open]]:
    for path in sorted(files):
        try:
            handle = stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read: {error}; download it again") from error
        for name in handle.keys():  # noqa: SIM118 - a file handle, not a dict
            yield name, handle
