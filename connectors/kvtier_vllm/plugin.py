"""vLLM's general plug-in: what vLLM's configuration says of kvtier is looked at before vLLM loads a model."""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

_OURS = frozenset(("KvtierConnector", "KvtierTier"))


def register() -> None:
    """Called by vLLM in each of its processes, kvtier used or not: it imports nothing, and wraps one function.

    The function is the one by which vLLM makes its configuration of what the user said, in the process that the user
    started. A process that has not imported it makes no configuration.
    """
    arguments = sys.modules.get("vllm.engine.arg_utils")
    if arguments is not None:
        arguments.EngineArgs.create_engine_config = _checked(arguments.EngineArgs.create_engine_config)


def _checked(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_engine_config(arguments: Any, *args: Any, **kwargs: Any) -> Any:
        transfer = arguments.kv_transfer_config
        if transfer is None or not _names_ours(transfer.kv_connector, transfer.kv_connector_extra_config):
            return create(arguments, *args, **kwargs)
        from kvtier.errors import ConfigError
        from kvtier_vllm import early_checks

        try:
            early_checks.require_settings(transfer)
            config = create(arguments, *args, **kwargs)
            early_checks.require_startable(config)
        except ConfigError as error:
            raise error.with_traceback(None) from None  # vLLM prints all of it, and the last line is what counts
        return config

    return create_engine_config


def _names_ours(connector: str | None, extra: Mapping[str, Any]) -> bool:
    """Whether a connector is ours, or one of those within it."""
    named = [connector]
    named += [each.get("kv_connector") for each in extra.get("connectors", ())]
    named += [each.get("type") for each in extra.get("secondary_tiers", ())]
    return not _OURS.isdisjoint(named)
