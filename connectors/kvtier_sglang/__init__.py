"""kvtier for SGLang: a HiCache storage backend over the cache pool.

`--enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name":
"kvtier", "module_path": "kvtier_sglang", "class_name": "KvtierStorage", "interface_v1": 1, "config": "kvtier.toml"}'`
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier_sglang.storage import KvtierStorage

__all__ = ["KvtierStorage"]


def __getattr__(name: str) -> Any:
    """Imports the backend when somebody asks for it: SGLang imports this package in processes that do not use it."""
    if name == "KvtierStorage":
        from kvtier_sglang.version import require_version

        require_version()  # before what another release may not have
        from kvtier_sglang.storage import KvtierStorage

        return KvtierStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
