"""SGLang's general plug-in: what its options say of kvtier is looked at before SGLang loads a model."""

import logging
import pkgutil
from typing import Any

from kvtier.system.early_checks import only_refusing

_CHECKED = "sglang.srt.arg_groups.validation_hook.check_server_args"
"""What SGLang calls once, in the process that the user has started, before it starts others."""
_log = logging.getLogger(__name__)


def register() -> None:
    """Called by SGLang in each of its processes, kvtier used or not: it imports next to nothing of kvtier."""
    with only_refusing(_log):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        pkgutil.resolve_name(_CHECKED)  # SGLang would log a traceback of a hook on something that is not there
        HookRegistry.register(_CHECKED, _check, HookType.BEFORE)


def _check(*args: Any, **kwargs: Any) -> None:
    """Is called with what SGLang calls its own check with, whose signature may change."""
    with only_refusing(_log):
        _require_startable(*args, **kwargs)


def _require_startable(server_args: Any) -> None:
    """Raises `ConfigError` for what SGLang's options show of a backend that is ours."""
    if server_args.hicache_storage_backend != "dynamic":
        return
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    said = server_args.hicache_storage_backend_extra_config
    extra = HybridCacheController.parse_storage_backend_extra_config(said)[0]
    if extra.get("class_name") != "KvtierStorage":
        return
    from kvtier_sglang.version import require_version

    require_version()  # before what another release may not have
    from kvtier.config.engine_attempts import engine_attempts
    from kvtier_sglang.settings import load_settings

    for attempt in engine_attempts(load_settings(extra).config, "cuda"):
        attempt()
