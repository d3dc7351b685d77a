"""A pool whose disk hangs: memory serves on, /healthz tells, a stop keeps to its time, and the disk comes back."""

import contextlib
import time
import urllib.request
from pathlib import Path

from hanging_disk import HangingDisk, hanging_disk
from kvtier.testing.blocks import read_blocks
from kvtier.tiers.base import Status, WriteStatus
from pool_grpc_rig import connect
from pool_rig import BLOCK_BYTES, MIB, WAIT_S, items, keys, running_pool, until


def _health(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/healthz", timeout=WAIT_S) as answer:
        return answer.read().decode()


def _written(address: str) -> float:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S) as answer:
        lines = answer.read().decode().splitlines()
    stored = [line for line in lines if line.startswith("kvtier_pool_written_down_blocks_total") and "stored" in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in stored)


def test_memory_serves_while_the_disk_hangs_and_the_disk_comes_back(tmp_path: Path) -> None:
    with hanging_disk(tmp_path) as disk:
        _serve_while_it_hangs(disk)


def _serve_while_it_hangs(disk: HangingDisk) -> None:
    settings = {"disk_dir": disk.folder / "tier", "disk_bytes": 64 * MIB, "disk_reserve_bytes": 0}
    old, new = range(40), range(100, 104)
    with running_pool(memory_bytes=2 * MIB, disk_timeout_s=0.3, shutdown_grace_s=2.0, **settings) as addresses:
        with contextlib.closing(connect(addresses.grpc[0])) as tier:
            for label in old:
                while tier.write(items([label])) != [WriteStatus.STORED]:
                    time.sleep(0.01)
            until(lambda: _written(addresses.http) >= len(old))
            disk.hang()
            assert read_blocks(tier, keys(old[:1]), BLOCK_BYTES) == [None]
            assert "disk is off" in _health(addresses.http)
            assert tier.write(items(new)) == [WriteStatus.STORED] * len(new)
            assert None not in read_blocks(tier, keys(new), BLOCK_BYTES)
            assert tier.lookup(keys(old[1:2])) == [Status.MISS]
            disk.answer()
            until(lambda: _health(addresses.http) == "ok\n")
            assert None not in read_blocks(tier, keys(old[:1]), BLOCK_BYTES)
            disk.hang()
        began = time.monotonic()
    assert time.monotonic() - began < WAIT_S
    disk.answer()
