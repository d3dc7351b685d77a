"""Admission of the pool's tiers from the configuration: a pool in a process of its own, its disk and a Redis."""

import re
import urllib.request
from pathlib import Path

import pytest

from kvtier.config import load_config
from kvtier.errors import ConfigError
from kvtier.system.processes import Service
from kvtier.testing.blocks import read_blocks
from kvtier.tiers.base import Status, WriteStatus
from kvtier_pool.service import PoolService
from pool_rig import BLOCK_BYTES, TENANTS, WAIT_S, connect, items, keys, payloads, until
from redis_rig import running_redis


def configuration(folder: Path, **pool: str) -> Path:
    path = folder / "pool.toml"
    tables = [f'[tenants.{name}]\ntoken_sha256 = ["{digest}"]\n' for digest, name in TENANTS.items()]
    fields = "".join(f'{name} = "{value}"\n' for name, value in pool.items())
    path.write_text(
        '[pool_service]\nlisten = ["127.0.0.1:0"]\ngrpc_listen = ["127.0.0.1:0"]\nhttp_listen = "127.0.0.1:0"\n'
        f"memory_bytes = 16777216\nmin_residency_s = 0\ndisk_reserve_bytes = 0\n{fields}{''.join(tables)}"
    )
    return path


def sample(http: str, name: str) -> float:
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=WAIT_S) as answer:
        found = re.search(rf"^{re.escape(name)} (\S+)", answer.read().decode(), re.MULTILINE)
    assert found is not None, f"no sample {name}"
    return float(found[1])


def there(file: Path, log: Path, labels: range) -> list[bool]:
    """Which of these blocks a pool has that was just started."""
    with Service(["pool", "serve", "--config", str(file)], log=log, environ={}) as pool:
        tier = connect(pool.ready()["block"])
        try:
            return [status is Status.HIT for status in tier.lookup(keys(labels))]
        finally:
            tier.close()


def test_a_second_use_lands_on_disk_and_a_restart_has_it_there(tmp_path: Path) -> None:
    file = configuration(tmp_path, disk_dir=str(tmp_path / "disk"), disk_bytes="64MiB", disk_admission="second-use")
    with Service(["pool", "serve", "--config", str(file)], log=tmp_path / "log", environ={}) as pool:
        ready = pool.ready()
        tier = connect(ready["block"])
        try:
            assert tier.write(items(range(8))) == [WriteStatus.STORED] * 8
            declined = 'kvtier_tier_declined_blocks_total{condition="second-use",tier="disk"}'
            results = 'kvtier_pool_written_down_blocks_total{result="%s",tier="disk"}'
            assert sample(ready["http"], declined) == sample(ready["http"], results % "declined") == 8
            assert read_blocks(tier, keys(range(3)), BLOCK_BYTES) == payloads(range(3))
            until(lambda: sample(ready["http"], results % "stored") == 3)
            assert sample(ready["http"], declined) == 8
        finally:
            tier.close()
        pool.stop()
    assert there(file, tmp_path / "log2", range(8)) == [True] * 3 + [False] * 5


def test_bytes_per_day_stop_writes_to_disk(tmp_path: Path) -> None:
    budget = str(24 * 4 * BLOCK_BYTES)  # an hour's part of it is four blocks
    admission = f"min-run:2,bytes-per-day:{budget}"
    file = configuration(tmp_path, disk_dir=str(tmp_path / "disk"), disk_bytes="64MiB", disk_admission=admission)
    with Service(["pool", "serve", "--config", str(file)], log=tmp_path / "log", environ={}) as pool:
        ready = pool.ready()
        tier = connect(ready["block"])
        try:
            assert tier.write(items(range(10))) == [WriteStatus.STORED] * 10
            assert tier.lookup(keys(range(10))) == [Status.HIT] * 10
            declined = 'kvtier_tier_declined_blocks_total{condition="bytes-per-day",tier="disk"}'
            assert sample(ready["http"], declined) == 6
        finally:
            tier.close()
        pool.stop()
    assert there(file, tmp_path / "log2", range(10)).count(True) == 4


def test_redis_has_an_admission_of_its_own(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        file = configuration(tmp_path, redis_url=server.url, redis_admission="second-use")
        with Service(["pool", "serve", "--config", str(file)], log=tmp_path / "log", environ={}) as pool:
            tier = connect(pool.ready()["block"])
            try:
                tier.write(items(range(4)))
                read_blocks(tier, keys(range(1)), BLOCK_BYTES)
                with server.client() as client:
                    until(lambda: client.dbsize() == 1)
            finally:
                tier.close()


def test_what_a_redis_cannot_tell_is_an_error_at_the_start(tmp_path: Path) -> None:
    file = configuration(tmp_path, redis_url="redis://127.0.0.1:1", redis_admission="tenant-share:0.5")
    with pytest.raises(ConfigError, match=r"redis_admission: admission 'tenant-share:0\.5'.*leave it out"):
        PoolService(load_config(file)).start()
