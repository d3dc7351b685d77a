"""What vLLM's configuration must be for this connector: each function raises `ConfigError` for what it refuses."""

from collections.abc import Iterable, Sequence

from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvtier.errors import ConfigError
from kvtier_vllm.compat import DRAFTERS, specs_of

_RECOMPUTE = "recompute"
_ALIGNED = "align"
"""How vLLM says that it keeps states at the ends of blocks."""
_TRIED_STATES = MambaAttentionBackendEnum.GDN_ATTN
"""The backend of layers that have a state instead of KV: gated delta nets."""
_KINDS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
"""Exactly these classes: the KV of some of their subclasses depends on more than the tokens before it."""
_TRIED = frozenset((KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR))
_GUESSERS = frozenset(("ngram",))
"""The methods of speculative decoding that keep no KV of their own."""


def require_recompute(policy: str) -> None:
    """Raises `ConfigError` where vLLM would end a request with an error because a cached block is gone.

    :param policy: `kv_load_failure_policy` of the connector, or of what it is a part of.
    """
    if policy != _RECOMPUTE:
        raise ConfigError(
            f"kv_load_failure_policy is {policy!r}: a block that is evicted or lost on the way would fail its request; "
            f'add "kv_load_failure_policy": "{_RECOMPUTE}" to --kv-transfer-config'
        )


def tokens_per_block(config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens in a block of every KV group. Raises `ConfigError` for models whose KV is of another kind."""
    groups = kv_cache_config.kv_cache_groups
    specs = [spec for group in groups for spec in specs_of(group.kv_cache_spec)]
    _require_kept(config, specs)
    sizes = {int(spec.block_size) for spec in specs}
    if len(sizes) != 1:
        raise ConfigError(f"KV groups with blocks of {sorted(sizes)} tokens: kvtier needs the same in all of them")
    size = sizes.pop()
    if config.cache_config.prefix_match_unit not in (None, size):
        raise ConfigError("kvtier was not tried with hits that end within a block: leave out --prefix-match-unit")
    if config.use_v2_model_runner and kv_cache_config.needs_kv_cache_zeroing:
        # Before the connector hears of the step: a save under way would copy zeros under a valid key.
        raise ConfigError(
            "vLLM's second model runner clears blocks before it says so, where there is linear attention or a KV cache "
            "of several precisions: set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    require_tried_options(config)
    return size


def require_tried_options(config: VllmConfig) -> None:
    """Raises `ConfigError` for features of vLLM that this connector was not tried with, whatever the model is."""
    require_tried_speculation(config)
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError("kvtier does not work with context parallelism: its blocks hold every n-th token")
    if parallel.enable_fault_tolerance:
        # The engine goes on after a step that a rank has failed in, and nobody says which blocks that step has spoilt.
        raise ConfigError("kvtier was not tried with vLLM's fault tolerance: leave out --enable-fault-tolerance")


def require_tried_speculation(config: VllmConfig) -> None:
    """Raises `ConfigError` for ways of drafting tokens that this connector was not tried with."""
    speculation = config.speculative_config
    if speculation is None:
        return
    tried = sorted(DRAFTERS | _GUESSERS)
    if speculation.method not in tried:
        raise ConfigError(
            f"kvtier was not tried with speculative decoding by {speculation.method}: use one of {', '.join(tried)}, "
            "or leave out --speculative-config"
        )
    if speculation.use_multi_module_mtp():
        # Each module looks further ahead: KV of a block's last tokens is written again while it is being saved.
        raise ConfigError("kvtier was not tried with several MTP modules at once: set num_speculative_tokens to 1")


def require_tried(modes: Iterable[KVQuantMode]) -> None:
    """Raises `ConfigError` for quantised KV that this connector was not tried with.

    A scale per token and head would be restored wrongly: vLLM sets all scales to 1 in the first forward pass that
    attends to anything, which may come after a load.
    """
    untried = sorted({mode.name.lower() for mode in modes} - {mode.name.lower() for mode in _TRIED})
    if untried:
        raise ConfigError(f"kvtier was not tried with KV in {', '.join(untried)}: use --kv-cache-dtype fp8, or auto")


def require_safe_hashes(config: VllmConfig) -> None:
    """Raises `ConfigError` where a tenant could find tokens whose blocks vLLM's own cache takes for another's."""
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    if not algorithm.startswith("sha256"):
        raise ConfigError(
            f"gateway_tenants with --prefix-caching-hash-algo {algorithm}: tenants could make others' blocks hit; "
            "use sha256"
        )


def _require_kept(config: VllmConfig, specs: Sequence[KVCacheSpec]) -> None:
    """Raises `ConfigError` for layers that keep something else, or in a way that this connector was not tried with."""
    states = [spec for spec in specs if type(spec) is MambaSpec]
    attention = [spec for spec in specs if type(spec) is not MambaSpec]
    if not attention or any(type(spec) not in _KINDS for spec in attention):
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs}))
        raise ConfigError(
            "kvtier keeps the KV of full and of sliding-window attention, and states of linear attention beside it; "
            f"this model has: {kinds}"
        )
    if any(getattr(spec, "non_causal", False) or spec.tokens_per_state != 1 for spec in attention):
        raise ConfigError("KV that depends on tokens after it, or of several tokens as one: kvtier keeps neither")
    require_tried(spec.kv_quant_mode for spec in attention)
    if states:
        _require_tried_states(config, states, attention)


def _require_tried_states(config: VllmConfig, states: Sequence[MambaSpec], attention: Sequence[KVCacheSpec]) -> None:
    kinds = {spec.mamba_type for spec in states}
    if kinds != {_TRIED_STATES} or any(type(spec) is not FullAttentionSpec for spec in attention):
        found = sorted({kind.name for kind in kinds} | {type(spec).__name__ for spec in attention})
        raise ConfigError(
            "of models with linear attention or state-space layers, kvtier was tried with those that have gated delta "
            f"nets beside full attention, such as Qwen3-Next; this model has: {', '.join(found)}"
        )
    if any(spec.mamba_cache_mode != _ALIGNED for spec in states):
        raise ConfigError(
            "vLLM keeps no state of this model's layers but the last one (mamba_cache_mode none): add "
            "--enable-prefix-caching"
        )
    if config.speculative_config is not None:
        raise ConfigError(
            "kvtier was not tried with speculative decoding with models that have gated delta nets: leave out "
            "--speculative-config"
        )
