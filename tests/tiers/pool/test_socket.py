"""The block protocol between a real client and a real pool, in this process and in its own."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from kvtier.codec.stored_form import encode_header
from kvtier.errors import UnavailableError
from kvtier.identity.keys import NamespaceId
from kvtier.metrics import Metrics
from kvtier.protocol.block import Verb, encode_head
from kvtier.testing.contract import make_key, make_payload, read_blocks, summed
from kvtier.tiers.base import Status, Tier, WriteStatus
from kvtier.tiers.pool.socket_transport import SocketTransport
from kvtier_pool.limits import PoolLimits
from pool_contract import OverPool, run_states
from pool_rig import (
    BLOCK_BYTES,
    BLUE,
    MIB,
    RED,
    TOKENS,
    WAIT_S,
    connect,
    dial,
    failed_calls,
    items,
    keys,
    payloads,
    pool_process,
    running_pool,
    until,
)
from suspending import suspended
from transfers_rig import kill_during_transfers

KEYS, PAYLOADS = keys(range(16)), payloads(range(16))


class TestOverTcp(OverPool):
    @contextlib.contextmanager
    def opened(self, capacity_bytes: int, folder: Path) -> Iterator[Tier]:
        with running_pool(capacity_bytes) as pool, contextlib.closing(connect(pool.block[0])) as tier:
            yield tier


class TestOverUnixSocket(OverPool):
    @contextlib.contextmanager
    def opened(self, capacity_bytes: int, folder: Path) -> Iterator[Tier]:
        listen = (f"unix:{folder}/pool.sock",)
        with running_pool(capacity_bytes, listen=listen) as pool, contextlib.closing(connect(pool.block[0])) as tier:
            yield tier


class TestStates:
    def test_states(self) -> None:
        with running_pool(2 * MIB) as pool:
            run_states(lambda: connect(pool.block[0]))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A pool for tests that leave it as it is; each uses labels of its own."""
    limits = PoolLimits(max_batch_blocks=4096, max_batch_bytes=64 * MIB, max_block_bytes=12 * MIB)
    with running_pool(128 * MIB, limits=limits) as pool:
        yield pool.block[0]


@pytest.mark.parametrize("nbytes", [1, MIB, 9 * MIB + 5])
def test_blocks_of_any_size(address: str, nbytes: int) -> None:
    tier = connect(address)
    batch = [summed(make_key(("size", nbytes, i)), make_payload((nbytes, i), nbytes)) for i in range(3)]
    assert tier.write(batch) == [WriteStatus.STORED] * 3
    assert read_blocks(tier, [key for key, _, _ in batch], nbytes) == [payload for _, payload, _ in batch]
    tier.close()


def test_a_block_of_no_bytes_is_refused(address: str) -> None:
    tier = connect(address)
    assert tier.write([summed(make_key("nothing"), b"")]) == [WriteStatus.FAILED]
    tier.close()


def test_what_the_pool_has_is_not_sent_again(address: str) -> None:
    metrics = Metrics()
    tier = connect(address, metrics=metrics)
    batch = [summed(make_key(("again", i)), make_payload(i, MIB)) for i in range(4)]
    assert tier.write(batch[1:3]) == [WriteStatus.STORED] * 2
    assert tier.write(batch) == [WriteStatus.STORED, WriteStatus.EXISTS, WriteStatus.EXISTS, WriteStatus.STORED]
    assert tier.write(batch) == [WriteStatus.EXISTS] * 4
    sent = metrics.registry.get_sample_value("kvtier_path_bytes_total", {"path": "tcp", "op": "write"})
    assert sent == 4 * MIB
    tier.close()


def test_more_blocks_than_one_system_call_takes(address: str) -> None:
    tier = connect(address)
    batch = [summed(make_key(("tiny", i)), make_payload(i, 100)) for i in range(3000)]
    assert tier.write(batch) == [WriteStatus.STORED] * 3000
    keys = [key for key, _, _ in batch] + [make_key("absent")]
    assert tier.lookup(keys) == [Status.HIT] * 3000 + [Status.MISS]
    assert read_blocks(tier, keys, 100) == [payload for _, payload, _ in batch] + [None]
    tier.close()


