"""Shares of tenants and the policy of memory, from the configuration to a pool that serves, and again on SIGHUP."""

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from kvtier.config import load_config
from kvtier.errors import ConfigError
from kvtier.identity.keys import TenantId
from kvtier.memory import memfd
from kvtier.metrics import Metrics
from kvtier.system.processes import Service
from kvtier.testing.contract import read_blocks
from kvtier.tiers.base import Status, WriteStatus
from kvtier_pool.service import PoolService
from pool_rig import BLOCK_BYTES, BLUE, MIB, RED, TENANTS, connect, items, keys, until
from redis_rig import running_redis

NUM_BLOCKS = 240
"""Blocks of `BLOCK_BYTES`: 15 MiB."""


def configuration(path: Path, red: str = "", pool: str = "", memory: str = "32MiB") -> Path:
    tables = [f'[tenants.{name}]\ntoken_sha256 = ["{digest}"]\n' for digest, name in TENANTS.items()]
    path.write_text(
        '[pool_service]\nlisten = ["127.0.0.1:0"]\ngrpc_listen = ["127.0.0.1:0"]\nhttp_listen = "127.0.0.1:0"\n'
        f'memory_bytes = "{memory}"\nmin_residency_s = 0\n{pool}\n{"".join(tables)}[tenants.red.memory]\n{red}\n'
    )
    return path


def kept_bytes(address: str, first: int) -> int:
    """Writes `NUM_BLOCKS` new blocks of red's and counts the bytes of those that are there after the last write."""
    tier = connect(address)
    try:
        tier.write(items(range(first, first + NUM_BLOCKS)))
        return tier.lookup(keys(range(first, first + NUM_BLOCKS))).count(Status.HIT) * BLOCK_BYTES
    finally:
        tier.close()


def test_a_cap_holds_and_is_read_again_on_sighup(tmp_path: Path) -> None:
    file, log = configuration(tmp_path / "pool.toml", 'cap_bytes = "4MiB"'), tmp_path / "log"
    with Service(["pool", "serve", "--config", str(file)], log=log, environ={}) as pool:
        address = pool.ready()["block"]
        assert 2 * MIB < kept_bytes(address, 0) <= 4 * MIB
        configuration(file, 'cap_bytes = "10MiB"')
        pool.process.send_signal(signal.SIGHUP)
        until(lambda: "SIGHUP: the pool has the tenants" in log.read_text() or None)
        assert 6 * MIB < kept_bytes(address, 1000) <= 10 * MIB
        configuration(file, 'guaranteed_bytes = "1GiB"')
        pool.process.send_signal(signal.SIGHUP)
        until(lambda: "tenants.*.memory.guaranteed_bytes: 1,073,741,824 bytes in all" in log.read_text() or None)
        assert 6 * MIB < kept_bytes(address, 2000) <= 10 * MIB, "what is wrong changes nothing"
        until_restart = "pool_service.memory_bytes is 33,554,432 until a restart, when it is"
        for guaranteed, rest in (
            ("128MiB", "134,217,728; restart the pool, or guarantee less"),
            ("256MiB", "134,217,728; guarantee less"),
        ):
            configuration(file, f'guaranteed_bytes = "{guaranteed}"', memory="128MiB")
            pool.process.send_signal(signal.SIGHUP)
            until(lambda said=f"{until_restart} {rest}\n": said in log.read_text() or None)


@pytest.mark.skipif(not memfd.available(), reason="shared memory needs Linux")
def test_a_client_in_shared_memory_asks_for_less_when_its_share_is_less(tmp_path: Path) -> None:
    """What is too much at a time is refused as a whole, and goes over the socket, until the client knows its share."""
    file, log, metrics = tmp_path / "pool.toml", tmp_path / "log", Metrics()
    unix = f'listen = ["unix:{tmp_path}/socket"]'
    configuration(file).write_text(file.read_text().replace('listen = ["127.0.0.1:0"]', unix, 1))
    with Service(["pool", "serve", "--config", str(file)], log=log, environ={}) as pool, ExitStack() as stack:
        tier = connect(pool.ready()["block"], shared_memory=True, metrics=metrics)
        stack.callback(tier.close)
        assert set(tier.write(items(range(20)))) == {WriteStatus.STORED}

        def read_over_socket() -> float:
            """Bytes of all blocks that come over the socket."""
            before = moved_bytes(metrics, "unix")
            assert read_blocks(tier, keys(range(20)), BLOCK_BYTES).count(None) == 0
            return moved_bytes(metrics, "unix") - before

        assert read_over_socket() == 0
        file.write_text(file.read_text().replace("[tenants.red.memory]", '[tenants.red.memory]\ncap_bytes = "2MiB"'))
        pool.process.send_signal(signal.SIGHUP)
        until(lambda: "SIGHUP: the pool has the tenants" in log.read_text() or None)
        assert read_over_socket() > 0
        assert read_over_socket() == 0


