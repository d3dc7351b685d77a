"""The pool's memory mapped by clients: real pools, real clients, and what either may do to the other."""

import contextlib
import errno
import gc
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvtier.tiers.pool.shared_memory.read
import kvtier.tiers.pool.shared_memory.write
from kvtier.codec.checksums import copy_checked
from kvtier.identity.keys import StoreKey
from kvtier.memory import memfd
from kvtier.metrics import Metrics
from kvtier.net.stream import PlainStream
from kvtier.protocol.block import Verb, encode_head
from kvtier.protocol.block_socket import FrameSocket
from kvtier.protocol.groups import group
from kvtier.testing.contract import make_key, make_payload, read_blocks
from kvtier.tiers.base import Status, Tier, WriteStatus
from kvtier.tiers.pool.local_transport import LocalTransport
from kvtier.tiers.pool.shared_memory.link import MemoryLink
from kvtier.tiers.pool.shared_memory.session import Request
from kvtier_pool.limits import PoolLimits
from kvtier_pool.service import Addresses
from pool_contract import OverPool, run_states
from pool_rig import (
    BLOCK_BYTES,
    BLUE,
    MIB,
    TOKENS,
    WAIT_S,
    connect,
    held_bytes,
    items,
    keys,
    payloads,
    running_pool,
    until,
)

pytestmark = pytest.mark.skipif(not memfd.available(), reason="shared memory needs Linux")
PAYLOADS = payloads(range(16))
KEYS = keys(range(16))


def moved(metrics: Metrics, path: str, op: str) -> float:
    return metrics.registry.get_sample_value("kvtier_path_bytes_total", {"path": path, "op": op}) or 0.0


@contextlib.contextmanager
def roomy_pool(capacity_bytes: int, folder: Path) -> Iterator[Addresses]:
    """A pool that lets clients hold more than a test has."""
    limits = PoolLimits(max_held_bytes=64 * MIB)
    with running_pool(capacity_bytes, listen=(f"unix:{folder}/pool.sock",), limits=limits) as pool:
        yield pool


class TestOverSharedMemory(OverPool):
    @contextlib.contextmanager
    def opened(self, capacity_bytes: int, folder: Path) -> Iterator[Tier]:
        with roomy_pool(capacity_bytes, folder) as pool, local(pool.block[0]) as tier:
            yield tier


class TestStates:
    def test_states(self, tmp_path: Path) -> None:
        with roomy_pool(2 * MIB, tmp_path) as pool:
            run_states(lambda: connect(pool.block[0], shared_memory=True))


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with running_pool(32 * MIB, listen=(f"unix:{tmp_path}/pool.sock",)) as pool:
        yield pool.block[0]


@contextlib.contextmanager
def local(address: str, metrics: Metrics | None = None, tenant: str = "red") -> Iterator[Tier]:
    tier = connect(address, tenant, shared_memory=True, metrics=metrics)
    try:
        yield tier
    finally:
        tier.close()


def test_blocks_pass_from_client_to_client_without_the_socket(address: str) -> None:
    metrics = Metrics()
    with local(address, metrics) as writer, local(address, metrics) as reader:
        assert writer.write(items(range(16))) == [WriteStatus.STORED] * 16
        assert writer.write(items(range(2))) == [WriteStatus.EXISTS] * 2
        assert read_blocks(reader, KEYS, BLOCK_BYTES) == PAYLOADS
        assert read_blocks(writer, [*KEYS[:2], make_key("absent")], BLOCK_BYTES) == [PAYLOADS[0], PAYLOADS[1], None]
        assert moved(metrics, "shm", "write") == 16 * BLOCK_BYTES
        assert moved(metrics, "shm", "read") == 18 * BLOCK_BYTES
        assert moved(metrics, "unix", "read") == moved(metrics, "unix", "write") == 0


def test_what_came_by_the_socket_is_read_from_memory_and_the_other_way_round(address: str) -> None:
    metrics = Metrics()
    over_socket = connect(address, metrics=metrics)
    with local(address, metrics) as mapped:
        over_socket.write(items(range(8)))
        mapped.write(items(range(8, 16)))
        assert read_blocks(mapped, KEYS, BLOCK_BYTES) == PAYLOADS
        assert read_blocks(over_socket, KEYS, BLOCK_BYTES) == PAYLOADS
        assert moved(metrics, "shm", "read") == moved(metrics, "unix", "read") == 16 * BLOCK_BYTES
    over_socket.close()


def test_a_block_that_is_only_on_disk_comes_by_the_socket_once(tmp_path: Path) -> None:
    metrics = Metrics()
    settings = {"disk_dir": tmp_path / "disk", "disk_bytes": 64 * MIB, "disk_reserve_bytes": 0}
    listen = (f"unix:{tmp_path}/pool.sock",)
    with running_pool(32 * MIB, listen=listen, **settings) as pool, local(pool.block[0]) as tier:
        tier.write(items(range(4)))
    with running_pool(32 * MIB, listen=listen, **settings) as pool, local(pool.block[0], metrics) as tier:
        for _ in range(2):
            assert read_blocks(tier, KEYS[:4], BLOCK_BYTES) == [PAYLOADS[i] for i in range(4)]
        assert moved(metrics, "unix", "read") == moved(metrics, "shm", "read") == 4 * BLOCK_BYTES


