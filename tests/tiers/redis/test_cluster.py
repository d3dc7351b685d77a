"""A Redis Cluster of real servers: blocks are shared, slots move, and nodes fail."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from free_port import free_port
from kvtier.identity.keys import StoreKey
from kvtier.metrics import Metrics
from kvtier.testing.contract import make_key, read_blocks
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.redis.commands import key_name
from redis_cluster_rig import BLOCK_BYTES, ITEMS, KEYS, NUM_BLOCKS, PAYLOADS, cluster_url
from redis_rig import (
    MIB,
    RedisServer,
    all_errors,
    cluster_arguments,
    cluster_is_whole,
    connect,
    errors,
    poll,
    running_cluster,
    running_redis,
)


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


def test_a_node_of_a_cluster_that_is_taken_for_a_server_is_named(nodes: list[RedisServer]) -> None:
    metrics = Metrics()
    tier = connect(nodes[0].url, metrics=metrics)
    assert tier.lookup(KEYS) == [Status.MISS] * NUM_BLOCKS
    assert errors(metrics, "lookup", "UnavailableError") == 1, "whatever the server calls it"
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


def test_a_node_whose_replica_has_taken_over_is_left_alone_no_more(tmp_path: Path) -> None:
    """It is gone from the map, and with it its breaker, which nothing would ever close."""
    metrics = Metrics()
    (tmp_path / "replica").mkdir()
    with (
        running_cluster(tmp_path, node_timeout_ms=1000) as nodes,
        running_redis(tmp_path / "replica", *cluster_arguments(1000)) as replica,
    ):
        with replica.client() as client:
            client.execute_command("CLUSTER MEET", "127.0.0.1", nodes[0].port, int(nodes[0].arguments[3]))
            poll(lambda: all(cluster_is_whole(node, 4) for node in (*nodes, replica)))
            client.execute_command("CLUSTER REPLICATE", node_id(nodes[0]))
        tier = connect(cluster_url(*nodes), metrics=metrics, breaker=CircuitBreaker(1, 0.2), call_timeout_s=2.0)
        assert tier.write(ITEMS) == [WriteStatus.STORED] * NUM_BLOCKS
        with nodes[0].client() as client:
            assert client.wait(1, 10_000) == 1, "the replica has all of it"
        assert tier.problem() is None
        nodes[0].kill()
        assert None in read_blocks(tier, KEYS, BLOCK_BYTES)
        assert "a server is left alone" in str(tier.problem())
        assert open_breakers(metrics) == 1
        poll(lambda: read_blocks(tier, KEYS, BLOCK_BYTES) == PAYLOADS)
        assert tier.problem() is None
        assert open_breakers(metrics) == 0
        tier.close()


def test_a_cluster_that_was_away_from_the_start_is_left_alone_no_more_once_it_is_there(tmp_path: Path) -> None:
    """Nobody is asked for the map again when it is known, and the breaker of the search must be closed all the same."""
    metrics = Metrics()
    with running_cluster(tmp_path) as nodes:
        tier = connect(cluster_url(nodes[0]), metrics=metrics, breaker=CircuitBreaker(1, 0.05), call_timeout_s=0.2)
        with nodes[0].stopped():
            assert tier.lookup(KEYS) == [Status.MISS] * NUM_BLOCKS
            assert "a server is left alone" in str(tier.problem())
            assert open_breakers(metrics) == 1
            poll(lambda: errors(metrics, "probe", "UnavailableError") >= 2)
            assert tier.write(ITEMS) == [WriteStatus.FAILED] * NUM_BLOCKS
            assert errors(metrics, "write", "UnavailableError") == 0, "no call waits for it"
        poll(lambda: tier.write(ITEMS) == [WriteStatus.STORED] * NUM_BLOCKS)
        assert tier.problem() is None
        assert open_breakers(metrics) == 0
        tier.close()


def open_breakers(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("kvtier_open_breakers", {"tier": "redis"})


def serves(client: redis.Redis, key: StoreKey) -> bool:
    """Whether this node has the key's hash slot."""
    with contextlib.suppress(redis.ResponseError):
        client.exists(key_name(key))
        return True
    return False


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
