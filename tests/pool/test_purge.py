"""A tenant's purge: nothing of it is left in memory, on disk or in Redis, and nothing of others is gone."""

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from configured_pool import BOSS, NEW, OLD, OTHER, Pool, configuration, digest, running
from kvtier.identity.keys import TenantId
from kvtier.testing.contract import make_key, read_blocks, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.pool.tier import PoolTier
from pool_rig import BLUE, RED, WAIT_S, connect, until
from redis_rig import RedisServer, running_redis

NUM_BLOCKS = 40
BLOCK_BYTES = 256 * 1024
TWO_PAGES = 8192
COMMAND = [sys.executable, "-c", "from kvtier_pool.tenants_command import app; app(prog_name='kvtier tenants')"]


def payload(name: str, label: int) -> bytes:
    """A block in which every piece is another one's, and says whose it is."""
    words = (f"{name}'s own words {label:6d} {piece:6d} ".encode() for piece in range(BLOCK_BYTES // 32))
    return b"".join(word.ljust(32, b".")[:32] for word in words)


def marks(name: str) -> bytes:
    """What is in every piece of a tenant's blocks."""
    return f"{name}'s own words ".encode()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with running_redis(folder) as server:
        yield server


def tiers_of(path: Path, redis: RedisServer) -> Path:
    roles = f'[operators.boss]\ntoken_sha256 = ["{digest(BOSS)}"]\n[observers.bob]\ntoken_sha256 = ["{digest(NEW)}"]\n'
    configuration(path, f'"{digest(OLD)}"', roles)
    disk = 'disk_dir = "disk"\ndisk_bytes = "256MiB"\ndisk_reserve_bytes = 0\n'
    table = f'[pool_service]\n{disk}redis_url = "{redis.url}"\n'
    unix = f'listen = ["127.0.0.1:0", "unix:{path.parent}/pool.sock"]'
    text = (
        path.read_text()
        .replace("32MiB", "128MiB")
        .replace("[pool_service]\n", table)
        .replace('listen = ["127.0.0.1:0"]', unix, 1)
    )
    path.write_text(text)
    return path


def fill(pool: Pool, path: Path) -> None:
    """Both tenants' blocks, by every way, until they are on disk and in Redis."""
    tcp = pool.block.split(",")[0]
    for number, (address, shared) in enumerate(
        ((tcp, False), (f"grpc:{pool.grpc}", False), (f"unix:{path.parent}/pool.sock", True))
    ):
        for name, tenant, token in (("red", RED, OLD), ("blue", BLUE, OTHER)):
            tier = connect(address, name, token=token, shared_memory=shared)
            labels = range(number * NUM_BLOCKS, (number + 1) * NUM_BLOCKS)
            items = [summed(make_key(label, tenant=tenant), payload(name, label)) for label in labels]
            assert set(tier.write(items)) == {WriteStatus.STORED}
            assert found(tier, tenant, labels) == NUM_BLOCKS
            tier.close()


def found(tier: PoolTier, tenant: TenantId, labels: range) -> int:
    answers = read_blocks(tier, [make_key(label, tenant=tenant) for label in labels], BLOCK_BYTES)
    return len(answers) - answers.count(None)


def in_redis(redis: RedisServer, tenant: TenantId) -> int:
    with redis.client() as client:
        return len(list(client.scan_iter(f"kvt1:{tenant.hex()}:*", count=1000)))


def on_disk(path: Path, mark: bytes) -> int:
    return sum(file.read_bytes().count(mark) for file in (path.parent / "disk").rglob("*") if file.is_file())


def in_dump(redis: RedisServer, mark: bytes) -> int:
    with redis.client() as client:
        client.config_set("rdbcompression", "no")
        client.save()
    return (redis.folder / "dump.rdb").read_bytes().count(mark)


def in_memory(pid: int, name: str) -> int:
    """The longest run of a tenant's bytes in memory that a process can write to."""
    longest = 0
    piece = re.compile(rb"(?:%b[ 0-9.]{13,17}){2,}" % re.escape(marks(name)))
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            found = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
            if found is None:
                continue
            start, end = (int(text, 16) for text in found.groups())
            memory.seek(start)
            with contextlib.suppress(OSError):
                longest = max([longest, *(len(run[0]) for run in piece.finditer(memory.read(end - start)))])
    return longest


def purge(pool: Pool, *, name: str = "red") -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "purge", name, "--yes", "--pid", str(pool.service.process.pid)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


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
        until(lambda: in_redis(redis, RED) == 3 * NUM_BLOCKS)
        with redis.stopped():
            ended = purge(pool)
            assert ended.returncode == 1
            assert "not everything is gone: redis: " in ended.stderr
            assert "run this again" in ended.stderr
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
