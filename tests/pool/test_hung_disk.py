"""A pool whose disk hangs: memory serves on, /healthz tells, a stop keeps to its time, and the disk comes back."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from configured_pool import NEW, OLD, configuration, digest
from hanging_disk import HangingDisk, hanging_disk
from kvtier.testing.blocks import read_blocks
from kvtier.tiers.base import Status, WriteStatus
from pool_grpc_rig import connect
from pool_rig import BLOCK_BYTES, MIB, WAIT_S, items, keys, running_pool, until
from pool_rig import connect as connected


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


_SOON = "import kvtier.cli.main, kvtier_pool.cli as cli; cli._SLOW_START_S = 0.2; kvtier.cli.main.main()"


def test_a_pool_that_starts_on_a_disk_that_hangs_says_what_it_waits_for(tmp_path: Path) -> None:
    listening = "".join(f'{name} = "127.0.0.1:0"\n' for name in ("listen", "grpc_listen", "http_listen"))
    sizes = 'memory_bytes = "16MiB"\ndisk_bytes = "64MiB"\n'
    with hanging_disk(tmp_path) as disk:
        (disk.folder / "tier").mkdir()
        (config := tmp_path / "pool.toml").write_text(
            f'[pool_service]\n{listening}{sizes}disk_dir = "{disk.folder}/tier"\n'
            f'[tenants.red]\ntoken_sha256 = ["{"ab" * 32}"]\n'
        )
        disk.hang()
        command = [sys.executable, "-c", _SOON, "pool", "serve", "--config", str(config)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pool:
            given_up = threading.Timer(WAIT_S, pool.kill)
            given_up.start()
            assert pool.stdout is not None
            assert any(
                "not ready after 0.2 s: it reads its disk tier, or that does not" in line for line in pool.stdout
            )
            disk.answer()
            assert any(line.startswith("ready ") for line in pool.stdout)
            given_up.cancel()
            pool.terminate()
            pool.communicate(timeout=WAIT_S)
    assert pool.returncode == 0


_TOLD_SOON = "import kvtier.cli.main, kvtier.config.reloading as r; r._HANGS_S = 0.5; kvtier.cli.main.main()"


def test_a_pool_whose_configuration_is_on_a_disk_that_hangs_says_so_and_serves_on(tmp_path: Path) -> None:
    with hanging_disk(tmp_path) as disk:
        file = configuration(tmp_path / "behind" / "pool.toml", f'"{digest(OLD)}"')
        command = [sys.executable, "-c", _TOLD_SOON, "pool", "serve", "--config", str(disk.folder / "pool.toml")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pool:
            given_up = threading.Timer(WAIT_S, pool.kill)
            given_up.start()
            assert pool.stdout is not None
            ready = next(line for line in pool.stdout if line.startswith("ready "))
            (block,) = (part.removeprefix("block=") for part in ready.split() if part.startswith("block="))
            disk.hang()
            assert any("configuration have not answered for 0.5 s" in line for line in pool.stdout)
            with contextlib.closing(connected(block, token=OLD)) as tier:
                assert tier.write(items(range(2))) == [WriteStatus.STORED] * 2
            configuration(file, f'"{digest(NEW)}"')
            pool.send_signal(signal.SIGHUP)
            disk.answer()
            said = ""
            while "the pool has the" not in said or "answer again" not in said:
                said += next(pool.stdout)
            given_up.cancel()
            pool.terminate()
            pool.communicate(timeout=WAIT_S)
    assert pool.returncode == 0
