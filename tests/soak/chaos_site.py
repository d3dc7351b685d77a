"""The site of `make chaos`: three engines of two tenants, two pools, a Redis with a replica, and links.

    engine-1 (red)  --link--> pool-a --link--> redis, replica
    engine-2 (blue) --unix--> pool-a
    engine-3 (red)  --link--> pool-b --link--> redis, replica

Pool A's disk can be filled and hung where FUSE and tmpfs may be mounted.
"""

import contextlib
import ctypes
import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from chaos_schedule import ENGINES, POOLS
from free_port import free_port
from hanging_disk import HangingDisk, hanging_disk
from kvtier.errors import KvtierError
from kvtier.system.processes import Service
from kvtier.testing.faulty_link import FaultyLink
from kvtier_engine.demo.demo_model import demo_model_path
from redis_rig import MIB, RedisServer
from turned_clock import TurnedClock, turned_clock

TENANT_OF = {"engine-1": "red", "engine-2": "blue", "engine-3": "red"}
POOL_OF = {"engine-1": "pool-a", "engine-2": "pool-a", "engine-3": "pool-b"}
SECRETS = {name: f"the secret of {name}, for chaos" for name in ("red", "blue")}
TOKENS = {name: f"the-token-of-{name}-for-chaos" for name in ("red", "blue", "operator")}
CAPS = {
    "memory": {"red": 40 * MIB, "blue": 24 * MIB},
    "disk": {"red": 72 * MIB, "blue": 48 * MIB},
    "redis": {"red": 48 * MIB, "blue": 32 * MIB},
}
DISK_BYTES = 128 * MIB
_TMPFS_BYTES = 192 * MIB
ENGINE_CONFIG = """
tenant = "{tenant}"
[tenants.{tenant}]
secret = "env:{tenant}_secret"
token = "env:{tenant}_token"
[engine]
model = '{model}'
listen = "127.0.0.1:{port}"
dtype = "float32"
num_threads = 1
kv_bytes = "24MiB"
max_batch_tokens = 256
cache = {cache}
[cache]
fetch = "always"
load_deadline_s = 3.0
[host]
capacity_bytes = "24MiB"
"""
_POOL_TABLE = """
[pool]
address = "{address}"
connect_timeout_s = 0.5
call_timeout_s = 1.5
breaker_open_s = 1.0
"""
_POOL_CONFIG = """
[pool_service]
listen = ["unix:{folder}/{name}.sock", "127.0.0.1:{block}"]
grpc_listen = ["127.0.0.1:{grpc}"]
http_listen = "127.0.0.1:{http}"
memory_bytes = "64MiB"
disk_dir = "{disk}"
disk_bytes = {disk_bytes}
disk_reserve_bytes = 0
disk_segment_bytes = "4MiB"
disk_timeout_s = 1.0
redis_url = "redis://{redis}"
audit_log = "{folder}/{name}.audit"
shutdown_grace_s = 10.0
[operators.operator]
token_sha256 = ["{operator}"]
"""
_LAZILY = 2
"""MNT_DETACH."""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Member:
    """An engine or a pool: a process that is killed and started anew, on the same port."""

    name: str
    arguments: list[str]
    folder: Path
    url: str
    """The URL of its HTTP port."""
    environ: dict[str, str] = field(default_factory=dict)
    num_starts: int = 0
    """Grows with each start. Written by the thread of the faults."""
    is_up: threading.Event = field(default_factory=threading.Event)
    """Set while it is meant to run."""

    def start(self) -> None:
        """Does not wait until it serves."""
        self.service = Service(self.arguments, log=self.folder / f"{self.name}.log", environ=self.environ)
        self.num_starts += 1
        self.is_up.set()

    def kill(self) -> None:
        self.is_up.clear()
        self.service.kill()

    def has_died(self) -> bool:
        """Whether it has ended by itself."""
        return self.is_up.is_set() and self.service.process.poll() is not None


@dataclass
class Site:
    """All of it. Its owner starts and ends faults; other threads ask the members."""

    folder: Path
    members: dict[str, Member]
    links: dict[str, FaultyLink]
    redis: RedisServer
    """The one that serves; its replica follows."""
    replica: RedisServer
    clock: TurnedClock | None
    disk: HangingDisk | None
    """Pool A's, where it may be mounted."""
    small_disk: Path | None
    """What lies below it: a small file system."""

    @property
    def cannot(self) -> set[str]:
        """Kinds of faults that cannot be produced here."""
        clock = {"clock_jump"} if self.clock is None else set()
        return clock | ({"disk_full", "disk_hung"} if self.disk is None else set())

    def disk_dir(self, pool: str) -> Path:
        """The folder of a pool's disk tier. Pool A's may be looked at only while the site runs."""
        return (self.disk.folder if self.disk is not None and pool == "pool-a" else self.folder) / f"{pool}.disk"

    def uncached_engine(self) -> Member:
        """An engine that computes everything, not started: its answers are the right ones."""
        return _engine(self.folder, "reference", "red", None)

    def end(self) -> list[str]:
        """Stops all members in good order; what went wrong."""
        problems = []
        for member in sorted(self.members.values(), key=lambda member: member.name):
            try:
                member.is_up.clear()
                member.service.stop()
            except KvtierError as error:
                problems.append(str(error))
        return problems


