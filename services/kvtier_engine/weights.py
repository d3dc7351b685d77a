"""Weights from safetensors: loaded, fused, and known by a digest of their content."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier_engine.atomic_files import write_text_atomically
from kvtier_engine.model_config import ModelConfig

_DIGEST_LABEL = b"kvtier.weights.v1"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Projections are `[out, in]`; those that read the same input are fused."""

    input_norm: Tensor
    qkv: Tensor
    """`[(heads + 2 * kv_heads) * head_dim, hidden]`: query, then key, then value."""
    attention_output: Tensor
    post_attention_norm: Tensor
    gate_up: Tensor
    """`[2 * intermediate, hidden]`: gate, then up."""
    down: Tensor
    qkv_bias: Tensor | None = None
    """`[(heads + 2 * kv_heads) * head_dim]`, Qwen2's."""
    qk_norm: Tensor | None = None
    """`[heads + kv_heads, head_dim]`, Qwen3's: the weight of the norm over each head of query and key."""


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
            final_norm=reader.read("model.norm.weight", hidden),
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
            read(f"{attention}{name}_norm.weight", head_dim).expand(n, -1)
            for name, n in (("q", heads), ("k", kv_heads))
        ]
        qk_norm = torch.cat(norms)
    return LayerWeights(
        input_norm=read(base + "input_layernorm.weight", hidden),
        qkv=torch.cat([read(f"{attention}{name}_proj.weight", n, hidden) for name, n in rows.items()]),
        attention_output=read(attention + "o_proj.weight", hidden, heads * head_dim),
        post_attention_norm=read(base + "post_attention_layernorm.weight", hidden),
        gate_up=torch.cat([read(f"{mlp}{name}_proj.weight", wide, hidden) for name in ("gate", "up")]),
        down=read(mlp + "down_proj.weight", hidden, wide),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


def weights_digest(files: Sequence[Path], cache_dir: Path) -> bytes:
    """SHA-256 over the tensors' names, dtypes, shapes and bytes in order of names, whatever files hold them.

    Costs one pass over the files; remembered in `cache_dir` under their paths, inodes, sizes and times of change.
    """
    known_as = hashlib.sha256(json.dumps([_identity(path) for path in sorted(files)]).encode()).hexdigest()
    memory = cache_dir / "digests" / known_as
    digest = _remembered_digest(memory)
    if digest is None:
        digest = _digest_tensors(files)
        write_text_atomically(memory, digest.hex() + "\n")
    return digest


def _identity(path: Path) -> tuple[str | int, ...]:
    """Other content has another. Copying tools set size and time of modification alike, but nobody sets a ctime."""
    stat = path.stat()
    return str(path.resolve()), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _remembered_digest(memory: Path) -> bytes | None:
    """None also when the file is garbled."""
    try:
        digest = bytes.fromhex(memory.read_text("ascii"))
    except (OSError, ValueError):
        return None
    return digest if len(digest) == hashlib.sha256().digest_size else None


def _digest_tensors(files: Sequence[Path]) -> bytes:
    state = hashlib.sha256(_DIGEST_LABEL)
    with ExitStack() as stack:
        for name, handle in sorted(_open_tensors(files, stack), key=lambda pair: pair[0]):
            tensor: Tensor = handle.get_tensor(name)  # type: ignore[no-untyped-call]
            state.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            state.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.digest()


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
