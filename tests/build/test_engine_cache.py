"""From a configuration to live tiers, and back to the same blocks after a restart."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from build_rig import build, result
from disk_rig import contents, num_blocks, segments
from hierarchy_rig import chain, until
from kvtier.config import token_sha256
from kvtier.device.kv import HostMemoryKV, MemoryUse
from kvtier.errors import ConfigError
from kvtier.memory.slot_memory import SlotMemory
from kvtier.traces.form import Recorded
from kvtier.traces.read import read_trace
from pool_rig import TENANTS, running_pool


def test_blocks_survive_a_restart_on_disk(tmp_path: Path) -> None:
    device = np.random.default_rng(1).integers(0, 256, (32, 4096), dtype=np.uint8)
    disk = {"directory": "blocks", "capacity_bytes": "16MiB"}
    hashes = chain(8)
    with build(tmp_path, device, disk=disk) as cache:
        assert not result(cache.hierarchy, cache.hierarchy.start_save([(h, i) for i, h in enumerate(hashes)])).failed
    assert (tmp_path / "blocks").is_dir(), "relative to the configuration file"
    with build(tmp_path, device, disk=disk) as cache:
        loaded = result(cache.hierarchy, cache.hierarchy.start_load([(h, 16 + i) for i, h in enumerate(hashes)]))
        assert loaded.tiers == ("disk",) * 8
    assert np.array_equal(device[16:24], device[:8])


def test_policies_and_codec_are_the_configurations(tmp_path: Path) -> None:
    """Blocks that compress well, written to disk when they are evicted or at the end."""
    device = np.zeros((32, 4096), dtype=np.uint8)
    disk = {"directory": "blocks", "capacity_bytes": "16MiB", "codec": "lz4", "write_policy": "write_back"}
    hashes = chain(8)
    with build(tmp_path, device, disk=disk, host={"capacity_bytes": "1MiB", "write_policy": "write_back"}) as cache:
        blocks = [(h, i) for i, h in enumerate(hashes)]
        assert cache.hierarchy.save_full(blocks) is None, "not before the device evicts them"
        assert not result(cache.hierarchy, cache.hierarchy.start_save(blocks)).failed
        assert not segments(tmp_path / "blocks")
    assert num_blocks(tmp_path / "blocks") == 8
    lengths = [contents(path).entries["header"]["stored_length"].max() for path in segments(tmp_path / "blocks")]
    assert max(lengths) < 2048
    device[:] = 1
    with build(tmp_path, device, disk=disk) as cache:
        assert (
            result(cache.hierarchy, cache.hierarchy.start_load([(h, i) for i, h in enumerate(hashes)])).tiers
            == ("disk",) * 8
        )
    assert not device[:8].any()


@pytest.mark.parametrize("scheme", ["", "grpc:"])
def test_a_dead_pool_is_a_miss(tmp_path: Path, scheme: str) -> None:
    device = np.zeros((32, 4096), dtype=np.uint8)
    with build(tmp_path, device, pool={"address": f"{scheme}unix:{tmp_path}/nobody.sock"}) as cache:
        ticket = cache.hierarchy.start_lookup(chain(3))
        statuses = until(lambda: cache.hierarchy.poll_lookup(ticket))
        assert [s.status.name for s in statuses] == ["MISS"] * 3
        assert not result(cache.hierarchy, cache.hierarchy.start_save([(chain(1)[0], 0)])).failed


def test_host_memory_that_is_too_small(tmp_path: Path) -> None:
    device = np.zeros((32, 4096), dtype=np.uint8)
    with (
        pytest.raises(ConfigError, match=r"host\.capacity_bytes.*at least 65,536"),
        build(tmp_path, device, host={"capacity_bytes": 4096}),
    ):
        pass


@pytest.mark.parametrize("protocol", ["block", "grpc"])
def test_the_address_says_which_protocol(tmp_path: Path, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks saved by one cache come back in another, through the port that the address names."""
    monkeypatch.setitem(TENANTS, token_sha256("t" * 32), "red")
    device = np.random.default_rng(2).integers(0, 256, (16, 4096), dtype=np.uint8)
    hashes = chain(8)
    with running_pool() as service:
        pool = {"address": service.block[0] if protocol == "block" else f"grpc:{service.grpc[0]}"}
        with build(tmp_path, device, pool=pool) as cache:
            assert not result(
                cache.hierarchy, cache.hierarchy.start_save([(h, i) for i, h in enumerate(hashes)])
            ).failed
        with build(tmp_path, device, pool=pool) as cache:
            loaded = result(cache.hierarchy, cache.hierarchy.start_load([(h, 8 + i) for i, h in enumerate(hashes)]))
            assert loaded.tiers == ("pool",) * 8
    assert np.array_equal(device[8:], device[:8])