def test_namespaces_and_sizes_in_any_order(address: str) -> None:
    """Answers come group by group, results in the order of the batch."""
    tier = connect(address)
    spaces = [NamespaceId(bytes([i]) * 16) for i in range(3)]
    batch = [summed(make_key(i, namespace=spaces[i % 3]), make_payload(i, 100 + i % 2)) for i in range(24)]
    assert tier.write(batch) == [WriteStatus.STORED] * 24
    assert tier.discard([batch[4][0]]) == 1
    assert tier.lookup([key for key, _, _ in batch]) == [Status.MISS if i == 4 else Status.HIT for i in range(24)]
    into = [memoryview(bytearray(len(payload))) for _, payload, _ in batch]
    statuses = tier.read([key for key, _, _ in batch], into)
    assert statuses == [Status.MISS if i == 4 else Status.HIT for i in range(24)]
    assert all(into[i] == payload for i, (_, payload, _) in enumerate(batch) if i != 4)
    tier.close()


def test_what_the_pool_does_not_take_is_read_past(address: str) -> None:
    """Existing, overlong, damaged, foreign and good blocks in one request: the good ones are there after."""
    tier, connection = connect(address), dial(address)
    payload, huge = PAYLOADS[0], bytes(12 * MIB + 1)
    known, good, last, flipped = (make_key(("mix", i)) for i in range(4))
    assert tier.write([summed(known, payload)]) == [WriteStatus.STORED]
    blocks = [
        (encode_header(known, payload), payload),
        (encode_header(good, payload), payload),
        (encode_header(make_key("huge"), huge), huge),
        (encode_header(flipped, payload), b"?" + payload[1:]),
        (encode_header(make_key("foreign", tenant=BLUE), payload), payload),
        (encode_header(good, payload), payload),
        (encode_header(last, payload), payload),
    ]
    headers = b"".join(header for header, _ in blocks)
    deadline = time.monotonic() + WAIT_S
    answer = connection.ask(Verb.WRITE, {"headers": headers}, [body for _, body in blocks], deadline)
    names = [status.name for status in answer.members("statuses", WriteStatus)]
    assert names == ["EXISTS", "STORED", "FULL", "FAILED", "FAILED", "EXISTS", "STORED"]
    assert tier.lookup([known, good, last, flipped]) == [Status.HIT] * 3 + [Status.MISS]
    assert connection.ask(Verb.USAGE, {}, (), deadline).maps("tiers"), "the connection goes on"
    connection.close()
    tier.close()


