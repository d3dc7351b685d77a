"""Which bytes the chunks of vLLM's native offloading hold, and whether what vLLM calls them by says enough."""

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

import vllm
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import get_kv_quant_mode
from vllm.v1.kv_offload.base import OffloadingSpec

from kvtier.errors import ConfigError
from kvtier.identity.namespace import Namespace
from kvtier_vllm.content.identity import model_digest, packing_of_cpu
from kvtier_vllm.requirements import require_tried

_SEEDED = ("xxhash", "xxhash_cbor")


def scheduler_config(spec: OffloadingSpec) -> VllmConfig:
    """Returns the configuration of the engine whose tier is being made.

    vLLM gives a tier an excerpt of it, without rotary embeddings, quantization, hash or adapters. The whole is a local
    variable of a caller, up the stack.

    :raises ConfigError: no caller has it.
    """
    config, frame = None, inspect.currentframe()
    while config is None and frame is not None:
        found = frame.f_locals.get("vllm_config")
        config = found if isinstance(found, VllmConfig) else None
        frame = frame.f_back
    config = config if config is not None else get_current_vllm_config_or_none()
    if config is None or config.model_config.model != spec.config.model.name:
        raise ConfigError(
            "vLLM's configuration cannot be found, and KV of engines that differ would be mixed up: make the tier "
            "from OffloadingConnector, or inside vllm.config.set_current_vllm_config"
        )
    return config


def require_usable(config: VllmConfig) -> None:
    """Raises `ConfigError` where vLLM's hash of a block does not say what its KV depends on."""
    algorithm = config.cache_config.prefix_caching_hash_algo
    if algorithm in _SEEDED:
        raise ConfigError(
            f"prefix_caching_hash_algo is {algorithm!r}: vLLM seeds it in each process, so that nothing would ever be "
            "found again, and with a seed of your own, blocks could be made to collide; "
            "use --prefix-caching-hash-algo sha256"
        )
    model = config.model_config
    if config.lora_config is not None:
        raise ConfigError(
            "vLLM knows adapters by name and path, and others may lie there elsewhere: leave out --enable-lora"
        )
    if model.multimodal_config is not None and not model.multimodal_config.language_model_only:
        raise ConfigError(
            "vLLM may know images by a counter, or as clients call them, and others have the same: "
            "serve text alone (--language-model-only), or leave out this tier"
        )
    require_tried([get_kv_quant_mode(config.cache_config.cache_dtype)])
    if config.speculative_config is not None:
        raise ConfigError("kvtier was not tried with speculative decoding: leave out speculative_config")
    if model.runner_type != "generate":
        raise ConfigError(f"kvtier was not tried with models that do not generate: --runner is {model.runner_type!r}")


def namespace_of(spec: OffloadingSpec, config: VllmConfig, *, row_bytes: int, digests: Path) -> Namespace:
    """Returns the namespace of a chunk, which is the KV of all ranks.

    :param row_bytes: of a chunk in the primary tier.
    :param digests: folder in which digests of weights are remembered.
    """
    model, parallel = config.model_config, config.parallel_config
    return Namespace(
        weights_digest=model_digest(config, digests),
        dtype=str(model.dtype),
        kv_dtype=f"{config.cache_config.cache_dtype} {spec.config.model.dtype}",
        physical_layout=_digest(_layout(spec, config) | {"row_bytes": row_bytes}),
        backend=f"vllm-{'.'.join(vllm.__version__.split('.')[:2])} native {_digest(_backend(config))}",
        num_layers=sum(len(group.layer_names) for group in spec.config.groups),
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_dim=model.get_head_size(),
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
    )


def _layout(spec: OffloadingSpec, config: VllmConfig) -> dict[str, Any]:
    """Returns the layout of a chunk: which groups' pages are in it, and how; and what vLLM's hash of it is made of."""
    parts, cache = spec.config, config.cache_config
    return {
        "groups": [(group.group_id, group.tokens_per_block, group.layer_names) for group in parts.groups],
        "tokens_per_hash": parts.cache.tokens_per_hash,
        "hash": cache.prefix_caching_hash_algo,
        "blocks_per_chunk": parts.cache.blocks_per_chunk,
        "worker_block_bytes": parts.worker_kv_bytes_per_block,
        "ranks": [parts.parallel.world_size, parts.parallel.pcp_size, parts.parallel.dcp_size],
        "kinds": [parts.kv_cache_layout, parts.canonical_layout, spec.replicated_layout],
        "skipped": sorted(map(str, cache.kv_cache_dtype_skip_layers)),
        "sliding_window": cache.sliding_window,
        "state": [cache.mamba_block_size, *map(str, (cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype))],
        "state_mode": [str(cache.mamba_cache_mode), cache.use_replayssm, cache.replayssm_buffer_len],
    }


def _backend(config: VllmConfig) -> dict[str, Any]:
    """What chooses the kernels, which decide how a page looks inside: their choice is not known in this process."""
    kind = current_platform.device_type
    return {
        "device": [kind, str(current_platform.get_device_capability())],
        "cpu": packing_of_cpu() if kind == "cpu" else None,
        "attention": config.attention_config.compute_hash(),
    }


def _digest(parts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