class Attaching(HostMemoryKV):
    """Notes what is attached, and answers that it takes memory."""

    def __init__(self, rows: np.ndarray) -> None:
        super().__init__(rows)
        self.steps: list[str] = []
        self.attached: list[SlotMemory] = []

    @property
    def memory_use(self) -> MemoryUse:
        return MemoryUse(staging_bytes=3, pinned_bytes=5, pinning_s=0.25)

    def attach(self, memory: SlotMemory) -> bool:
        assert memory.rows.shape == (4096, 4096)
        self.steps.append("attach")
        self.attached.append(memory)
        return False

    def detach(self, memory: SlotMemory) -> None:
        assert memory.rows.any(), "before the arena is closed"
        self.steps.append("detach")
        self.attached.remove(memory)

    def gather(self, *arguments: Any, **options: Any) -> None:
        assert self.attached
        self.steps.append("copy")
        super().gather(*arguments, **options)


def test_the_device_has_the_arena_attached_while_there_is_a_mover(tmp_path: Path) -> None:
    """Whatever it answers: then copies are slow."""
    device = Attaching(np.ones((32, 4096), dtype=np.uint8))
    with build(tmp_path, device) as cache:
        assert device.steps == ["attach"]
        assert not result(cache.hierarchy, cache.hierarchy.start_save([(chain(1)[0], 0)])).failed
    assert device.steps == ["attach", "copy", "detach"]


def test_memory_that_is_taken_is_told(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    with build(tmp_path, Attaching(np.ones((32, 4096), dtype=np.uint8)), registry=registry) as cache:
        assert not result(cache.hierarchy, cache.hierarchy.start_save([(chain(1)[0], 0)])).failed
        taken = {
            kind: registry.get_sample_value("kvtier_memory_bytes", {"kind": kind})
            for kind in ("arena", "leased", "pinned", "staging")
        }
        assert taken == {"arena": 16 << 20, "leased": 0, "pinned": 5, "staging": 3}
        assert registry.get_sample_value("kvtier_pinning_seconds") == 0.25


def test_the_arena_is_taken_from_the_devices_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[int] = []
    monkeypatch.setattr("kvtier.memory.arena.prefer_node", lambda _memory, node: nodes.append(node))
    device = np.zeros((32, 4096), dtype=np.uint8)
    with build(tmp_path, device, numa_node=1):
        assert nodes == [1]
    with build(tmp_path, device):
        assert nodes == [1]


def test_an_engine_records_its_trace(tmp_path: Path) -> None:
    device, hashes = np.zeros((32, 4096), dtype=np.uint8), chain(8)
    with build(tmp_path, device, cache={"record_trace": "engine.trace"}) as cache:
        for num_asked in (4, 8):
            ticket = cache.hierarchy.start_lookup(hashes[:num_asked])
            assert until(lambda ticket=ticket: cache.hierarchy.poll_lookup(ticket)) is not None
            full = list(zip(hashes[num_asked - 4 : num_asked], range(4), strict=True))
            assert not result(cache.hierarchy, cache.hierarchy.save_full(full)).failed
    trace = read_trace(tmp_path / "engine.trace")
    assert [list(r.keys) for r in trace.requests if not r.is_write] == [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert trace.recorded == Recorded("lru", 4096)


def test_a_trace_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"missing/engine\.trace: cannot be written"),
        build(tmp_path, np.zeros((32, 4096), dtype=np.uint8), cache={"record_trace": "missing/engine.trace"}),
    ):
        pass
