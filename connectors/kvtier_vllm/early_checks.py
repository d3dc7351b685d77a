"""What can be refused before vLLM loads a model: in the process that the user has started, within seconds.

The connector itself refuses the same, and what depends on the model's layers, when vLLM makes it: a minute later, in
another process, with the reason in the middle of the log.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm.config import KVTransferConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import get_kv_quant_mode

from kvtier.build import startable
from kvtier.config import Config
from kvtier_vllm import compat, requirements
from kvtier_vllm.content.identity import weight_files
from kvtier_vllm.settings import load_settings, of_rank, of_worker

_ANY_TOKENS = 16
"""Stands for the length of a block, which vLLM decides later: nothing that is looked at here depends on it."""
_OF_VLLM = frozenset(("type", "module_path", "locality", "backpressure"))
"""Keys of a secondary tier's table that vLLM reads itself."""


class _Use(NamedTuple):
    """One place where a configuration of vLLM's names a part of kvtier."""

    settings: Mapping[str, Any]
    failure_policies: Sequence[str]
    """What vLLM is to do where a block cannot be loaded: of the connector, and of those that it is within."""


def require_settings(transfer: KVTransferConfig) -> None:
    """Raises `ConfigError` for what `--kv-transfer-config` alone shows: policy, keys, files, secrets, folders."""
    for use in _uses(transfer):
        for policy in use.failure_policies:
            requirements.require_recompute(policy)
        # Any worker's part of the folder: what lies beside it belongs to the others.
        config = of_worker(load_settings(use.settings, _ANY_TOKENS), "0-0")
        startable.require_startable(config, current_platform.device_type)


def require_startable(config: VllmConfig) -> None:
    """Raises `ConfigError` for what vLLM's whole configuration shows."""
    assert config.kv_transfer_config is not None, "it names kvtier"
    requirements.require_tried_options(config)
    requirements.require_tried([get_kv_quant_mode(str(config.cache_config.cache_dtype))])
    for use in _uses(config.kv_transfer_config):
        settings: Config = of_rank(load_settings(use.settings, _ANY_TOKENS), config.parallel_config)
        if settings.gateway_tenants:
            requirements.require_safe_hashes(config)
    for model, load in compat.models_of(config):
        if Path(model.model).is_dir():  # one that is known by its name may not be downloaded yet
            weight_files(model, load)


def _uses(transfer: KVTransferConfig) -> Iterator[_Use]:
    extra, policy = transfer.kv_connector_extra_config, transfer.kv_load_failure_policy
    if transfer.kv_connector == "KvtierConnector":
        yield _Use(extra, [policy])
    for child in extra.get("connectors", ()):
        if child.get("kv_connector") == "KvtierConnector":
            settings, its_policy = (
                child.get("kv_connector_extra_config", {}),
                child.get("kv_load_failure_policy", "fail"),
            )
            yield _Use(settings, [policy, its_policy])
    for tier in extra.get("secondary_tiers", ()):
        if tier.get("type") == "KvtierTier":
            yield _Use({name: value for name, value in tier.items() if name not in _OF_VLLM}, [])
