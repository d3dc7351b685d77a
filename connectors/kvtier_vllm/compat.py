"""All that depends on vLLM's version, and what its configuration must be for this connector."""

import vllm
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec

from kvtier.errors import ConfigError

SUPPORTED = ("0.32.",)
_RECOMPUTE = "recompute"
_KINDS = (FullAttentionSpec, MLAAttentionSpec)
"""Exactly: KV of some of their subclasses depends on more than the tokens before it."""


def require_version() -> None:
    """Raises `ConfigError` for a vLLM that this connector was not tried with."""
    if not vllm.__version__.startswith(SUPPORTED):
        known = ", ".join(f"{prefix}x" for prefix in SUPPORTED)
        raise ConfigError(f"kvtier works with vLLM {known}, this is {vllm.__version__}: install one of these")


def require_recompute(config: VllmConfig) -> None:
    """Raises `ConfigError` where vLLM would end a request with an error because a cached block is gone."""
    transfer = config.kv_transfer_config
    policy = transfer.kv_load_failure_policy if transfer is not None else None
    if policy != _RECOMPUTE:
        raise ConfigError(
            f"kv_load_failure_policy is {policy!r}: a block that is evicted or lost on the way would fail its request; "
            f'add "kv_load_failure_policy": "{_RECOMPUTE}" to --kv-transfer-config'
        )


def tokens_per_block(config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens in a block of the only KV group. Raises `ConfigError` for models whose KV is of another kind."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) not in _KINDS:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ConfigError(f"kvtier keeps the KV of models with full attention in one group; this one has: {kinds}")
    if config.speculative_config is not None:
        raise ConfigError("kvtier was not tried with speculative decoding: leave out speculative_config")
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError("kvtier does not work with context parallelism: its blocks hold every n-th token")
    return int(groups[0].kv_cache_spec.block_size)
