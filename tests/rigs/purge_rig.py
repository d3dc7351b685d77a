"""A tenant's purge of a pool with disk and Redis: what fills them, and what finds bytes that are left."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path

from configured_pool import BOSS, NEW, OLD, OTHER, Pool, configuration, digest
from kvtier.identity.keys import TenantId
from kvtier.testing.contract import make_key, read_blocks, summed
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.pool.tier import PoolTier
from pool_rig import BLUE, RED, connect
from redis_rig import RedisServer

NUM_BLOCKS = 40
BLOCK_BYTES = 256 * 1024
TWO_PAGES = 8192
COMMAND = [sys.executable, "-c", "from kvtier_pool.tenants_command import app; app(prog_name='kvtier tenants')"]


_ANY_LABEL = b"######"


@cache  # 10 ms each
def _payload_of_any(name: str) -> bytes:
    words = (marks(name) + _ANY_LABEL + f" {piece:6d} ".encode() for piece in range(BLOCK_BYTES // 32))
    return b"".join(word.ljust(32, b".")[:32] for word in words)


def payload(name: str, label: int) -> bytes:
    """A block in which every piece is another one's, and says whose it is."""
    return _payload_of_any(name).replace(_ANY_LABEL, f"{label:6d}".encode())


def marks(name: str) -> bytes:
    """What is in every piece of a tenant's blocks."""
    return f"{name}'s own words ".encode()


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


def fill(pool: Pool, path: Path, names: Collection[str] = ("red", "blue"), ways: int = 3) -> None:
    """Blocks of these tenants, by so many ways, `NUM_BLOCKS` by each."""
    tcp = pool.block.split(",")[0]
    all_ways = ((tcp, False), (f"grpc:{pool.grpc}", False), (f"unix:{path.parent}/pool.sock", True))
    for number, (address, shared) in enumerate(all_ways[:ways]):
        for name, tenant, token in (("red", RED, OLD), ("blue", BLUE, OTHER)):
            if name not in names:
                continue
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
    longest, mark = 0, marks(name)
    pieces = re.compile(rb"(?:%b[ 0-9.]{13,17}){2,}" % re.escape(mark))
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            found = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
            if found is None:
                continue
            start, end = (int(text, 16) for text in found.groups())
            memory.seek(start)
            with contextlib.suppress(OSError):
                region = memory.read(end - start)
                place = region.find(mark)
                while place >= 0:  # an expression that is tried at each byte takes ten times as long
                    run = pieces.match(region, place)
                    longest = max(longest, len(run[0]) if run else 0)
                    place = region.find(mark, run.end() if run else place + 1)
    return longest


def purge(pool: Pool, *, name: str = "red") -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "purge", name, "--yes", "--pid", str(pool.service.process.pid)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
