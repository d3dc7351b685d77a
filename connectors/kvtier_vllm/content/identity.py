"""Which bytes a worker's KV blocks hold: everything that decides them, and nothing of where the model lies."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from kvtier.errors import ConfigError
from kvtier.identity.local_model import local_model_folder
from kvtier.identity.model_code import code_digests
from kvtier.identity.namespace import Namespace
from kvtier.identity.weights_digest import weights_digest
from kvtier_vllm.compat import drafter
from kvtier_vllm.kv.paged_kv import pages_of

DIGESTS = Path("~/.cache/kvtier").expanduser()
"""The folder in which digests of weights are remembered."""
_LABEL = b"kvtier.vllm.model.v1"
_DRAFT_LABEL = b"kvtier.vllm.draft.v1"
_LENGTH_MATTERS = "longrope"
"""How rotary embeddings call themselves that are others in engines with another `max_model_len`."""
_SAYS_NOTHING = frozenset(("_name_or_path", "transformers_version", "_attn_implementation_autoset"))
"""Fields of a model's configuration that change with the folder or the library, not with the arithmetic. They are also
in configurations within it: vLLM makes one around that of an Eagle drafter."""
_SCALES = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")
"""The scales of an attention layer whose KV is quantised."""


def namespace_of(  # noqa: PLR0913 - what a rank's bytes depend on
    config: VllmConfig,
    groups: Sequence[Mapping[str, Tensor]],
    *,
    states: Sequence[str] = (),
    num_blocks: int,
    tp_rank: int,
    pp_rank: int,
    digests: Path,
) -> Namespace:
    """The namespace of one worker.

    :param groups: its paged KV, as vLLM registers it, by KV group.
    :param states: what the states of layers are made of that have some instead of KV.
    :param tp_rank: 0 in all ranks if they hold the same.
    :param digests: folder in which digests of weights are remembered.
    """
    model, parallel = config.model_config, config.parallel_config
    attention = config.compilation_config.static_forward_context
    layers = {name: layer for group in groups for name, layer in group.items()}
    backends = sorted({_backend(attention[name]) for name in layers})
    first = next(iter(layers.values()))
    if first.device.type == "cpu":
        backends.append(packing_of_cpu())
    return Namespace(
        weights_digest=model_digest(config, digests),
        dtype=str(model.dtype),
        kv_dtype=f"{config.cache_config.cache_dtype} {first.dtype}{_quantisation(attention, layers)}",
        physical_layout=_layout(groups, states, num_blocks),
        backend=f"vllm-{'.'.join(vllm.__version__.split('.')[:2])} {first.device.type} {' '.join(backends)}",
        num_layers=len(layers),
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_dim=model.get_head_size(),
        tp_size=parallel.tensor_parallel_size,
        tp_rank=tp_rank,
        pp_size=parallel.pipeline_parallel_size,
        pp_rank=pp_rank,
    )


def packing_of_cpu() -> str:
    """What vLLM's kernels on the CPU pack keys by: kind of processor and instructions."""
    has = torch.cpu.get_capabilities()
    used = sorted(name for name, value in has.items() if value is True and name.startswith(("amx", "avx512_f")))
    return " ".join([current_platform.get_cpu_architecture().name, *used])


def _backend(layer: Any) -> str:
    return str(layer.get_attn_backend().get_name())


def _quantisation(attention: Mapping[str, Any], names: Iterable[str]) -> str:
    """How KV is quantised: the format that this platform calls fp8, and the scales. Empty where it is not.

    Scales are in the checkpoint, and so in its digest; but what is done with them, or in place of those that are
    missing, differs by platform and by method. So those count that are in use.
    """
    digest, is_quantised = hashlib.sha256(), False
    for name in sorted(names):
        layer = attention[name]
        dtype = str(getattr(layer, "kv_cache_dtype", "auto"))
        if not is_quantized_kv_cache(dtype):
            continue
        is_quantised = True
        for which in _SCALES:
            scale = getattr(layer, which, None)
            values = None if scale is None else scale.flatten().tolist()
            digest.update(f"{name} {dtype} {which} {values}\n".encode())
    return f" {current_platform.fp8_dtype()} {digest.hexdigest()}" if is_quantised else ""


def _layout(groups: Sequence[Mapping[str, Tensor]], states: Sequence[str], num_blocks: int) -> str:
    """The digest of which layers are in a block of each group, and how they lie there."""
    pages = [
        f"{number} {name} {pages_of(layer, num_blocks).layout}"
        for number, group in enumerate(groups)
        for name, layer in group.items()
    ]
    return hashlib.sha256("\n".join([*pages, *states]).encode()).hexdigest()


def model_digest(config: VllmConfig, digests: Path) -> bytes:
    """The digest of the weights and of everything that says how they are used, a model that drafts tokens included."""
    digest = _model_digest(config.model_config, config.load_config, digests)
    drafting = drafter(config)
    if drafting is None:
        return digest
    method, model, load = drafting
    return hashlib.sha256(_DRAFT_LABEL + digest + method.encode() + _model_digest(model, load, digests)).digest()


def weight_files(model: ModelConfig, load: LoadConfig, path: str = "") -> list[Path]:
    """The files on this machine that hold the model's weights, where vLLM reads them.

    :param path: a folder or a name to read in place of the model's.
    :raises ConfigError: there are none, or the model's name has come to mean another commit since vLLM started.
    """
    named = path or model.model
    folder = local_model_folder(named, revision=model.revision, cache_dir=load.download_dir)
    commit = getattr(model.hf_config, "_commit_hash", None)
    is_by_name = not path and folder != Path(model.model)
    if is_by_name and commit is not None and folder.name != commit:
        raise ConfigError(
            f"{named}: vLLM has started with commit {commit} and the Hugging Face cache has {folder.name} now: start "
            "vLLM again, or give it a --revision"
        )
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder}: no *.safetensors there, and KV is kept by the content of the weights: give vLLM a model that "
            "has safetensors files"
        )
    return files


def _model_digest(model: ModelConfig, load: LoadConfig, digests: Path) -> bytes:
    files = weight_files(model, load)
    arithmetic = json.loads(model.hf_config.to_json_string(use_diff=False), object_hook=_without_what_says_nothing)
    arithmetic["vllm.quantization"] = model.quantization
    if _LENGTH_MATTERS in json.dumps(arithmetic):
        arithmetic["vllm.max_model_len"] = model.max_model_len
    arithmetic["vllm.load_format"] = str(load.load_format)
    if model.trust_remote_code:
        arithmetic["vllm.code"] = [model.code_revision, code_digests(files[0].parent)]
    packed = json.dumps(arithmetic, sort_keys=True).encode()
    return hashlib.sha256(_LABEL + weights_digest(files, digests) + packed).digest()


def _without_what_says_nothing(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name not in _SAYS_NOTHING}
