"""The tier process as an engine's configuration builds it, over a real pool and a real disk."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pytest
from prometheus_client import CollectorRegistry

from build_rig import SECRET, TOKEN, build, result
from hierarchy_rig import chain, until
from kvtier.build.engine_cache import directory_half, mover_half
from kvtier.build.tiers import borrows
from kvtier.config import Config, parse_config, token_sha256
from kvtier.device.kv import HostMemoryKV
from kvtier.errors import ConfigError
from kvtier.identity.keys import BlockHasher
from kvtier.memory import memfd
from kvtier.metrics import Metrics
from kvtier.offload import AlwaysFetch, Hierarchy
from kvtier.testing.blocks import TINY_NAMESPACE
from pool_rig import TENANTS, TOKENS, running_pool
from seal_rig import KEYS

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
            assert not result(
                cache.hierarchy, cache.hierarchy.start_save([(h, i) for i, h in enumerate(hashes)])
            ).failed
        for tier, off in (("disk", "pool"), ("pool", "disk")):
            device[:] = 0
            registry = CollectorRegistry()
            only = {name: section for name, section in sections.items() if name != off}
            with build(tmp_path, device, registry=registry, **only) as cache:
                loaded = result(cache.hierarchy, cache.hierarchy.start_load([(h, 8 + i) for i, h in enumerate(hashes)]))
                assert loaded.tiers == (tier,) * 8
            assert np.array_equal(device[8:16], expected)
            labels = {"tier": tier, "op": "read", "status": "hit"}
            assert registry.get_sample_value("kvtier_tier_blocks_total", labels) == 8


@pytest.mark.parametrize("io_process", [True, False])
def test_an_engines_own_disk_is_sealed_with_its_storage_keys(tmp_path: Path, io_process: bool) -> None:
    device = np.random.default_rng(2).integers(0, 256, (32, BLOCK_BYTES), dtype=np.uint8)
    expected, hashes = device[:8].copy(), chain(8)
    sections = {"cache": {"io_process": io_process}, "disk": {"directory": "blocks", "capacity_bytes": "16MiB"}}
    for ids in ((1,), (1, 2), (3,)):
        keys = {"KEYS": " ".join(f"{number}:{KEYS[number].hex()}" for number in ids)}
        with build(tmp_path, device, red={"storage_keys": "env:KEYS"}, environ=keys, **sections) as cache:
            if ids == (1,):
                job = cache.hierarchy.start_save([(h, i) for i, h in enumerate(hashes)])
                assert not result(cache.hierarchy, job).failed
                continue
            job = cache.hierarchy.start_load([(h, 8 + i) for i, h in enumerate(hashes)])
            assert result(cache.hierarchy, job).tiers == (("disk",) * 8 if 1 in ids else ("",) * 8)
        assert np.array_equal(device[8:16], expected)
        data = b"".join(path.read_bytes() for path in (tmp_path / "blocks").iterdir())
        assert not any(bytes(block[:32]) in data for block in expected)


@pytest.mark.parametrize("io_process", [True, False])
def test_an_engine_seals_what_goes_to_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, io_process: bool
) -> None:
    monkeypatch.setitem(TENANTS, token_sha256(TOKEN), "red")
    device = np.random.default_rng(2).integers(0, 256, (32, BLOCK_BYTES), dtype=np.uint8)
    expected, hashes = device[:8].copy(), chain(8)
    with running_pool(listen=f"unix:{tmp_path}/pool.sock", disk_dir=str(tmp_path / "disk")) as service:
        sections = {"cache": {"io_process": io_process}, "pool": {"address": service.block[0]}}
        for ids in ((1,), (1, 2), (3,), ()):
            keys = {"KEYS": " ".join(f"{number}:{KEYS[number].hex()}" for number in ids)}
            red = {"sealing_keys": "env:KEYS"} if ids else {}
            with build(tmp_path, device, red=red, environ=keys, **sections) as cache:
                if ids == (1,):
                    job = cache.hierarchy.start_save([(h, i) for i, h in enumerate(hashes)])
                    assert not result(cache.hierarchy, job).failed
                    continue
                device[8:16] = 0
                wanted = hashes if 1 in ids else hashes[:4]  # what cannot be opened is discarded
                job = cache.hierarchy.start_load([(h, 8 + i) for i, h in enumerate(wanted)])
                assert result(cache.hierarchy, job).tiers == (("pool",) * 8 if 1 in ids else ("",) * 4)
            if 1 in ids:
                assert np.array_equal(device[8:16], expected)
    on_disk = b"".join(path.read_bytes() for path in (tmp_path / "disk").iterdir())
    assert on_disk
    assert not any(bytes(block[:32]) in on_disk for block in expected)


def test_nothing_is_lent_to_a_device_that_cannot_open_it(tmp_path: Path) -> None:
    data = {
        "tenant": "red",
        "tenants": {"red": {"token": "env:TOKEN"}},
        "pool": {"address": f"unix:{tmp_path}/pool.sock"},
    }
    assert borrows(parse_config(data, source="test.toml", folder=tmp_path, environ={}))
    data["tenants"] = {"red": {"token": "env:TOKEN", "sealing_keys": "env:KEYS"}}
    assert not borrows(parse_config(data, source="test.toml", folder=tmp_path, environ={}))


@pytest.mark.parametrize("io_process", [True, False])
def test_tenants_of_one_engine_are_their_own_at_the_pool(io_process: bool, tmp_path: Path) -> None:
    """The same tokens of two tenants, saved and loaded by one job each, and found by an engine of one of them alone."""
    device = np.random.default_rng(3).integers(0, 256, (32, BLOCK_BYTES), dtype=np.uint8)
    before = device[:16].copy()
    with running_pool() as service:
        data = {
            "tenant": "red",
            "gateway_tenants": ["blue"],
            "tenants": {name: {"secret": "env:SECRET", "token": f"env:{name}"} for name in TOKENS},
            "host": {"capacity_bytes": "1MiB"},
            "cache": {"io_process": io_process, "tokens_per_block": 1},
            "disk": {"directory": "blocks", "capacity_bytes": "16MiB"},
            "pool": {"address": service.block[0]},
        }
        config = parse_config(data, source="test.toml", folder=tmp_path, environ={"SECRET": SECRET, **TOKENS})
        with two_halves(config, device) as (hierarchy, hashers):
            keys = {name: hasher.hash_blocks(np.arange(8), parent=None) for name, hasher in hashers.items()}
            mixed = [key for pair in zip(keys["red"], keys["blue"], strict=True) for key in pair]
            assert not result(hierarchy, hierarchy.start_save([(key, i) for i, key in enumerate(mixed)])).failed
            hierarchy.reset()
        device[:] = 0
        with two_halves(config, device) as (hierarchy, _):
            loaded = result(hierarchy, hierarchy.start_load([(key, 16 + i) for i, key in enumerate(mixed)]))
            assert loaded.tiers == ("pool",) * 16, "the reset has emptied the folder of both"
        assert np.array_equal(device[16:], before)
        device[:] = 0
        data |= {"tenant": "blue", "gateway_tenants": [], "disk": {}}
        config = parse_config(data, source="test.toml", folder=tmp_path, environ={"SECRET": SECRET, **TOKENS})
        with two_halves(config, device) as (hierarchy, _):
            assert result(hierarchy, hierarchy.start_load([(keys["blue"][3], 0)])).tiers == ("pool",)
        assert np.array_equal(device[0], before[7])


@contextmanager
def two_halves(config: Config, device: npt.NDArray[np.uint8]) -> Iterator[tuple[Hierarchy, Mapping[str, BlockHasher]]]:
    """A hierarchy for all tenants of the configuration."""
    metrics = Metrics()
    with mover_half(config, device=HostMemoryKV(device), namespace=TINY_NAMESPACE.id, metrics=metrics) as movers:
        half = directory_half(
            config,
            namespaces=[TINY_NAMESPACE.id],
            block_bytes=device.shape[1],
            shared=movers.tiers["pool"],
            metrics=metrics,
            on_answer=movers.mover.nudge,
        )
        hierarchy = Hierarchy(half.directory, movers.mover, AlwaysFetch(), half.metrics)
        with closing(hierarchy):
            yield hierarchy, half.hashers


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