@contextlib.contextmanager
def running_site(folder: Path, seed: int) -> Iterator[Site]:
    """Started, engines perhaps not serving yet; gone at the end, whatever has become of it."""
    with contextlib.ExitStack() as stack:
        clock = stack.enter_context(turned_clock(folder))
        disk, small_disk = stack.enter_context(_small_hanging_disk(folder))
        redis, replica = (_redis(folder, name) for name in ("redis", "replica"))
        redis.start()
        stack.callback(redis.kill)
        replica.arguments = replica_of(redis)
        replica.start()
        stack.callback(replica.kill)
        links: dict[str, FaultyLink] = {}
        members: dict[str, Member] = {}

        def linked(name: str, port: int) -> str:
            links[name] = FaultyLink(("127.0.0.1", port), seed + len(links))
            return stack.enter_context(links[name].running())

        for name in POOLS:
            address = linked(f"{name}>redis", redis.port)
            disk_dir = disk.folder if disk is not None and name == "pool-a" else folder
            members[name], port = _pool(folder, name, address, disk_dir / f"{name}.disk")
            for engine in (engine for engine in ENGINES if POOL_OF[engine] == name):
                way = f"unix:{folder}/{name}.sock" if engine == "engine-2" else linked(f"{engine}>{name}", port)
                members[engine] = _engine(folder, engine, TENANT_OF[engine], way)
        for member in members.values():
            member.start()
            stack.callback(_gone, member)
        yield Site(folder, members, links, redis, replica, clock, disk, small_disk)


def replica_of(primary: RedisServer) -> tuple[str, ...]:
    """Options of a server that follows another one."""
    return ("--replicaof", f"127.0.0.1 {primary.port}", "--repl-diskless-sync-delay", "0")


def _gone(member: Member) -> None:
    if member.service.process.poll() is None:
        member.kill()


def _redis(folder: Path, name: str) -> RedisServer:
    (folder / name).mkdir()
    return RedisServer(folder / name)


def _engine(folder: Path, name: str, tenant: str, address: str | None) -> Member:
    port, path = free_port(), folder / f"{name}.toml"
    text = ENGINE_CONFIG.format(
        tenant=tenant, model=demo_model_path(), port=port, cache=str(address is not None).lower()
    )
    path.write_text(text + (_POOL_TABLE.format(address=address) if address else ""))
    environ = {f"{tenant}_secret": SECRETS[tenant], f"{tenant}_token": TOKENS[tenant]}
    arguments = ["engine", "serve", "--config", str(path)]
    return Member(name, arguments, folder, f"http://127.0.0.1:{port}", environ)


def _pool(folder: Path, name: str, redis: str, disk: Path) -> tuple[Member, int]:
    """And the port of its block protocol."""
    block, grpc, http = (free_port() for _ in range(3))
    digests = {name: hashlib.sha256(token.encode()).hexdigest() for name, token in TOKENS.items()}
    text = _POOL_CONFIG.format(
        folder=folder, name=name, block=block, grpc=grpc, http=http, disk=disk, disk_bytes=DISK_BYTES, redis=redis,
        operator=digests["operator"],
    )  # fmt: skip
    for tenant in SECRETS:
        text += f'[tenants.{tenant}]\ntoken_sha256 = ["{digests[tenant]}"]\n'
        text += "".join(f"{tier}.cap_bytes = {caps[tenant]}\n" for tier, caps in CAPS.items())
    path = folder / f"{name}.toml"
    path.write_text(text)
    return Member(name, ["pool", "serve", "--config", str(path)], folder, f"http://127.0.0.1:{http}"), block


@contextlib.contextmanager
def _small_hanging_disk(folder: Path) -> Iterator[tuple[HangingDisk | None, Path | None]]:
    """A disk that hangs when told to, over a file system that is soon full; None and None where nobody may mount."""
    small = folder / "small"
    small.mkdir()
    with contextlib.ExitStack() as stack:
        if _libc.mount(b"kvtier-test", os.fsencode(small), b"tmpfs", 0, f"size={_TMPFS_BYTES}".encode()):
            yield None, None
            return
        stack.callback(_libc.umount2, os.fsencode(small), _LAZILY)
        try:
            disk = stack.enter_context(hanging_disk(small))
        except pytest.skip.Exception:
            yield None, None
            return
        yield disk, small
