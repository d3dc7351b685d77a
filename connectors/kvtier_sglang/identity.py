"""Which bytes the pages of a host pool hold: SGLang's keys name tokens alone, so all else is in the namespace."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

from kvtier.errors import ConfigError
from kvtier.identity.local_model import local_model_folder
from kvtier.identity.model_code import code_digests
from kvtier.identity.namespace import Namespace
from kvtier.identity.weights_digest import weights_digest
from kvtier_sglang import compat
from kvtier_sglang.host_pages import PageForm
from kvtier_sglang.settings import SOURCE, Settings

DIGESTS = Path("~/.cache/kvtier").expanduser()
"""The folder in which digests of weights are remembered."""
_LABEL = b"kvtier.sglang.model.v1"
_REMEDY = "model_revision with a text that changes whenever the weights do"
_SAYS_NOTHING = frozenset(("_name_or_path", "transformers_version", "_attn_implementation_autoset"))
"""Fields of a model's configuration that change with the folder or the library, not with the arithmetic."""
_ARITHMETIC = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "modelopt_quant",
    "json_model_override_args",
    "model_config_parser",
    "load_format",
    "model_impl",
    "forward_hooks",
    "dllm_algorithm",
    "device",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "dsa_prefill_backend",
    "dsa_decode_backend",
    "dsv4_prefill_backend",
    "dsv4_attn_backend",
    "qsa_indexer_dtype",
    "enable_deepseek_v4_fp4_indexer",
    "enable_dsa_fused_indexer",
    "enable_encoder_swa_bounded_replay",
    "enable_decoder_swa_bounded_replay",
    "mamba_backend",
    "mamba_ssm_dtype",
    "enable_int8_mamba_checkpoint",
    "linear_attn_backend",
    "linear_attn_prefill_backend",
    "linear_attn_decode_backend",
    "enable_quant_communications",
    "deepep_dispatcher_output_dtype",
    "flashinfer_mxfp4_moe_precision",
    "enable_w4a4_mxfp4_megamoe",
    "mm_attention_backend",
    "mm_process_config",
    "image_processor_backend",
    "disable_fast_image_processor",
    "enable_precise_embedding_interpolation",
    "speculative_algorithm",
    "speculative_draft_kv_cache_dtype",
    "speculative_draft_attention_backend",
    "speculative_draft_model_quantization",
)
"""Options of the server that say how the weights are used, and in which form KV is kept."""
_OF_THE_FOLDER = (
    None,
    "auto",
    "safetensors",
    "instanttensor",
    "fastsafetensors",
    "runai_streamer",
    "mistral",
    "layered",
)
"""Values of `--load-format` with which weights are what the folder's safetensors files hold."""
_FROM_ELSEWHERE = {
    "modelopt_checkpoint_restore_path": None,
    "kt_weight_path": None,
    "weight_cache_mode": "off",
    "checkpoint_engine_wait_weights_before_ready": False,
    "decrypted_config_file": None,
    "decrypted_draft_config_file": None,
}
"""Options with which they are not, or their configuration is not, and the values with which these do nothing."""
_SAY_MORE = (
    "hf_quant_config.json",
    "quant_config.json",
    "quantize_config.json",
    "params.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files beside `config.json` that say how the weights are used, or what a model is given of an image."""
_GEOMETRY = (
    "layout",
    "page_size",
    "layer_num",
    "target_layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "head_group_num",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "dsa_kv_cache_store_fp8",
    "size_per_token",
    "item_bytes",
    "row_bytes",
    "num_mamba_layers",
    "temporal_state_shape",
    "temporal_dtype",
    "conv_state_shapes",
    "conv_dtype",
    "indexer_dtype",
    "indexer_page_stride_size",
    "storage_format_tag",
    "dcp_size",
    "dcp_rank",
)
"""Attributes of host pools that decide how a page looks; each kind of pool has some of them."""


def model_digest(settings: Settings, model_name: str | None, digests: Path = DIGESTS) -> bytes:
    """Returns the digest of the weights' content, or of what the operator says stands for it, and of how they are used.

    :raises ConfigError: nothing says which weights these are, or adapters are known by their paths alone.
    """
    if compat.option("lora_paths"):
        raise ConfigError(
            "SGLang knows adapters of --lora-paths by name and path, and others may lie there elsewhere: load them "
            "through /load_lora_adapter, which gives each an id of its own, or leave out this backend"
        )
    used = {name: str(compat.option(name)) for name in _ARITHMETIC}
    used |= {"platform": "hip" if torch.version.hip else "cuda" if torch.version.cuda else "", "scales": _scales()}
    draft = compat.option("speculative_draft_model_path")
    if settings.model_revision is not None:
        used |= {"name": str(model_name), "draft": str(draft), "revision": settings.model_revision}
        return _digest(_LABEL, used)
    _require_weights_of_the_folder(has_draft=bool(draft))
    if compat.have_weights_changed(since=0):
        raise ConfigError(
            f"{SOURCE}: weights have changed since SGLang started, so that the model's folder may hold others; start "
            f"SGLang again, or add {_REMEDY}"
        )
    used |= _content(settings.model_folder or _folder("model_path", "revision"), "", digests)
    if draft:
        used |= _content(_folder("speculative_draft_model_path", "speculative_draft_model_revision"), "draft.", digests)
    return _digest(_LABEL, used)


def namespaces_of(
    host_pool: Any, name: str, form: PageForm, config: HiCacheStorageConfig, model: bytes
) -> list[Namespace]:
    """Returns the namespaces of the parts of a page, in order.

    :param name: SGLang's, of the pool.
    """
    replicated = compat.is_replicated(host_pool, is_mla_model=config.is_mla_model)
    described = {attribute: _plain(getattr(host_pool, attribute, None)) for attribute in _GEOMETRY}
    described |= {
        "device_rows": [list(buffer.shape[1:]) for buffer in getattr(host_pool, "device_k_buffers", ())[:1]],
        "pool": name,
        "class": type(host_pool).__name__,
        "kind": form.kind,
        "pieces": list(form.piece_bytes),
        "context_parallel": [config.attn_cp_rank, config.attn_cp_size],
        "logical_page_size": config.logical_page_size,
    }
    return [
        Namespace(
            weights_digest=model,
            dtype=str(getattr(host_pool, "dtype", None)),
            kv_dtype=str(getattr(host_pool, "dtype", None)),
            physical_layout=_digest(b"", described).hex(),
            backend=f"sglang-{compat.version()}",
            num_layers=int(getattr(host_pool, "layer_num", 0)),
            num_kv_heads=int(getattr(host_pool, "head_num", 0)),
            head_dim=int(getattr(host_pool, "head_dim", 0)),
            tp_size=config.tp_size,
            tp_rank=0 if replicated else config.tp_rank,
            pp_size=config.pp_size,
            pp_rank=config.pp_rank,
            kv_group=part,
        )
        for part in range(len(form.part_bytes))
    ]


def _scales() -> str:
    """Names the scales of quantised KV that are in a file of their own, by its content; empty if there is none."""
    path = compat.option("quantization_param_path")
    if not path:
        return ""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"--quantization-param-path: cannot read {path}: {error}") from error


