"""What each rank of an engine gets of its host, and how it verifies its loads."""

import os
import sys
from pathlib import Path

import pytest

from kvtier.config import Config, load_config, parse_config
from kvtier.config.tiers import CacheConfig
from kvtier.errors import ConfigError


@pytest.mark.parametrize(
    ("pool", "mebibytes"),
    [
        ("", 1024),
        ('[pool]\naddress = "pool.example:7600"\n', 1024),
        ('[pool]\naddress = ["pool.example:7600", "unix:/run/kvtier/pool.sock"]\n', 512),
        ('[pool]\naddress = "unix:/run/kvtier/pool.sock"\n[host]\ncapacity_bytes = "2GiB"\n', 2048),
    ],
    ids=["alone", "a pool elsewhere", "a pool on this host", "as it is set"],
)
def test_host_memory_is_for_staging_beside_a_pool(tmp_path: Path, pool: str, mebibytes: int) -> None:
    path = tmp_path / "kvtier.toml"
    path.write_text(pool)
    assert load_config(path, {}).host_bytes() == mebibytes * 2**20


@pytest.mark.parametrize("platform", ["linux", "darwin"])
@pytest.mark.parametrize(("num_cores", "threads"), [(1, 1), (2, 1), (3, 2), (11, 2), (12, 3), (16, 4), (192, 4)])
def test_transfers_at_a_time_follow_the_cores(
    num_cores: int, threads: int, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Linux those that the process may use, elsewhere all."""
    monkeypatch.setattr(sys, "platform", platform)
    known = {
        "linux": ("sched_getaffinity", lambda _pid: set(range(num_cores))),
        "darwin": ("cpu_count", lambda: num_cores),
    }
    monkeypatch.setattr(os, *known[platform], raising=False)
    assert CacheConfig().load_threads == threads


@pytest.mark.parametrize(("num_processes", "threads"), [(1, 4), (2, 4), (4, 4), (8, 3), (16, 2), (64, 1)])
def test_ranks_share_the_cores_and_the_host_memory_of_their_engine(
    num_processes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    left_out = parse_config({}, source="test", environ={}).of_rank(4, num_processes)
    assert left_out.cache.load_threads == threads
    assert left_out.host_bytes() == 1 << 30, "of each rank"
    data = {"cache": {"load_threads": 7}, "host": {"capacity_bytes": "10GiB"}}
    given = parse_config(data, source="test", environ={}).of_rank(4, num_processes)
    assert given.cache.load_threads == 7
    assert given.host_bytes() == 10 * 2**30 // 4


def test_loads_are_verified_on_cuda_alone() -> None:
    def parsed(verify_loads: str, lossy_codec: str = "none") -> Config:
        data = {"cache": {"verify_loads": verify_loads}, "engine": {"lossy_codec": lossy_codec}}
        return parse_config(data, source="k.toml", environ={})

    assert parse_config({}, source="k.toml", environ={}).verifies_on_device("cuda") is False
    assert parsed("host", "int8_per_head").verifies_on_device("cpu") is False
    assert parsed("device").verifies_on_device("cuda") is True
    with pytest.raises(ConfigError, match=r'k.toml: cache.verify_loads: "device", but KV is on cpu; set it to "host"'):
        parsed("device").verifies_on_device("cpu")
    with pytest.raises(ConfigError, match=r"cache.verify_loads: .* engine.lossy_codec changes them"):
        parsed("device", "int8_per_head").verifies_on_device("cuda")
    with pytest.raises(ConfigError, match=r"cache.verify_loads"):
        parsed("both")
