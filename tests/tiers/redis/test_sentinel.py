"""Sentinels of real servers: they lead to the master, also to a new one."""

import contextlib
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from free_port import free_port
from kvtier.errors import ConfigError
from kvtier.metrics import Metrics
from kvtier.testing.contract import make_key, read_blocks, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.redis.look import ServerLook, look_at
from kvtier.tiers.redis.settings import RedisSettings
from redis_cluster_rig import BLOCK_BYTES, ITEMS, KEYS, NUM_BLOCKS, PAYLOADS
from redis_rig import (
    RedisServer,
    connect,
    errors,
    poll,
    running_redis,
    server_binary,
)

PASSWORD = "for data and sentinels"


def test_sentinels_lead_to_the_new_master(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        servers: list[RedisServer] = []
        for i in range(2):
            (tmp_path / str(i)).mkdir()
            follow = ["--masterauth", PASSWORD]
            if servers:
                follow += ["--replicaof", f"127.0.0.1 {servers[0].port}", "--repl-diskless-sync-delay", "0"]
            servers.append(stack.enter_context(running_redis(tmp_path / str(i), *follow, password=PASSWORD)))
        sentinel = stack.enter_context(running_sentinel(tmp_path, servers[0].port))
        metrics = Metrics()
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel}/main"
        tier = connect(url, password=PASSWORD, metrics=metrics, call_timeout_s=2.0)
        assert tier.write(ITEMS) == [WriteStatus.STORED] * NUM_BLOCKS
        unknown = connect(url.replace("main", "other"), password=PASSWORD, metrics=metrics)
        assert unknown.lookup(KEYS[:1]) == [Status.MISS]
        assert errors(metrics, "lookup", "UnavailableError") == 1
        with servers[1].client() as replica:
            poll(lambda: replica.info("replication")["master_link_status"] == "up" and replica.dbsize() == NUM_BLOCKS)
            servers[0].kill()
            assert tier.write([summed(make_key("new"), PAYLOADS[0])]) == [WriteStatus.FAILED]
            with redis.Redis(port=sentinel) as client:
                client.execute_command("SENTINEL", "SET", "main", "down-after-milliseconds", "300")
            poll(lambda: tier.write([summed(make_key("new"), PAYLOADS[0])]) == [WriteStatus.STORED])
            assert replica.info("replication")["role"] == "master"
        assert read_blocks(tier, KEYS, BLOCK_BYTES) == PAYLOADS
        for either in (tier, unknown):
            either.close()


def test_sentinels_that_are_dead_or_know_no_such_service(tmp_path: Path) -> None:
    settings = RedisSettings(password=PASSWORD, call_timeout_s=2.0)
    dead = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{free_port()}/main"
    (failure,) = look_at(dead, settings, 2.0).values()
    assert "(Sentinels of main): no Sentinel answers: " in str(failure)
    assert "Connection refused" in str(failure)
    assert "redis.client" not in str(failure)
    (tmp_path / "master").mkdir()
    (tmp_path / "replica").mkdir()
    with running_redis(tmp_path / "master", "--masterauth", PASSWORD, password=PASSWORD) as master:
        follow = ["--masterauth", PASSWORD, "--replicaof", f"127.0.0.1 {master.port}"]
        with (
            running_redis(tmp_path / "replica", *follow, password=PASSWORD),
            running_sentinel(tmp_path, master.port) as sentinel,
        ):
            url = f"redis+sentinel://127.0.0.1:{sentinel}/"
            (server,) = look_at(f"{url}main", settings, 2.0).values()
            assert isinstance(server, ServerLook)
            with pytest.raises(ConfigError, match="know no service 'other', but 'main': name that of the Redis"):
                look_at(f"{url}other", settings, 2.0)


@contextlib.contextmanager
def running_sentinel(folder: Path, master_port: int) -> Iterator[int]:
    """One Sentinel, without a password of its own, that decides alone; its port. Patient, until it is told to be fast:
    a master that is a little late is not to be replaced."""
    port = free_port()
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor main 127.0.0.1 {master_port} 1\n"
        f'sentinel auth-pass main "{PASSWORD}"\nsentinel down-after-milliseconds main 60000\n'
        "sentinel failover-timeout main 2000\n"
    )
    process = subprocess.Popen(
        [server_binary(), str(config), "--sentinel"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with redis.Redis(port=port, decode_responses=True) as client:

            def knows_replica() -> bool:
                with contextlib.suppress(redis.ConnectionError):
                    text = str(client.execute_command("SENTINEL", "MASTER", "main"))
                    return re.search(r"num-slaves'?[,:] '?1", text) is not None
                return False

            poll(knows_replica)
        yield port
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(20)
