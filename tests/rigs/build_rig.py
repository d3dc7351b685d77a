"""An engine's cache as a configuration builds it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from hierarchy_rig import until
from kvtier.build.engine_cache import EngineCache, engine_cache
from kvtier.config import parse_config
from kvtier.device.kv import DeviceKV, HostMemoryKV
from kvtier.offload import Hierarchy, JobResult
from kvtier.testing.blocks import TINY_NAMESPACE

TOKEN, SECRET = "t" * 32, "s" * 32


@contextmanager
def build(
    folder: Path,
    device: np.ndarray[Any, Any] | DeviceKV,
    *,
    registry: CollectorRegistry | None = None,
    token: str = TOKEN,
    numa_node: int | None = None,
    red: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    **sections: Any,
) -> Iterator[EngineCache]:
    """
    :param red: more fields of the engine's tenant.
    :param environ: more variables.
    """
    config = parse_config(
        {
            "tenant": "red",
            "tenants": {"red": {"secret": "env:SECRET", "token": "env:TOKEN", **(red or {})}},
            "host": {"capacity_bytes": "16MiB"},
            **sections,
        },
        source="test.toml",
        folder=folder,
        environ={"SECRET": SECRET, "TOKEN": token, **(environ or {})},
    )
    registry = registry or CollectorRegistry()
    kv = HostMemoryKV(device) if isinstance(device, np.ndarray) else device
    with engine_cache(config, device=kv, namespace=TINY_NAMESPACE, registry=registry, numa_node=numa_node) as cache:
        yield cache


def result(hierarchy: Hierarchy, job_id: int | None) -> JobResult:
    assert job_id is not None
    return until(lambda: next((r for r in hierarchy.poll() if r.job_id == job_id), None))