def moved_bytes(metrics: Metrics, path: str) -> float:
    return metrics.registry.get_sample_value("kvtier_path_bytes_total", {"path": path, "op": "read"}) or 0.0


@pytest.mark.parametrize(
    ("red", "message"),
    [
        ('guaranteed_bytes = "64MiB"', r"tenants\.\*\.memory\.guaranteed_bytes.*guarantee less"),
        ('guaranteed_bytes = "2MiB"\ncap_bytes = "1MiB"', "cap_bytes is below guaranteed_bytes"),
        ("weight = -1", "weight"),
    ],
)
def test_shares_that_cannot_be_are_refused_at_the_start(tmp_path: Path, red: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PoolService(load_config(configuration(tmp_path / "pool.toml", red))).start()


def test_memory_is_whole_pages_and_so_is_what_can_be_guaranteed(tmp_path: Path) -> None:
    file = configuration(tmp_path / "pool.toml", "guaranteed_bytes = 33_554_433", memory="33_554_433")
    with pytest.raises(ConfigError, match=r"pool_service\.memory_bytes is 33,554,432; guarantee less"):
        PoolService(load_config(file)).start()


def test_the_policy_of_memory_is_the_configurations(tmp_path: Path) -> None:
    """With `mru`, what was written last goes first."""
    file = configuration(tmp_path / "pool.toml", 'cap_bytes = "4MiB"', 'memory_policy = "mru"')
    service = PoolService(load_config(file))
    tier = connect(service.start().block[0])
    try:
        for label in range(NUM_BLOCKS):
            tier.write(items([label]))
        assert tier.lookup(keys(range(8))) == [Status.HIT] * 8
    finally:
        tier.close()
        service.stop()


@pytest.mark.parametrize("text", ["a = " + "[" * 10_000, ""], ids=["nested", "empty"])
def test_a_configuration_that_is_none_ends_nothing(text: str, tmp_path: Path) -> None:
    file, log = configuration(tmp_path / "pool.toml"), tmp_path / "log"
    with Service(["pool", "serve", "--config", str(file)], log=log, environ={}) as pool:
        address = pool.ready()["block"]
        file.write_text(text)
        pool.process.send_signal(signal.SIGHUP)
        until(lambda: "SIGHUP: tenants, tokens and shares stay as they are" in log.read_text() or None)
        assert kept_bytes(address, 0) > MIB


def redis_configuration(path: Path, url: str, red: str) -> Path:
    tables = [f'[tenants.{name}]\ntoken_sha256 = ["{digest}"]\n' for digest, name in TENANTS.items()]
    path.write_text(
        '[pool_service]\nlisten = ["127.0.0.1:0"]\ngrpc_listen = ["127.0.0.1:0"]\nhttp_listen = "127.0.0.1:0"\n'
        f'memory_bytes = "64MiB"\nredis_url = "{url}"\n{"".join(tables)}[tenants.red.redis]\n{red}\n'
    )
    return path


def test_a_cap_in_redis_holds_for_two_pools_together_and_is_read_again_on_sighup(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server, server.client() as client, ExitStack() as stack:
        file = redis_configuration(tmp_path / "pool.toml", server.url, 'cap_bytes = "8MiB"')
        command = ["pool", "serve", "--config", str(file)]
        logs = [tmp_path / "log0", tmp_path / "log1"]
        pools = [stack.enter_context(Service(command, log=log, environ={})) for log in logs]
        addresses = [pool.ready()["block"] for pool in pools]
        tiers = [connect(address) for address in addresses]
        blue = connect(addresses[0], "blue")
        try:
            assert blue.write(items(range(20), BLUE)) == [WriteStatus.STORED] * 20
            for number, tier in enumerate(tiers):
                tier.write(items(range(1000 * number, 1000 * number + NUM_BLOCKS)))
            until(lambda: num_in_redis(client, RED) * BLOCK_BYTES > 6 * MIB)
            assert num_in_redis(client, RED) * BLOCK_BYTES <= 8 * MIB
            redis_configuration(file, server.url, "")
            for pool, log in zip(pools, logs, strict=True):
                pool.process.send_signal(signal.SIGHUP)
                until(lambda log=log: "SIGHUP: the pool has the tenants" in log.read_text())
            for number, tier in enumerate(tiers):
                tier.write(items(range(2000 + 1000 * number, 2000 + 1000 * number + NUM_BLOCKS)))
            until(lambda: num_in_redis(client, RED) * BLOCK_BYTES > 24 * MIB)
            assert num_in_redis(client, BLUE) == 20
        finally:
            for tier in (*tiers, blue):
                tier.close()


def num_in_redis(client: redis.Redis, tenant: TenantId) -> int:
    return len(list(client.scan_iter(f"kvt1:{tenant.hex()}:*", count=1000)))


def test_what_redis_does_not_do_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tenants\.red\.redis\.guaranteed_bytes"):
        load_config(redis_configuration(tmp_path / "pool.toml", "", 'guaranteed_bytes = "1MiB"'))