def test_tenants_never_meet(address: str) -> None:
    with local(address) as red, local(address, tenant="blue") as blue:
        red.write(items(range(4)))
        blue_keys = [make_key(i, tenant=BLUE) for i in range(4)]
        assert blue.lookup(blue_keys) == [Status.MISS] * 4
        assert read_blocks(blue, blue_keys, BLOCK_BYTES) == [None] * 4


def test_a_wrong_checksum_is_a_miss_is_dropped_and_heals(address: str) -> None:
    """A client whose memory is broken, or that wrote to a slot after it had committed it."""
    metrics = Metrics()
    with local(address) as broken, local(address, metrics) as reader:
        wrong = [(key, payload, checksum ^ 1) for key, payload, checksum in items(range(2))]
        assert broken.write(wrong) == [WriteStatus.STORED] * 2
        assert read_blocks(reader, KEYS[:2], BLOCK_BYTES) == [None, None]
        assert metrics.registry.get_sample_value("kvtier_corrupt_blocks_total", {"tier": "pool"}) == 2
        assert reader.lookup(KEYS[:2]) == [Status.MISS] * 2
        assert reader.write(items(range(2))) == [WriteStatus.STORED] * 2
        assert read_blocks(reader, KEYS[:2], BLOCK_BYTES) == [PAYLOADS[0], PAYLOADS[1]]


def test_a_slot_that_changed_hands_during_the_copy_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader stalls past its lease; its slot is taken by another block meanwhile. The socket has the truth."""
    metrics = Metrics()
    limits = PoolLimits(lease_s=0.3)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(running_pool(4 * MIB, listen=(f"unix:{tmp_path}/pool.sock",), limits=limits))
        reader, writer = (stack.enter_context(local(pool.block[0], m)) for m in (metrics, None))
        writer.write(items(range(4)))
        stalled = threading.Event()

        def stall(key: StoreKey, into: memoryview, payload: memoryview) -> int:
            if not stalled.is_set():
                stalled.set()
                until(lambda: held_bytes(pool) == 0)  # the lease is over, and the tier has seen it
                assert writer.write(items(range(100, 300))).count(WriteStatus.STORED) >= 100
            return copy_checked(key, into, payload)

        monkeypatch.setattr(kvtier.tiers.pool.shared_memory.read, "copy_checked", stall)
        assert read_blocks(reader, KEYS[:4], BLOCK_BYTES) == [None] * 4
        assert moved(metrics, "shm", "read") == 0
        monkeypatch.undo()
        assert read_blocks(reader, [make_key(299)], BLOCK_BYTES) == [make_payload(299, BLOCK_BYTES)]


def test_memory_that_cannot_be_mapped_leaves_the_socket(
    address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when this process may have no more memory maps; the pool in the same process must not feel it."""

    def refuse(descriptor: int, nbytes: int, *, writable: bool) -> memoryview:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    metrics = Metrics()
    with local(address) as writer, local(address, metrics) as reader:
        writer.write(items(range(4)))
        monkeypatch.setattr(memfd, "map_descriptor", refuse)
        assert read_blocks(reader, KEYS[:4], BLOCK_BYTES) == [PAYLOADS[i] for i in range(4)]
        assert moved(metrics, "unix", "read") == 4 * BLOCK_BYTES
        assert "its socket for" in caplog.text


def test_a_pool_that_does_not_share_is_read_over_its_socket(tmp_path: Path) -> None:
    metrics = Metrics()
    listen = (f"unix:{tmp_path}/pool.sock",)
    with running_pool(32 * MIB, listen=listen, shared_memory=False) as pool, local(pool.block[0], metrics) as tier:
        tier.write(items(range(4)))
        assert read_blocks(tier, KEYS[:4], BLOCK_BYTES) == [PAYLOADS[i] for i in range(4)]
        assert moved(metrics, "unix", "read") == 4 * BLOCK_BYTES
        assert moved(metrics, "shm", "read") == 0


def test_a_payload_that_cannot_be_copied_leaves_nothing_behind(address: str) -> None:
    with local(address) as tier:
        strided = memoryview(bytes(2 * BLOCK_BYTES))[::2]
        with pytest.raises((BufferError, ValueError)):
            tier.write([*items(range(1)), (KEYS[1], strided, 0)])
        until(lambda: tier.lookup(KEYS[:2]) == [Status.MISS] * 2)  # what is given back is not answered
        assert tier.write(items(range(2))) == [WriteStatus.STORED] * 2