def test_a_client_that_dies_in_the_middle_of_a_write_leaves_nothing() -> None:
    """More broken writes than memory has slots: were one leaked each, the last write would hear FULL."""
    with running_pool(MIB) as pool:
        tier = connect(pool.block[0])
        tier.usage()
        before = psutil.Process().num_fds()
        for i in range(20):
            key, payload = make_key(("torn", i)), PAYLOADS[0]
            with socket.create_connection(("127.0.0.1", int(pool.block[0].rpartition(":")[2]))) as client:
                token = {"id": 1, "verb": "hello", "versions": [1], "token": TOKENS["red"], "client": "torn"}
                write = {"id": 2, "verb": "write", "headers": encode_header(key, payload)}
                client.sendall(encode_head(token) + encode_head(write, BLOCK_BYTES) + payload[: BLOCK_BYTES // 2])
                until(lambda key=key: tier.lookup([key]) == [Status.PENDING])
            until(lambda key=key: tier.lookup([key]) == [Status.MISS])
        assert tier.write(items(range(8))) == [WriteStatus.STORED] * 8
        until(lambda: psutil.Process().num_fds() == before)
        tier.close()


def test_a_read_that_is_given_up_leaves_nothing_to_the_next(address: str) -> None:
    transport = SocketTransport(address, TOKENS["red"], RED)
    batch = [summed(make_key(("given up", i)), make_payload(i, 3 * MIB)) for i in range(6)]
    assert transport.write(batch, WAIT_S) == [WriteStatus.STORED] * 6
    into = [memoryview(bytearray(3 * MIB)) for _ in batch]
    keys = [key for key, _, _ in batch]
    blocks = transport.read(keys, into, WAIT_S)
    assert next(blocks)[0] == 0
    blocks.close()  # type: ignore[attr-defined]
    untouched = bytes(into[5])
    assert [i for i, _ in transport.read(keys[:2], into[:2], WAIT_S)] == [0, 1]
    assert into[1] == batch[1][1]
    assert into[5] == untouched == bytes(3 * MIB)
    transport.close()


def test_calls_of_many_threads_have_a_connection_each(address: str) -> None:
    tier = connect(address)
    batch = [summed(make_key(("threads", i)), PAYLOADS[i]) for i in range(16)]
    tier.write(batch)
    start = threading.Barrier(12)

    def read(worker: int) -> None:
        start.wait(WAIT_S)
        for _ in range(10):
            order = batch[worker:] + batch[:worker]
            assert read_blocks(tier, [key for key, _, _ in order], BLOCK_BYTES) == [payload for _, payload, _ in order]

    with ThreadPoolExecutor(12) as executor:
        for result in [executor.submit(read, worker) for worker in range(12)]:
            result.result(WAIT_S)
    tier.close()


@pytest.mark.parametrize("verb", ["read", "write"])
def test_kill_minus_9_during_transfers_heals_by_itself(verb: str) -> None:
    with pool_process() as pool:
        metrics = Metrics()
        tier = connect(pool.block, call_timeout_s=5.0, metrics=metrics)
        assert tier.write(items(range(16))) == [WriteStatus.STORED] * 16
        kill_during_transfers(tier, verb, items(range(16)), pool.process.kill)
        assert failed_calls(metrics, op=verb, error="UnavailableError") > 0
        again = pool.again()
        try:
            until(lambda: tier.write(items(range(1))) == [WriteStatus.STORED])
            assert read_blocks(tier, KEYS[:1], BLOCK_BYTES) == [PAYLOADS[0]]
        finally:
            again.kill()
        tier.close()


def test_a_restart_between_two_calls_goes_unnoticed(tmp_path: Path) -> None:
    """Connections kept from before are found closed, and the call is made again on a fresh one."""
    metrics = Metrics()
    with pool_process(listen=f"unix:{tmp_path}/pool.sock") as pool:
        tier = connect(pool.block, metrics=metrics)
        assert tier.write(items(range(2))) == [WriteStatus.STORED] * 2
        pool.kill()
        again = pool.again()
        try:
            assert tier.write(items(range(2))) == [WriteStatus.STORED] * 2
            assert read_blocks(tier, KEYS[:2], BLOCK_BYTES) == PAYLOADS[:2]
            assert not [s for family in metrics.registry.collect() for s in family.samples if "io_errors" in s.name]
        finally:
            again.kill()
        tier.close()


def test_a_stopped_pool_costs_a_deadline_and_writes_into_nobody_afterwards() -> None:
    """SIGSTOP in the middle of a read: the buffers are the caller's again, whatever the pool still sends."""
    with pool_process(memory="256MiB") as pool:
        metrics = Metrics()
        tier = connect(pool.block, call_timeout_s=0.7, metrics=metrics)
        patient = connect(pool.block)
        keys = [make_key(("big", i)) for i in range(64)]
        payload = make_payload("big", MIB)
        assert patient.write([summed(key, payload) for key in keys]) == [WriteStatus.STORED] * 64
        into = [memoryview(bytearray(MIB)) for _ in keys]
        transport = SocketTransport(pool.block, TOKENS["red"], RED)
        blocks = transport.read(keys, into, 3.0)
        next(blocks)
        with suspended(pool.process.pid):
            with pytest.raises(UnavailableError, match="in time"):
                list(blocks)
            assert into[63] == bytes(MIB), "stopped in the middle"
            before = [bytes(buffer) for buffer in into]
            assert read_blocks(tier, KEYS[:1], BLOCK_BYTES) == [None]
            assert tier.write([summed(key, payload) for key in keys]) == [WriteStatus.FAILED] * 64
            assert failed_calls(metrics, op="read", error="UnavailableError") == 1
            assert failed_calls(metrics, op="write", error="UnavailableError") == 1
        until(lambda: read_blocks(tier, keys[:2], MIB) == [payload] * 2)
        assert [bytes(buffer) for buffer in into] == before
        tier.close()
        patient.close()
        transport.close()
