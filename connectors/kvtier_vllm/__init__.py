"""kvtier for vLLM: a connector that shares KV through host memory, disk and the cache pool.

`--kv-transfer-config '{"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier_vllm", "kv_role":
"kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"config": "kvtier.toml"}}'`
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier_vllm.connector import KvtierConnector

__all__ = ["KvtierConnector"]


def __getattr__(name: str) -> Any:
    """Imports the connector when somebody asks for it: vLLM imports this package in processes that do not use it."""
    if name == "KvtierConnector":
        from kvtier_vllm.version import require_version

        require_version()  # before what another release may not have
        from kvtier_vllm.connector import KvtierConnector

        return KvtierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
