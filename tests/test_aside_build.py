"""The tier process as an engine's configuration builds it, over a real pool and a real disk."""

from pathlib import Path

import numpy as np
import psutil
import pytest
from prometheus_client import CollectorRegistry

from build_rig import SECRET, TOKEN, build, result
from hierarchy_rig import chain, until
from kvtier.config import token_sha256
from kvtier.errors import ConfigError
from kvtier.tiers import memfd
from pool_rig import TENANTS, running_pool

BLOCK_BYTES = 4096


@pytest.mark.parametrize("io_process", [True, False])
def test_both_ways_bring_the_same_blocks(io_process: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TENANTS, token_sha256(TOKEN), "red")
    device = np.random.default_rng(2).integers(0, 256, (32, BLOCK_BYTES), dtype=np.uint8)
    expected, hashes = device[:8].copy(), chain(8)
    with running_pool() as service:
        sections = {
            "cache": {"io_process": io_process},
            "disk": {"directory": "blocks", "capacity_bytes": "16MiB"},
            "pool": {"address": service.block[0]},
        }
        with build(tmp_path, device, **sections) as cache:
            children = psutil.Process().children()
            assert len(children) == io_process
            for child in children:
                shown = "\0".join([*child.cmdline(), *child.environ().values()])
                assert TOKEN not in shown
                assert SECRET not in shown
            assert not result(cache, cache.hierarchy.start_save([(h, i) for i, h in enumerate(hashes)])).failed
        for tier, off in (("disk", "pool"), ("pool", "disk")):
            device[:] = 0
            registry = CollectorRegistry()
            only = {name: section for name, section in sections.items() if name != off}
            with build(tmp_path, device, registry=registry, **only) as cache:
                loaded = result(cache, cache.hierarchy.start_load([(h, 8 + i) for i, h in enumerate(hashes)]))
                assert loaded.tiers == (tier,) * 8
            assert np.array_equal(device[8:16], expected)
            labels = {"tier": tier, "op": "read", "status": "hit"}
            assert registry.get_sample_value("kvtier_tier_blocks_total", labels) == 8


def test_what_tiers_count_in_the_process_is_on_the_engines_registry(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    device = np.zeros((32, BLOCK_BYTES), dtype=np.uint8)
    with build(tmp_path, device, registry=registry, pool={"address": f"unix:{tmp_path}/nobody.sock"}) as cache:
        ticket = cache.hierarchy.start_lookup(chain(3))
        assert [s.status.name for s in until(lambda: cache.hierarchy.poll_lookup(ticket))] == ["MISS"] * 3
    errors = {"tier": "pool", "op": "lookup", "error": "UnavailableError"}
    assert registry.get_sample_value("kvtier_io_errors_total", errors) == 1


def test_errors_of_the_configuration_come_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks" / "thesis.txt").write_text("not made by a disk tier")
    device = np.zeros((32, BLOCK_BYTES), dtype=np.uint8)
    with (
        pytest.raises(ConfigError, match="blocks"),
        build(tmp_path, device, disk={"directory": "blocks", "capacity_bytes": "16MiB"}),
    ):
        pass


def test_without_memfds_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfd, "available", lambda: False)
    device = np.zeros((32, BLOCK_BYTES), dtype=np.uint8)
    sections = {"cache": {"io_process": True}, "pool": {"address": "127.0.0.1:1"}}
    with (
        pytest.raises(ConfigError, match=r"cache\.io_process.*false"),
        build(tmp_path, device, **sections),
    ):
        pass
