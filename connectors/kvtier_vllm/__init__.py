"""kvtier for vLLM: a connector that shares KV through host memory, disk and the cache pool.

`--kv-transfer-config '{"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier_vllm", "kv_role":
"kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"config": "kvtier.toml"}}'`
"""

from kvtier_vllm.connector import KvtierConnector

__all__ = ["KvtierConnector"]
