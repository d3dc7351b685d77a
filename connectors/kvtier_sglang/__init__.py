"""kvtier for SGLang: a HiCache storage backend over the cache pool.

`--enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name":
"kvtier", "module_path": "kvtier_sglang", "class_name": "KvtierStorage", "interface_v1": 1, "config": "kvtier.toml"}'`
"""

from kvtier_sglang.storage import KvtierStorage

__all__ = ["KvtierStorage"]
