"""Ways to a Redis: its URL, Unix sockets, TLS, databases, Sentinel and Cluster, all with real servers."""

import contextlib
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from certificates import Authority
from free_port import free_port
from kvtier.errors import ConfigError
from kvtier.identity.keys import StoreKey
from kvtier.metrics import Metrics
from kvtier.net.address import Address
from kvtier.testing.contract import make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.redis.address import Kind, RedisAddress, Tls
from kvtier.tiers.redis.commands import key_name
from redis_rig import (
    MIB,
    RedisServer,
    all_errors,
    cluster_is_whole,
    connect,
    errors,
    poll,
    running_cluster,
    running_redis,
    server_binary,
)

BLOCK_BYTES = 64 * 1024
NUM_BLOCKS = 48
KEYS = [make_key(i) for i in range(NUM_BLOCKS)]
PAYLOADS = [make_payload(i, BLOCK_BYTES) for i in range(NUM_BLOCKS)]
ITEMS = [summed(*block) for block in zip(KEYS, PAYLOADS, strict=True)]


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://cache", RedisAddress(Kind.SINGLE, (Address(host="cache", port=6379),))),
        ("redis://[::1]:7000/3", RedisAddress(Kind.SINGLE, (Address(host="::1", port=7000),), db=3)),
        ("redis://[::1]", RedisAddress(Kind.SINGLE, (Address(host="::1", port=6379),))),
        ("unix:///run/redis.sock?db=2", RedisAddress(Kind.SINGLE, (Address(path="/run/redis.sock"),), db=2)),
        (
            "rediss://cache?ca=/etc/ca.pem&check_hostname=no",
            RedisAddress(
                Kind.SINGLE, (Address(host="cache", port=6379),), tls=Tls(ca="/etc/ca.pem", check_hostname=False)
            ),
        ),
        (
            "redis+sentinel://a,b:7000/main/1",
            RedisAddress(
                Kind.SENTINEL, (Address(host="a", port=26379), Address(host="b", port=7000)), db=1, service="main"
            ),
        ),
        (
            "rediss+cluster://a:1,b:2",
            RedisAddress(Kind.CLUSTER, (Address(host="a", port=1), Address(host="b", port=2)), tls=Tls()),
        ),
    ],
)
def test_urls(url: str, address: RedisAddress) -> None:
    assert RedisAddress.parse(url) == address


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("", "use one of redis"),
        ("http://cache", "use one of redis"),
        ("unix+cluster:///run/redis.sock", "use one of redis"),
        ("cache:6379", "use one of redis"),
        ("redis://", "lacks a host"),
        ("redis://a,b", "several servers"),
        ("redis://a,", "lacks a host|several servers"),
        ("redis://a:70000", "70000"),
        ("redis://[::1", "cannot be read"),
        ("redis://a/b", "use a number"),
        ("redis://a/1/2", "no meaning"),
        ("redis://a?timeout=1", "unknown option 'timeout'"),
        ("redis://a?ca=/x", "unknown option 'ca'"),
        ("rediss://a?cert=/x", "belong together"),
        ("rediss://a?check_hostname=maybe", "use yes or no"),
        ("redis+sentinel://a", "lacks the service's name"),
        ("redis+cluster://a/1", "no meaning"),
        ("unix://", "path must have"),
        ("redis://user:secret@a", "pass `username` and `password` apart"),
    ],
)
def test_urls_that_cannot_be(url: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as error:
        RedisAddress.parse(url)
    assert "secret" not in str(error.value)


def test_a_unix_socket_and_a_database(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with running_redis(tmp_path, "--unixsocket", str(path)) as server:
        tier, other = connect(f"unix://{path}?db=3"), connect(f"{server.url}/4")
        assert tier.write(ITEMS) == [WriteStatus.STORED] * NUM_BLOCKS
        assert read_blocks(tier, KEYS, BLOCK_BYTES) == PAYLOADS
        assert other.lookup(KEYS) == [Status.MISS] * NUM_BLOCKS
        assert [tier.usage().num_blocks, other.usage().num_blocks] == [NUM_BLOCKS, 0]
        for either in (tier, other):
            either.close()


def test_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("redis", "127.0.0.1")
    ca, cert, key = authority.certificate, pair.certificate, pair.key
    port = free_port()
    bare = subprocess.run([server_binary(), "--port", "0", "--tls-port", str(port)], capture_output=True, timeout=20)
    if re.search(rb"Bad directive|Failed finding TLS support", bare.stdout + bare.stderr):
        pytest.skip("this server was built without TLS")
    arguments = ["--tls-port", str(port), "--tls-cert-file", str(cert), "--tls-key-file", str(key)]
    with running_redis(tmp_path, *arguments, "--tls-ca-cert-file", str(ca), "--tls-auth-clients", "yes") as server:
        metrics = Metrics()
        url = f"rediss://127.0.0.1:{port}?ca={ca}&cert={cert}&key={key}"
        tier = connect(url, metrics=metrics)
        big = make_payload("big", 9 * MIB)
        assert tier.write([*ITEMS, summed(make_key("big"), big)]) == [WriteStatus.STORED] * (NUM_BLOCKS + 1)
        for _ in range(3):
            assert read_blocks(tier, KEYS, BLOCK_BYTES) == PAYLOADS
        assert read_blocks(tier, [make_key("big")], len(big)) == [big]
        assert all_errors(metrics) == []
        with server.stopped():
            hasty = connect(url, call_timeout_s=0.3)
            assert hasty.lookup(KEYS[:1]) == [Status.MISS]
            hasty.close()
        for stranger in (f"rediss://127.0.0.1:{port}", f"redis://127.0.0.1:{port}"):
            suspicious = connect(stranger, metrics=metrics)
            assert suspicious.lookup(KEYS[:1]) == [Status.MISS]
            suspicious.close()
        assert errors(metrics, "lookup", "UnavailableError") == 2
        tier.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture
def nodes(cluster: list[RedisServer]) -> list[RedisServer]:
    for node in cluster:
        with node.client() as client:
            client.flushall()
    return cluster


def num_keys(nodes: list[RedisServer]) -> list[int]:
    counts = []
    for node in nodes:
        with node.client() as client:
            counts.append(client.dbsize())
    return counts


def cluster_url(*nodes: RedisServer) -> str:
    return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in nodes)}"


