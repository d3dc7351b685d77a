"""`docker-compose up` for real: what a user gets, what it survives, and what it refuses."""

import re
import time
from pathlib import Path

from compose_rig import BASE_IMAGE, ROOT, Stack, compose, docker, inspect, poll, require_small, sha256
from kvtier.identity.keys import StoreKey, tenant_id
from kvtier.testing.contract import make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import WriteStatus

BLOCK_BYTES = 256 * 1024
NUM_BLOCKS = 32
MAX_IMAGE_BYTES = 120_000_000
"""The most that the pool's image takes, the base image apart."""
UID = "10001"
DEFAULT = tenant_id("default")

READER = """
import hashlib, sys
from kvtier.identity.keys import StoreKey, tenant_id
from kvtier.metrics import Metrics
from kvtier.tiers.base import Status
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.pool.tier import PoolTier
from kvtier.tiers.pool.socket_transport import SocketTransport

address, token, key, nbytes = sys.argv[1:]
tenant = tenant_id("default")
tier = PoolTier(SocketTransport(address, token, tenant), tenant, metrics=Metrics(), breaker=CircuitBreaker(3, 1.0),
                call_timeout_s=10.0, max_batch_bytes=1 << 26)
block = bytearray(int(nbytes))
hit = tier.read([StoreKey(bytes.fromhex(key))], [memoryview(block)]) == [Status.HIT]
print(hashlib.sha256(block).hexdigest() if hit else "miss")
"""
"""An engine's side of the block protocol, in a container."""

MAPPING_CLIENT = """
import hashlib, sys
from kvtier.identity.keys import StoreKey, tenant_id
from kvtier.metrics import Metrics
from kvtier.testing.blocks import summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.pool.tier import PoolTier
from kvtier.tiers.pool.access import PoolAccess, open_transport

verb, token, key = sys.argv[1:]
key, tenant, metrics = StoreKey(bytes.fromhex(key)), tenant_id("default"), Metrics()
access = PoolAccess(["unix:/run/kvtier/pool.sock"], tenant, token)
tier = PoolTier(open_transport(access, metrics), tenant, metrics=metrics, breaker=CircuitBreaker(3, 1.0))
block = bytearray(hashlib.shake_256(key).digest(1 << 20))
if verb == "write":
    assert tier.write([summed(key, block)]) == [WriteStatus.STORED]
else:
    expected, block = bytes(block), bytearray(1 << 20)
    assert tier.read([key], [memoryview(block)]) == [Status.HIT]
    assert block == expected
for path in ("shm", "unix"):
    labels = {"path": path, "op": verb}
    print(path, int(metrics.registry.get_sample_value("kvtier_path_bytes_total", labels) or 0))
tier.close()
"""
"""Writes or reads a block of 1 MiB and says by which path it went."""


def blocks(label: str) -> dict[StoreKey, bytes]:
    return {make_key((label, i), tenant=DEFAULT): make_payload((label, i), BLOCK_BYTES) for i in range(NUM_BLOCKS)}


def store(stack: Stack, label: str) -> dict[StoreKey, bytes]:
    """New blocks, acknowledged by the pool."""
    made, tier = blocks(label), stack.tier()
    assert set(tier.write([summed(*block) for block in made.items()])) == {WriteStatus.STORED}
    tier.close()
    return made


def load(stack: Stack, made: dict[StoreKey, bytes]) -> list[bytes | None]:
    tier = stack.tier()
    found = read_blocks(tier, list(made), BLOCK_BYTES)
    tier.close()
    return found


def wait_until_on_disk(stack: Stack) -> None:
    """An acknowledgement means readable now; a moment later the block is on disk too."""
    poll(lambda: stack.metric("kvtier_pool_write_down_queue_bytes", tier="disk") == 0, "all written to disk")


def wait_until_in_redis(stack: Stack, num_blocks: int) -> None:
    poll(lambda: int(stack.redis("dbsize")) >= num_blocks, "all written to Redis")


def test_the_image_is_small_and_holds_no_more_than_the_pool_needs(image: str) -> None:
    require_small(image, MAX_IMAGE_BYTES)


