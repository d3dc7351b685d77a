"""vLLM's general plug-in: what vLLM's configuration says of kvtier is looked at before vLLM loads a model."""

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from kvtier.system.early_checks import only_refusing

_OURS = frozenset(("KvtierConnector", "KvtierTier"))
_log = logging.getLogger(__name__)


def register() -> None:
    """Called by vLLM in each of its processes, kvtier used or not: it wraps one function, and imports next to nothing.

    The function is the one by which vLLM makes its configuration of what the user said, in the process that the user
    started. A process that has not imported it makes no configuration. vLLM ends with what is raised here, so nothing
    is.
    """
    arguments = sys.modules.get("vllm.engine.arg_utils")
    if arguments is not None:
        with only_refusing(_log):
            arguments.EngineArgs.create_engine_config = _checked(arguments.EngineArgs.create_engine_config)


def _checked(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_engine_config(arguments: Any, *args: Any, **kwargs: Any) -> Any:
        require_startable: Callable[[Any], None] = _nothing
        with only_refusing(_log):
            transfer = _naming_ours(arguments)
            if transfer is not None:
                from kvtier_vllm.version import require_version

                require_version()  # before what another release may not have
                from kvtier_vllm import early_checks

                early_checks.require_settings(transfer)
                require_startable = early_checks.require_startable
        config = create(arguments, *args, **kwargs)
        with only_refusing(_log):
            require_startable(config)
        return config

    return create_engine_config


def _nothing(config: Any) -> None:
    """Stands for a check where kvtier is not named, or where the first one was left out."""


def _naming_ours(arguments: Any) -> Any:
    """Returns vLLM's `KVTransferConfig` if its connector is ours, or one of those within it; else None."""
    transfer = arguments.kv_transfer_config
    if transfer is None:
        return None
    extra: Mapping[str, Any] = transfer.kv_connector_extra_config
    named = [transfer.kv_connector]
    named += [each.get("kv_connector") for each in extra.get("connectors", ())]
    named += [each.get("type") for each in extra.get("secondary_tiers", ())]
    return None if _OURS.isdisjoint(named) else transfer
