"""A tenant's purge: nothing of it is left in memory, on disk or in Redis, and nothing of others is gone."""

import http.client
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from configured_pool import BOSS, NEW, OLD, OTHER, digest, running
from kvtier.testing.contract import make_key, summed
from kvtier.tiers.base import Status, WriteStatus
from pool_rig import BLUE, RED, WAIT_S, connect, until
from purge_rig import (
    BLOCK_BYTES,
    COMMAND,
    NUM_BLOCKS,
    TWO_PAGES,
    fill,
    found,
    in_dump,
    in_memory,
    in_redis,
    marks,
    on_disk,
    payload,
    purge,
    tiers_of,
)
from redis_rig import RedisServer, running_redis


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with running_redis(folder) as server:
        yield server


def test_nothing_is_left_and_nothing_of_others_is_gone(tmp_path: Path, redis: RedisServer) -> None:
    path = tiers_of(tmp_path / "pool.toml", redis)
    with running(path) as pool:
        fill(pool, path)
        until(lambda: in_redis(redis, RED) == in_redis(redis, BLUE) == 3 * NUM_BLOCKS)
        until(lambda: on_disk(path, marks("red")) >= 3 * NUM_BLOCKS)
        pid = pool.service.process.pid
        assert in_memory(pid, "red") >= BLOCK_BYTES, "the search finds what is there"
        assert in_dump(redis, marks("red"))
        path.write_text(path.read_text().replace(digest(OLD), digest("another-token-of-red")))
        pool.says("the configuration has changed: the pool has")
        ended = purge(pool)
        assert ended.returncode == 0, ended.stderr
        assert f"redis: {3 * NUM_BLOCKS} values removed" in ended.stdout
        assert "may still log in" in ended.stderr
        assert on_disk(path, marks("red")) == 0
        assert in_redis(redis, RED) == 0
        assert in_dump(redis, marks("red")) == 0
        assert in_memory(pid, "red") < TWO_PAGES, "what is freed beside something in use"
        for name, tenant, token, number in (("red", RED, "another-token-of-red", 0), ("blue", BLUE, OTHER, NUM_BLOCKS)):
            tier = connect(pool.block.split(",")[0], name, token=token)
            assert found(tier, tenant, range(NUM_BLOCKS)) == number
            assert tier.write([summed(make_key("new", tenant=tenant), payload(name, 999))]) == [WriteStatus.STORED]
            tier.close()
        events = [json.loads(line) for line in pool.log.read_text().splitlines() if line.startswith("{")]
        (purged,) = [event for event in events if event["event"] == "purged"]
        assert (purged["tenant"], purged["problems"]) == ("red", [])
        assert purged["removed"]["memory"] == purged["removed"]["redis"] == 3 * NUM_BLOCKS
    with running(path) as pool:
        tier = connect(pool.block.split(",")[0], token="another-token-of-red")
        assert tier.lookup([make_key(label, tenant=RED) for label in range(NUM_BLOCKS)]) == [Status.MISS] * NUM_BLOCKS
        tier.close()


def test_a_purge_that_was_cut_short_is_run_again(tmp_path: Path, redis: RedisServer) -> None:
    """Redis hangs: the purge says what is left. The pool dies in the middle: the next one finishes it."""
    path = tiers_of(tmp_path / "pool.toml", redis)
    with running(path) as pool:
        fill(pool, path)
        until(lambda: in_redis(redis, RED) == in_redis(redis, BLUE) == 3 * NUM_BLOCKS)
        with redis.stopped():
            ended = purge(pool)
            assert ended.returncode == 1
            assert "not everything is gone: redis: " in ended.stderr
            assert "for what a tenant has; run this again\n" in ended.stderr, "what is to be done is said once"
            assert on_disk(path, marks("red")) == 0
            command = [*COMMAND, "purge", "red", "--yes", "--pid", str(pool.service.process.pid)]
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
                until(lambda: pool.log.read_text().count('"event": "purge"') == 2)
                pool.service.kill()
                assert process.wait(WAIT_S) == 1
        assert in_redis(redis, RED) == 3 * NUM_BLOCKS
    with running(path) as pool:
        ended = purge(pool)
        assert (ended.returncode, ended.stderr.count("not everything")) == (0, 0), ended.stderr
        assert in_redis(redis, RED) == 0
        assert in_redis(redis, BLUE) == 3 * NUM_BLOCKS
        tier = connect(pool.block.split(",")[0], token=OLD)
        assert found(tier, RED, range(NUM_BLOCKS)) == 0
        tier.close()


def test_only_operators_purge(tmp_path: Path, redis: RedisServer) -> None:
    path = tiers_of(tmp_path / "pool.toml", redis)
    with running(path) as pool:
        fill(pool, path)
        codes = {}
        for token in (OLD, OTHER, NEW, BOSS):
            connection = http.client.HTTPConnection(pool.http, timeout=WAIT_S)
            connection.request("POST", "/tenants/blue/purge", headers={"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            codes[token] = answer.status
            body = json.loads(answer.read())
            connection.close()
        assert codes == {OLD: 403, OTHER: 403, NEW: 403, BOSS: 200}
        assert body["problems"] == []
        assert body["has_credentials"] is True
        red = connect(pool.block.split(",")[0], token=OLD)
        assert found(red, RED, range(NUM_BLOCKS)) == NUM_BLOCKS
        red.close()
        pool.says('"deed": "purge tenant \'blue\'"', times=3)
        pool.service.process.send_signal(signal.SIGTERM)
        assert pool.service.process.wait(WAIT_S) == 0