def _require_weights_of_the_folder(*, has_draft: bool) -> None:
    """Raises `ConfigError` when the server's options have it take weights from where they cannot be looked at."""
    formats = ("load_format", "speculative_draft_load_format") if has_draft else ("load_format",)
    chosen = {name: compat.option(name) for name in (*formats, *_FROM_ELSEWHERE)}
    elsewhere = [name for name in formats if chosen[name] not in _OF_THE_FOLDER]
    elsewhere += [name for name, idle in _FROM_ELSEWHERE.items() if chosen[name] not in (None, idle)]
    if elsewhere:
        name = elsewhere[0]
        raise ConfigError(
            f"{SOURCE}: KV is kept by the content of the weights, and with --{name.replace('_', '-')} {chosen[name]} "
            f"they are not, or not only, what the model's folder holds; add {_REMEDY}"
        )


def _folder(path_option: str, revision_option: str) -> Path:
    """Returns the folder in which a model of the server's options lies on this machine."""
    path = compat.option(path_option)
    reason = "no server's options say where the model is"
    if path:
        try:
            return local_model_folder(
                path, revision=compat.option(revision_option), cache_dir=compat.option("download_dir")
            )
        except ConfigError as error:
            reason = str(error)
    raise ConfigError(
        f"{SOURCE}: KV is kept by the content of the weights, and {reason}; add model_folder, or {_REMEDY}"
    )


def _content(folder: Path, prefix: str, digests: Path) -> dict[str, str]:
    """Returns digests of what a model's folder holds, by name. Names begin with `prefix`."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{SOURCE}: KV is kept by the content of the weights, and {folder} has no *.safetensors; add {_REMEDY}"
        )
    more = [folder / name for name in _SAY_MORE]
    try:
        config = json.loads((folder / "config.json").read_text())
        said = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in more if file.exists()}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: config.json, or what stands beside it, cannot be read: {error}") from error
    said["config"] = json.dumps(
        {name: value for name, value in config.items() if name not in _SAYS_NOTHING}, sort_keys=True
    )
    said["weights"] = weights_digest(files, digests).hex()
    if compat.option("trust_remote_code"):
        said |= code_digests(folder)
    return {f"{prefix}{name}": content for name, content in said.items()}


def _plain(value: Any) -> Any:
    """A value that JSON has, the same in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return type(value).__name__


def _digest(label: bytes, values: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(label + json.dumps(values, sort_keys=True).encode()).digest()