def test_the_image_has_what_is_locked_and_says_what_it_is(image: str) -> None:
    """Versions as in the lock file, and no package that is not in it."""
    script = "import importlib.metadata as m; [print(d.name + '==' + d.version) for d in m.distributions(path=[PATH])]"
    path = docker("run", "--rm", "--entrypoint=python", image, "-c", "import numpy; print(numpy.__path__[0])")
    program = script.replace("PATH", repr(str(Path(path).parent)))
    there = docker("run", "--rm", "--network=none", "--entrypoint=python", image, "-c", program).lower().split()
    locked = re.findall(r"(?m)^\S+==[^ ;\\]+", (ROOT / "deploy" / "locks" / "pool.txt").read_text())
    assert {re.sub("[-_.]+", "-", line.split("==")[0]) for line in there} >= {"numpy", "kvtier", "grpcio"}
    unlocked = {line.replace("_", "-") for line in there} - set(locked)
    assert {line.split("==")[0] for line in unlocked} == {"kvtier"}
    labels = inspect(image)["Config"]["Labels"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.base.name"] == BASE_IMAGE


def test_nothing_starts_without_a_tenant(tmp_path: Path) -> None:
    """No token is built in, and the message names the variable and where to read on."""
    done = compose({}, "up", "-d", "--no-build", folder=tmp_path, check=False)
    assert done.returncode != 0
    assert "KVTIER_TOKEN_SHA256 is missing" in done.stderr
    assert "docs/deployment.md" in done.stderr


def test_it_is_ready_soon(stack: Stack) -> None:
    print(f"ready {stack.seconds_to_ready():.2f} s after the start of the container")
    assert stack.serves()


def test_grpc_serves_the_same_blocks(stack: Stack) -> None:
    made = store(stack, "over grpc")
    tier = stack.tier(f"grpc:{stack.grpc}")
    assert read_blocks(tier, list(made), BLOCK_BYTES) == list(made.values())
    tier.close()


def test_the_doctor_in_the_container_finds_a_pool_that_is_well(stack: Stack) -> None:
    said = stack.compose("exec", "-T", "pool", "kvtier", "doctor", "--config", "/etc/kvtier/kvtier.toml")
    assert "in use by process 1, which runs with this file" in " ".join(said.split())
    assert "\n0 problems, 0 warnings, " in said


def test_containers_may_do_little(stack: Stack) -> None:
    for service in ("pool", "redis"):
        name = stack.container(service)
        host = inspect(name)["HostConfig"]
        assert docker("exec", name, "sh", "-c", "id -u; id -g").split() == [UID, UID]
        assert host["ReadonlyRootfs"]
        assert host["CapDrop"] == ["ALL"]
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        assert host["Memory"] > 0
    published = inspect(stack.container("pool"))["NetworkSettings"]["Ports"]
    assert {binding["HostIp"] for bindings in published.values() for binding in bindings} == {"127.0.0.1"}
    assert list(inspect(stack.container("redis"))["NetworkSettings"]["Networks"]) == ["none"]


def test_a_killed_pool_has_its_blocks_on_disk(stack: Stack) -> None:
    made = store(stack, "pool killed")
    wait_until_on_disk(stack)
    stack.kill("pool")
    assert load(stack, made) == [None] * NUM_BLOCKS, "a dead pool is a pool that misses"
    stack.start("pool")
    assert load(stack, made) == list(made.values())
    assert stack.metric("kvtier_pool_read_blocks_total", source="disk") == NUM_BLOCKS


def test_a_pool_without_its_disk_has_its_blocks_in_redis(stack: Stack) -> None:
    made = store(stack, "disk lost")
    wait_until_in_redis(stack, NUM_BLOCKS)
    stack.compose("rm", "-s", "-f", "pool")
    docker("volume", "rm", f"{stack.project}_disk")
    stack.up()
    assert load(stack, made) == list(made.values())
    assert stack.metric("kvtier_pool_read_blocks_total", source="redis") == NUM_BLOCKS


def test_a_killed_redis_is_not_missed(stack: Stack) -> None:
    """Writes and reads go on; it comes back empty and fills again."""
    before = store(stack, "before")
    stack.kill("redis")
    during = store(stack, "during")
    for made in (before, during):
        assert load(stack, made) == list(made.values())
    assert stack.serves(), "a pool without Redis is well"
    stack.start("redis")
    assert stack.redis("dbsize") == "0"
    for made in (before, during):
        assert load(stack, made) == list(made.values())

    def a_block_arrives() -> bool:
        store(stack, f"after {time.monotonic()}")
        return int(stack.redis("dbsize")) > 0

    poll(a_block_arrives, "blocks reach the new Redis")


def test_a_frozen_redis_holds_nobody_up(stack: Stack) -> None:
    """Connections stay open and nobody answers: misses after a deadline, then a breaker that spares even that."""
    docker("pause", stack.container("redis"))
    try:
        made = store(stack, "frozen")
        assert load(stack, made) == list(made.values())
        assert stack.serves()
    finally:
        docker("unpause", stack.container("redis"))
    assert load(stack, made) == list(made.values())


def test_a_stop_writes_out_what_was_acknowledged(stack: Stack) -> None:
    made = store(stack, "stopped")
    started = time.monotonic()
    stack.compose("stop", "pool")
    print(f"stopped in {time.monotonic() - started:.1f} s")
    state = inspect(stack.container("pool"))["State"]
    assert state["ExitCode"] == 0, "ended by itself, before stop_grace_period"
    stack.start("pool")
    assert load(stack, made) == list(made.values())
    assert stack.metric("kvtier_pool_read_blocks_total", source="disk") == NUM_BLOCKS


def test_another_container_comes_in_over_the_unix_socket(stack: Stack, image: str) -> None:
    made = store(stack, "unix")
    key, payload = next(iter(made.items()))

    def read_as(user: str) -> str:
        options = ["--rm", "--network=none", f"--user={user}", f"--volume={stack.project}_socket:/run/kvtier"]
        arguments = ["unix:/run/kvtier/pool.sock", stack.token, key.hex(), str(BLOCK_BYTES)]
        return docker("run", *options, "--entrypoint=python", image, "-c", READER, *arguments)

    assert read_as(f"{UID}:{UID}") == sha256(payload)
    assert read_as("10002:10002") == "miss", "the socket is its user's alone"


def test_two_containers_exchange_a_block_through_shared_memory(stack: Stack, image: str) -> None:
    """Each maps the memory of the pool in a third one; all they share is the volume with the socket."""
    key = make_key(("two containers", time.time()), tenant=DEFAULT)
    options = ["--rm", "--network=none", "--read-only", "--cap-drop=ALL", f"--user={UID}:{UID}"]
    options += [f"--volume={stack.project}_socket:/run/kvtier", "--entrypoint=python"]
    for verb in ("write", "read"):
        said = docker("run", *options, image, "-c", MAPPING_CLIENT, verb, stack.token, key.hex())
        assert said.split() == ["shm", str(1 << 20), "unix", "0"]
