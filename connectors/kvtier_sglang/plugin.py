"""SGLang's general plug-in: what its options say of kvtier is looked at before SGLang loads a model."""

from typing import Any

_CHECKED = "sglang.srt.arg_groups.validation_hook.check_server_args"
"""What SGLang calls once, in the process that the user has started, before it starts others."""


def register() -> None:
    """Called by SGLang in each of its processes, kvtier used or not: it imports nothing of kvtier's core."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_CHECKED, _require_startable, HookType.BEFORE)


def _require_startable(server_args: Any) -> None:
    """Raises `ConfigError` for what SGLang's options show of a backend that is ours."""
    if server_args.hicache_storage_backend != "dynamic":
        return
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    said = server_args.hicache_storage_backend_extra_config
    extra = HybridCacheController.parse_storage_backend_extra_config(said)[0]
    if extra.get("class_name") != "KvtierStorage":
        return
    from kvtier.config.engine_attempts import engine_attempts
    from kvtier_sglang.compat import require_version
    from kvtier_sglang.settings import load_settings

    require_version()
    for attempt in engine_attempts(load_settings(extra).config, "cuda"):
        attempt()