def test_more_threads_than_may_hold_blocks_write_all_the_same(tmp_path: Path) -> None:
    listen = (f"unix:{tmp_path}/pool.sock",)
    with running_pool(64 * MIB, listen=listen) as pool, local(pool.block[0]) as tier:
        batches = [items((worker, i) for i in range(16)) for worker in range(16)]
        with ThreadPoolExecutor(16) as executor:
            assert {status for statuses in executor.map(tier.write, batches) for status in statuses} == {
                WriteStatus.STORED
            }


def test_one_client_cannot_hold_all_memory(tmp_path: Path) -> None:
    limits = PoolLimits(max_held_bytes=4 * BLOCK_BYTES)
    listen = (f"unix:{tmp_path}/pool.sock",)
    with running_pool(32 * MIB, listen=listen, limits=limits) as pool, local(pool.block[0]) as tier:
        assert tier.write(items(range(8))) == [WriteStatus.STORED] * 8  # in parts
        memory = mapped(tier).memory
        deadline = time.monotonic() + WAIT_S
        sizes = [BLOCK_BYTES] * 4
        lease, num_held = memory.acquire(KEYS[:4], sizes, deadline)
        assert num_held == 4
        assert memory.acquire(KEYS[:1], sizes[:1], deadline) == (0, 0)
        assert tier.write(items(range(10, 11))) == [WriteStatus.STORED]  # writes are held by another connection
        assert read_blocks(tier, KEYS[:8], BLOCK_BYTES) == [PAYLOADS[i] for i in range(8)]  # over the socket
        memory.release(lease, deadline)
        assert memory.acquire(KEYS[:1], sizes[:1], deadline)[1] == 1


def test_a_small_read_is_asked_for_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little the tenant may hold: each message waits for the pool's threads."""
    limits = PoolLimits(max_held_bytes=32 * BLOCK_BYTES)
    asked: list[int] = []
    send = MemoryLink.send

    def noting(self: MemoryLink, verb: Verb, fields: Mapping[str, object], num: int, deadline: float) -> Request:
        if verb is Verb.ACQUIRE:
            asked.append(num)
        return send(self, verb, fields, num, deadline)

    monkeypatch.setattr(MemoryLink, "send", noting)
    listen = (f"unix:{tmp_path}/pool.sock",)
    with running_pool(32 * MIB, listen=listen, limits=limits) as pool, local(pool.block[0]) as tier:
        assert tier.write(items(range(8))) == [WriteStatus.STORED] * 8
        assert read_blocks(tier, KEYS[:4], BLOCK_BYTES) == [PAYLOADS[i] for i in range(4)]
        assert asked == [4]
        asked.clear()
        assert read_blocks(tier, KEYS[:8], BLOCK_BYTES) == [PAYLOADS[i] for i in range(8)]
        assert asked == [4, 4], "an eighth of what it may hold"


def mapped(tier: Tier) -> LocalTransport:
    transport = tier._transport  # type: ignore[attr-defined]
    assert isinstance(transport, LocalTransport)
    return transport


def test_pipelined_requests_are_answered_in_order_with_their_ids(address: str) -> None:
    with local(address) as tier:
        tier.write(items(range(4)))
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(address.removeprefix("unix:"))
            hello = {"id": 1, "verb": "hello", "versions": [1], "token": TOKENS["red"], "client": "pipelined"}
            acquire = {"verb": "acquire", "groups": group(KEYS[:4], [BLOCK_BYTES] * 4).fields}
            sent = encode_head(hello)
            for i in range(2, 100):
                sent += encode_head({"id": 2 * i, **acquire})
                sent += encode_head({"id": 2 * i + 1, "verb": "release", "lease": i - 1})
            raw.sendall(sent)
            connection = FrameSocket(PlainStream(raw))
            deadline = time.monotonic() + WAIT_S
            assert connection.receive_head(deadline=deadline)[0].number("id") == 1
            for i in range(2, 100):
                answer, _ = connection.receive_head(deadline=deadline)
                assert (answer.number("id"), answer.number("lease"), answer.data("statuses")) == (
                    2 * i,
                    i - 1,
                    b"\1" * 4,
                )


def test_slabs_are_looked_through_while_others_map_some() -> None:
    """A garbage collection may give other threads their turn at any allocation."""
    slabs = {number: SimpleNamespace(in_use=True) for number in range(5000)}
    link, session = SimpleNamespace(fetch=lambda *_: None), SimpleNamespace(slabs=slabs)

    def map_one(*_: object) -> None:
        slabs[len(slabs)] = SimpleNamespace(in_use=True)

    thresholds = gc.get_threshold()
    gc.callbacks.append(map_one)
    try:
        gc.set_threshold(50)
        MemoryLink.map(link, session, {-1}, 0.0)  # type: ignore[arg-type] # what it uses of both
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(map_one)
    assert len(slabs) > 5000, "some were mapped meanwhile"
