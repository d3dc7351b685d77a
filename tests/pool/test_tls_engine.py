"""TLS from configuration files to blocks: `kvtier pool serve`, and an engine's cache."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from certificates import Authority
from hierarchy_rig import chain, until
from kvtier.build.engine_cache import engine_cache
from kvtier.config import parse_config
from kvtier.device.kv import HostMemoryKV
from kvtier.offload import Hierarchy, JobResult
from kvtier.testing.blocks import TINY_NAMESPACE
from pool_rig import WAIT_S, PoolProcess
from tls_rig import RED_URI

POOL_TOML = f"""
[tenants.red]
certificate_names = ["{RED_URI}"]

[pool_service]
listen = ["127.0.0.1:0"]
grpc_listen = ["127.0.0.1:0"]
http_listen = "127.0.0.1:0"
memory_bytes = "16MiB"
tls_certificate = "server.pem"
tls_key = "server.key"
tls_client_ca = "authority.pem"
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[PoolProcess]:
    """`kvtier pool serve`, and in its folder `engine.pem`, `engine.key` and `authority.pem`."""
    ca = Authority(tmp_path)
    ca.issue("server", "127.0.0.1")
    ca.issue("engine", RED_URI)
    (tmp_path / "kvtier.toml").write_text(POOL_TOML)
    pool = PoolProcess([f"--config={tmp_path / 'kvtier.toml'}"])
    pool.start()
    yield pool
    code, log = pool.terminate()
    assert code == 0, log


@pytest.mark.parametrize("protocol", ["block", "grpc"])
def test_an_engine_that_has_a_certificate_and_no_token(tmp_path: Path, served: PoolProcess, protocol: str) -> None:
    """From two files to blocks that one cache saves and another loads."""
    address = served.block if protocol == "block" else f"grpc:{served.grpc}"
    files = {"tls_ca": "authority.pem", "tls_certificate": "engine.pem", "tls_key": "engine.key"}
    tables = {
        "tenant": "red",
        "tenants": {"red": {"secret": "env:SECRET"}},
        "host": {"capacity_bytes": "1MiB"},
        "pool": {"address": address, "connect_timeout_s": WAIT_S} | files,
    }
    config = parse_config(tables, source="engine.toml", folder=tmp_path, environ={"SECRET": "s" * 32})
    memory = np.random.default_rng(1).integers(0, 256, (16, 4096), dtype=np.uint8)
    hashes = chain(8)

    def carry_out(start: Callable[[Hierarchy], int | None]) -> JobResult:
        """By an engine of its own."""
        device = HostMemoryKV(memory)
        with engine_cache(config, device=device, namespace=TINY_NAMESPACE, registry=CollectorRegistry()) as cache:
            job = start(cache.hierarchy)
            return until(lambda: next((r for r in cache.hierarchy.poll() if r.job_id == job), None))

    assert not carry_out(lambda engine: engine.start_save([(h, i) for i, h in enumerate(hashes)])).failed
    assert (
        carry_out(lambda engine: engine.start_load([(h, 8 + i) for i, h in enumerate(hashes)])).tiers == ("pool",) * 8
    )
    assert np.array_equal(memory[8:], memory[:8])
