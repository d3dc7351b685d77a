"""A pool that records what it is asked: `record_trace`, from the client to `kvtier simulate`."""

import urllib.request
from pathlib import Path

import pytest

from kvtier.testing.blocks import read_blocks
from kvtier.tiers.base import WriteStatus
from kvtier.traces.form import Recorded
from kvtier.traces.read import read_trace
from pool_rig import BLOCK_BYTES, MIB, WAIT_S, connect, items, keys, pool_process, running_pool


@pytest.mark.parametrize("way", ["block", "shared"])
def test_lookups_reads_and_writes_are_in_the_trace(tmp_path: Path, way: str) -> None:
    path = tmp_path / "pool.trace"
    listen = (f"unix:{tmp_path}/socket",) if way == "shared" else ("127.0.0.1:0",)
    with running_pool(record_trace=path, listen=listen) as addresses:
        with urllib.request.urlopen(f"http://{addresses.http}/metrics", timeout=WAIT_S) as answer:
            assert "kvtier_pool_trace_dropped_keys 0.0" in answer.read().decode()
        tier = connect(addresses.block[0], shared_memory=way == "shared")
        try:
            tier.lookup(keys(range(4)))
            assert tier.write(items(range(4))) == [WriteStatus.STORED] * 4
            tier.lookup(keys(range(5)))
            assert read_blocks(tier, keys(range(4)), BLOCK_BYTES).count(None) == 0
        finally:
            tier.close()
    trace = read_trace(path)
    asked = [list(request.keys) for request in trace.requests if not request.is_write]
    written = [key for request in trace.requests if request.is_write for key in request.keys]
    assert asked == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert sorted(written) == [0, 1, 2, 3]
    assert trace.recorded == Recorded("lru", 16 * MIB // BLOCK_BYTES)
    assert not any(key[16:] in path.read_bytes() for key in keys(range(5)))


def test_the_command_line_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pool.trace"
    with pool_process(f"--record-trace={path}") as pool:
        tier = connect(pool.block)
        try:
            tier.lookup(keys(range(3)))
        finally:
            tier.close()
        code, _ = pool.terminate()
        assert code == 0
    assert read_trace(path).num_references == 3