@pytest.mark.parametrize("max_value_bytes", [4 * MIB, 20_000])
def test_a_cluster_shares_the_blocks(nodes: list[RedisServer], max_value_bytes: int) -> None:
    metrics = Metrics()
    tier = connect(cluster_url(nodes[0]), metrics=metrics, ttl_s=1000.0, max_value_bytes=max_value_bytes)
    assert tier.write(ITEMS) == [WriteStatus.STORED] * NUM_BLOCKS
    counts = num_keys(nodes)
    assert sum(counts) == NUM_BLOCKS * -(-BLOCK_BYTES // max_value_bytes)
    assert min(counts) >= NUM_BLOCKS // 12, "hashed by all of the name"
    order = [*KEYS[::-1], make_key("absent")]
    assert tier.lookup(order) == [Status.HIT] * NUM_BLOCKS + [Status.MISS]
    assert read_blocks(tier, order, BLOCK_BYTES) == [*PAYLOADS[::-1], None]
    assert tier.write(ITEMS) == [WriteStatus.EXISTS] * NUM_BLOCKS
    assert tier.usage().num_blocks == sum(counts)
    assert tier.discard(order) == NUM_BLOCKS
    assert num_keys(nodes) == [0, 0, 0]
    assert all_errors(metrics) == []
    tier.close()


def slot_of(nodes: list[RedisServer], name: bytes) -> tuple[int, RedisServer, RedisServer]:
    """The hash slot of a name, the node that serves it and one that does not."""
    with nodes[0].client() as client:
        slot = client.execute_command("CLUSTER KEYSLOT", name)
    for i, node in enumerate(nodes):
        with node.client() as client, contextlib.suppress(redis.ResponseError):
            client.exists(name)
            return slot, node, nodes[i - 1]
    raise AssertionError(f"nobody serves slot {slot}")


def node_id(node: RedisServer) -> str:
    with node.client() as client:
        return str(client.cluster("MYID").decode())


def set_slot(node: RedisServer, slot: int, *how: str) -> None:
    with node.client() as client:
        client.execute_command("CLUSTER SETSLOT", slot, *how)


def test_a_slot_that_moves_is_followed(nodes: list[RedisServer]) -> None:
    """While it moves, its keys miss; afterwards, they are found where it went, in the same call."""
    metrics = Metrics()
    tier = connect(cluster_url(*nodes), metrics=metrics)
    assert tier.write(ITEMS[1:]) == [WriteStatus.STORED] * (NUM_BLOCKS - 1)
    slot, source, target = slot_of(nodes, key_name(KEYS[0]))
    set_slot(target, slot, "IMPORTING", node_id(source))
    set_slot(source, slot, "MIGRATING", node_id(target))
    assert read_blocks(tier, KEYS, BLOCK_BYTES) == [None, *PAYLOADS[1:]]
    assert tier.write(ITEMS[:2]) == [WriteStatus.FAILED, WriteStatus.EXISTS]
    assert errors(metrics, "read", "Moved") == errors(metrics, "write", "Moved") == 1
    for node in (target, source, *nodes):
        set_slot(node, slot, "NODE", node_id(target))
    assert tier.write(ITEMS[:2]) == [WriteStatus.STORED, WriteStatus.EXISTS]
    assert read_blocks(tier, KEYS, BLOCK_BYTES) == PAYLOADS
    assert sorted(all_errors(metrics)) == ["read Moved", "write Moved"]
    tier.close()


def test_a_discard_during_a_move_is_made_up_for(nodes: list[RedisServer]) -> None:
    """A block that has moved already is hidden until its new server has heard of it."""
    metrics = Metrics()
    tier = connect(cluster_url(*nodes), metrics=metrics)
    assert tier.write(ITEMS[:2]) == [WriteStatus.STORED] * 2
    name = key_name(KEYS[0])
    slot, source, target = slot_of(nodes, name)
    set_slot(target, slot, "IMPORTING", node_id(source))
    set_slot(source, slot, "MIGRATING", node_id(target))
    with source.client() as client:
        client.migrate("127.0.0.1", target.port, name, 0, 5000)
    assert tier.discard(KEYS[:2]) == 1
    assert errors(metrics, "discard", "Moved") == 1
    for node in (target, source, *nodes):
        set_slot(node, slot, "NODE", node_id(target))
    assert sum(num_keys(nodes)) == 1
    assert tier.lookup(KEYS[:2]) == [Status.MISS] * 2
    assert sum(num_keys(nodes)) == 0
    assert tier.write(ITEMS[:2]) == [WriteStatus.STORED] * 2
    assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == PAYLOADS[:2]
    tier.close()


def test_the_url_of_one_server_leads_to_a_cluster(nodes: list[RedisServer], caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    tier = connect(nodes[0].url, metrics=metrics)
    statuses = tier.write(ITEMS)
    assert set(statuses) == {WriteStatus.FAILED}
    assert errors(metrics, "write", "UnavailableError") == 1
    tier.close()


def test_a_node_of_a_cluster_that_dies_takes_its_share_and_comes_back(tmp_path: Path) -> None:
    metrics = Metrics()
    with running_cluster(tmp_path) as nodes:
        tier = connect(cluster_url(*nodes), metrics=metrics)
        assert tier.write(ITEMS) == [WriteStatus.STORED] * NUM_BLOCKS
        nodes[0].kill()
        loaded = read_blocks(tier, KEYS, BLOCK_BYTES)
        assert all(block in (None, payload) for block, payload in zip(loaded, PAYLOADS, strict=True))
        assert 0 < sum(block is not None for block in loaded) < NUM_BLOCKS, "the others' share is there"
        assert errors(metrics, "read", "UnavailableError") == 1
        nodes[0].start()
        poll(lambda: all(cluster_is_whole(node, len(nodes)) for node in nodes))
        poll(lambda: WriteStatus.FAILED not in tier.write(ITEMS))
        assert read_blocks(tier, KEYS, BLOCK_BYTES) == PAYLOADS
        tier.close()


@pytest.mark.parametrize("how", ["killed", "hanging"])
def test_one_node_of_three_that_fails_costs_its_own_keys_only(tmp_path: Path, how: str) -> None:
    """Also when its breaker has opened: each node has its own."""
    metrics = Metrics()
    with running_cluster(tmp_path) as nodes:
        patient = connect(cluster_url(*nodes))
        assert patient.write(ITEMS) == [WriteStatus.STORED] * NUM_BLOCKS
        patient.close()
        with nodes[1].client() as client:
            lost = [serves(client, key) for key in KEYS]
        assert 0 < sum(lost) < NUM_BLOCKS
        breaker = CircuitBreaker(2, 1000.0)
        tier = connect(cluster_url(*nodes), metrics=metrics, breaker=breaker, call_timeout_s=1.0)
        poll(lambda: tier.lookup(KEYS) == [Status.HIT] * NUM_BLOCKS)
        with contextlib.ExitStack() as stack:
            nodes[1].kill() if how == "killed" else stack.enter_context(nodes[1].stopped())
            for _ in range(5):
                loaded = read_blocks(tier, KEYS, BLOCK_BYTES)
                assert loaded == [None if gone else payload for gone, payload in zip(lost, PAYLOADS, strict=True)]
            assert tier.lookup(KEYS) == [Status.MISS if gone else Status.HIT for gone in lost]
            assert tier.write(ITEMS) == [WriteStatus.FAILED if gone else WriteStatus.EXISTS for gone in lost]
            assert errors(metrics, "read", "UnavailableError") == 2
            assert errors(metrics, "read", "BreakerOpen") == 3
            assert tier.discard(KEYS) == NUM_BLOCKS - sum(lost)
        tier.close()


def serves(client: redis.Redis, key: StoreKey) -> bool:
    """Whether this node has the key's hash slot."""
    with contextlib.suppress(redis.ResponseError):
        client.exists(key_name(key))
        return True
    return False


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


def test_a_cluster_that_serves_no_slot_yet_is_a_miss(tmp_path: Path) -> None:
    with running_redis(tmp_path, "--cluster-enabled", "yes", "--cluster-port", str(free_port())) as node:
        metrics = Metrics()
        tier = connect(cluster_url(node), metrics=metrics)
        assert tier.lookup(KEYS[:2]) == [Status.MISS] * 2
        assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == [None] * 2
        assert tier.write(ITEMS[:2]) == [WriteStatus.FAILED] * 2
        assert tier.discard(KEYS[:2]) == 0
        assert all_errors(metrics)
        tier.close()
