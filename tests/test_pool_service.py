"""The pool service and its client, over real sockets: one in this process, others in their own."""

import contextlib
import errno
import itertools
import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import pool_rig
from kvtier.cli import main
from kvtier.codec import encode_header
from kvtier.errors import ConfigError, InvalidInputError
from kvtier.keys import StoreKey
from kvtier.metrics import Metrics
from kvtier.testing.contract import MakeTier, TierContract, make_key, make_payload, read_blocks, tier_state_machine
from kvtier.tiers import disk
from kvtier.tiers.base import Status, Tier, Usage, WriteStatus
from kvtier.tiers.breaker import CircuitBreaker
from kvtier.tiers.disk_log import trouble
from kvtier.tiers.files import OsFiles
from kvtier.tiers.pool import grpc_transport
from kvtier.tiers.pool.grpc_transport import GrpcTransport
from kvtier.tiers.pool.tier import PoolTier
from kvtier.wire import pool_pb2
from kvtier.wire.frames import encode_blocks
from kvtier_pool.service import PoolService
from kvtier_pool.settings import PoolLimits, PoolSettings
from pool_rig import BLOCK_BYTES, BLUE, MIB, RED, TENANTS, TOKENS, WAIT_S, PoolProcess, pool_process

SERVICE = "/kvtier.pool.v1.Pool/"
PAYLOADS = {i: make_payload(i, BLOCK_BYTES) for i in range(16)}


def items(count: int) -> list[tuple[StoreKey, bytes]]:
    return [(make_key(i), PAYLOADS[i]) for i in range(count)]


def connect(address: str, tenant: str = "red", **options: Any) -> PoolTier:
    return pool_rig.connect(f"grpc:{address}", tenant, **options)


@contextlib.contextmanager
def running(memory_bytes: int = 16 * MIB, **settings: object) -> Iterator[str]:
    """A service in this process; its gRPC address."""
    with pool_rig.running_pool(memory_bytes, **settings) as addresses:
        yield addresses.grpc[0]


class TestPoolTier(TierContract):
    """Every test gets a pool of its own."""

    tenants = (RED, RED)

    @pytest.fixture
    def make_tier(self) -> Iterator[MakeTier]:
        with contextlib.ExitStack() as stack:

            def make(capacity_bytes: int) -> Tier:
                tier = connect(stack.enter_context(running(capacity_bytes)))
                stack.callback(tier.close)
                return tier

            yield make


class TestPoolTierStates:
    def test_states(self) -> None:
        with running(2 * MIB) as address:
            machine = tier_state_machine(
                lambda capacity_bytes: connect(address), payload_bytes=128 * 1024, max_examples=20
            )
            machine.TestCase().runTest()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A service for tests that leave it as it is; each uses labels of its own."""
    limits = PoolLimits(max_batch_blocks=64, max_batch_bytes=4 * MIB, max_block_bytes=3 * MIB, max_event_streams=2)
    with running(limits=limits) as address:
        yield address


@pytest.fixture
def channel(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address) as channel:
        yield channel


def call(channel: grpc.Channel, verb: str, message: bytes, token: str | None = "Bearer " + TOKENS["red"]) -> bytes:
    metadata = (("authorization", token),) if token is not None else ()
    return channel.unary_unary(SERVICE + verb)(message, metadata=metadata, timeout=WAIT_S)


def code_of(error: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    assert isinstance(error.value, grpc.Call)
    return error.value.code()


def test_tenants_never_meet(address: str) -> None:
    red, blue = connect(address), connect(address, "blue")
    key_of_blue = make_key("meet", tenant=BLUE)
    assert red.write([(make_key("meet"), PAYLOADS[0])]) == [WriteStatus.STORED]
    assert blue.lookup([key_of_blue]) == [Status.MISS]
    assert read_blocks(blue, [key_of_blue], BLOCK_BYTES) == [None]
    assert blue.discard([key_of_blue]) == 0
    assert blue.usage().num_blocks == 0
    assert blue.write([(key_of_blue, PAYLOADS[1])]) == [WriteStatus.STORED]
    assert read_blocks(red, [make_key("meet")], BLOCK_BYTES) == [PAYLOADS[0]]
    with pytest.raises(InvalidInputError, match="another tenant"):
        red.lookup([key_of_blue])
    red.close()
    blue.close()


def test_red_credentials_do_not_reach_blue_whatever_the_keys_say(address: str) -> None:
    """A client that lies about its tenant: reads miss, and a header in blue's name is refused."""
    key = make_key("lie", tenant=BLUE)
    liar = PoolTier(GrpcTransport(address, TOKENS["red"]), BLUE, metrics=Metrics(), breaker=CircuitBreaker(100, 1.0))
    honest = connect(address, "blue")
    assert liar.write([(key, PAYLOADS[0])]) == [WriteStatus.FAILED]
    assert honest.lookup([key]) == [Status.MISS]
    honest.write([(key, PAYLOADS[1])])
    assert liar.lookup([key]) == [Status.MISS]
    assert read_blocks(liar, [key], BLOCK_BYTES) == [None]
    liar.close()
    honest.close()


@pytest.mark.parametrize(
    "token", [None, "Bearer nobody", "Basic " + TOKENS["red"], TOKENS["red"], "Bearer ", "Bearer " + "x" * 2000]
)
@pytest.mark.parametrize("verb", ["Lookup", "Discard", "Usage", "Read", "Write", "Events", "Pin", "Unpin"])
def test_no_token_no_service(channel: grpc.Channel, verb: str, token: str | None) -> None:
    with pytest.raises(grpc.RpcError) as error:
        call(channel, verb, b"", token)
    assert code_of(error) is grpc.StatusCode.UNAUTHENTICATED


def test_a_refused_token_is_a_miss_a_counter_and_one_line(address: str, caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    tier = connect(address, token="wrong", metrics=metrics, breaker=CircuitBreaker(3, 1000.0))
    for _ in range(10):
        assert tier.lookup([make_key(0)]) == [Status.MISS]
        assert tier.write(items(1)) == [WriteStatus.FAILED]
    assert len([r for r in caplog.records if "UNAUTHENTICATED" in r.message]) == 1
    assert sample(metrics, op="lookup", error="UnauthenticatedError") == 2
    assert sample(metrics, op="lookup", error="BreakerOpen") == 8
    tier.close()


def sample(metrics: Metrics, **labels: str) -> float:
    return metrics.registry.get_sample_value("kvtier_io_errors_total", {"tier": "pool"} | labels) or 0.0


def lookup_request(hashes: int) -> bytes:
    keys = pool_pb2.Keys(namespace_id=bytes(16), hashes=bytes(32 * hashes))
    return pool_pb2.LookupRequest(groups=[keys]).SerializeToString()


def read_request(hashes: int, payload_bytes: int) -> bytes:
    keys = pool_pb2.Keys(namespace_id=bytes(16), hashes=bytes(32 * hashes))
    group = pool_pb2.ReadGroup(keys=keys, payload_bytes=payload_bytes)
    return pool_pb2.ReadRequest(groups=[group]).SerializeToString()


def pin_request(hashes: int, ttl_ms: int = 1000) -> bytes:
    keys = pool_pb2.Keys(namespace_id=bytes(16), hashes=bytes(32 * hashes))
    return pool_pb2.PinRequest(groups=[keys], ttl_ms=ttl_ms).SerializeToString()


def test_a_long_pin_is_cut_and_the_answer_says_so(channel: grpc.Channel) -> None:
    request = pool_pb2.PinRequest(groups=[], ttl_ms=2**64 - 1).SerializeToString()
    assert pool_pb2.PinResponse.FromString(call(channel, "Pin", request)).ttl_ms == 86_400_000


def frames(*frames: pool_pb2.Frame) -> bytes:
    return pool_pb2.Frames(frames=frames).SerializeToString()


def big_frames() -> bytes:
    return frames(*[pool_pb2.Frame(payload=bytes(MIB)) for _ in range(3)])


@pytest.mark.parametrize(
    ("verb", "messages", "code", "names"),
    [
        ("Lookup", [lookup_request(65)], "RESOURCE_EXHAUSTED", "max_batch_blocks.*split"),
        ("Discard", [lookup_request(65)], "RESOURCE_EXHAUSTED", "max_batch_blocks.*split"),
        ("Read", [read_request(65, 1)], "RESOURCE_EXHAUSTED", "max_batch_blocks.*split"),
        ("Read", [read_request(1, 3 * MIB + 1)], "RESOURCE_EXHAUSTED", "max_block_bytes"),
        ("Read", [read_request(2, 3 * MIB)], "RESOURCE_EXHAUSTED", "max_batch_bytes.*split"),
        ("Read", [read_request(2, 2**64 - 1)], "RESOURCE_EXHAUSTED", "max_block_bytes"),
        ("Write", [big_frames()] * 2, "RESOURCE_EXHAUSTED", "max_batch_bytes.*split"),
        ("Write", [frames(*[pool_pb2.Frame(block=i) for i in range(65)])], "RESOURCE_EXHAUSTED", "max_batch_blocks"),
        ("Pin", [pin_request(65)], "RESOURCE_EXHAUSTED", "max_batch_blocks.*split"),
        ("Unpin", [lookup_request(65)], "RESOURCE_EXHAUSTED", "max_batch_blocks.*split"),
        ("Pin", [pin_request(1, ttl_ms=0)], "INVALID_ARGUMENT", "ttl_ms must be from 1"),
        ("Pin", [b"\xff\xff"], "INVALID_ARGUMENT", "PinRequest"),
        ("Unpin", [b"\xff\xff"], "INVALID_ARGUMENT", "UnpinRequest"),
        ("Lookup", [b"\xff\xff"], "INVALID_ARGUMENT", "LookupRequest"),
        ("Read", [b"\x0a\xff"], "INVALID_ARGUMENT", "ReadRequest"),
        ("Write", [b"\x0a\xff"], "INVALID_ARGUMENT", "frame"),
        ("Write", [frames(pool_pb2.Frame(block=1))], "INVALID_ARGUMENT", "number blocks from 0"),
        ("Write", [frames(pool_pb2.Frame(), pool_pb2.Frame(header=b"x"))], "INVALID_ARGUMENT", "one header"),
        ("Lookup", [pool_pb2.LookupRequest(groups=[pool_pb2.Keys(hashes=bytes(32))]).SerializeToString()],
         "INVALID_ARGUMENT", "namespace_id of 0"),
        ("Lookup", [pool_pb2.LookupRequest(groups=[pool_pb2.Keys(namespace_id=bytes(16), hashes=bytes(33))])
         .SerializeToString()], "INVALID_ARGUMENT", "hashes of 33"),
    ],
)  # fmt: skip
def test_requests_beyond_the_limits_or_the_grammar(
    channel: grpc.Channel, verb: str, messages: list[bytes], code: str, names: str
) -> None:
    metadata = (("authorization", "Bearer " + TOKENS["red"]),)
    with pytest.raises(grpc.RpcError) as error:
        channel.stream_unary(SERVICE + verb)(iter(messages), metadata=metadata, timeout=WAIT_S)
    assert code_of(error).name == code
    assert isinstance(error.value, grpc.Call)
    assert re.search(names, error.value.details() or "")


@pytest.mark.parametrize("timeout", [None, 3600.0])
@pytest.mark.parametrize("verb", ["Read", "Write"])
def test_streams_need_a_deadline(channel: grpc.Channel, verb: str, timeout: float | None) -> None:
    metadata = (("authorization", "Bearer " + TOKENS["red"]),)
    with pytest.raises(grpc.RpcError) as error:
        channel.unary_unary(SERVICE + verb)(b"", metadata=metadata, timeout=timeout)
    assert code_of(error) is grpc.StatusCode.INVALID_ARGUMENT


def test_blocks_that_do_not_hold_are_refused_one_by_one(address: str, channel: grpc.Channel) -> None:
    """Damaged, foreign, short, overlong and good blocks in one stream: only the good ones are there after."""
    good, payload = make_key("good"), PAYLOADS[0]
    header = encode_header(good, payload)
    blocks = [
        (encode_header(make_key("flip"), payload), b"?" + payload[1:]),
        (b"no header", payload),
        (encode_header(make_key("foreign", tenant=BLUE), payload), payload),
        (encode_header(make_key("short"), payload), payload[:-1]),
        (encode_header(make_key("long"), payload[:-1]), payload),
        (encode_header(make_key("huge"), bytes(3 * MIB + 1)), payload),
        (header, payload),
        (header, payload),
        (encode_header(make_key("last"), payload), payload[:100]),
    ]
    messages = encode_blocks((i, 0, head, body) for i, (head, body) in enumerate(blocks))
    metadata = (("authorization", "Bearer " + TOKENS["red"]),)
    answer = channel.stream_unary(SERVICE + "Write")(messages, metadata=metadata, timeout=WAIT_S)
    statuses = [WriteStatus(s).name for s in pool_pb2.WriteResponse.FromString(answer).statuses]
    assert statuses == ["FAILED"] * 5 + ["FULL", "STORED", "EXISTS", "FAILED"]
    tier = connect(address)
    labels = ["flip", "foreign", "short", "long", "huge", "last", "good"]
    assert tier.lookup([make_key(i) for i in labels]) == [Status.MISS] * 6 + [Status.HIT]
    tier.close()


def half_a_block(key: StoreKey, may_end: threading.Event) -> Iterator[bytes]:
    yield from encode_blocks([(0, 0, encode_header(key, PAYLOADS[0]), PAYLOADS[0][: BLOCK_BYTES // 2])])
    may_end.wait(WAIT_S)


def test_a_client_that_dies_in_the_middle_of_a_write_leaves_nothing() -> None:
    """More broken uploads than memory has slots: were one leaked each, the last write would hear FULL."""
    with running(MIB) as address:
        tier = connect(address)
        for i in range(20):
            with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
                may_end = threading.Event()
                key = make_key(("torn", i))

                metadata = (("authorization", "Bearer " + TOKENS["red"]),)
                broken = channel.stream_unary(SERVICE + "Write").future(
                    half_a_block(key, may_end), metadata=metadata, timeout=WAIT_S
                )
                poll(lambda key=key: tier.lookup([key]) == [Status.PENDING])
                broken.cancel()
                may_end.set()
            poll(lambda key=key: tier.lookup([key]) == [Status.MISS])
        assert tier.write(items(8)) == [WriteStatus.STORED] * 8
        tier.close()


def poll(condition: Callable[[], bool]) -> None:
    """Until `condition` holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_large_batches_are_split(address: str) -> None:
    tier = connect(address, max_batch_bytes=3 * BLOCK_BYTES)
    batch = [(make_key(("split", i)), PAYLOADS[i]) for i in range(16)]
    assert tier.write(batch) == [WriteStatus.STORED] * 16
    assert read_blocks(tier, [key for key, _ in batch], BLOCK_BYTES) == list(PAYLOADS.values())
    tier.close()


@pytest.mark.parametrize("nbytes", [0, 1, MIB, 2 * MIB + 5])
def test_blocks_of_any_size(address: str, nbytes: int) -> None:
    tier = connect(address)
    payload = make_payload(nbytes, nbytes)
    assert tier.write([(make_key(("size", nbytes)), payload)]) == [WriteStatus.STORED]
    assert read_blocks(tier, [make_key(("size", nbytes))], nbytes) == [payload]
    tier.close()


def test_events_health_and_reflection(address: str, channel: grpc.Channel) -> None:
    metadata = (("authorization", "Bearer " + TOKENS["red"]),)
    stream = channel.unary_stream(SERVICE + "Events")
    tier = connect(address)
    events = stream(b"", metadata=metadata, timeout=WAIT_S)
    labels = iter(range(1000))
    with ThreadPoolExecutor(1) as executor:
        first = executor.submit(next, events)
        while not first.done():  # until the subscription is there
            tier.write([(make_key(("event", next(labels))), b"x")])
        batch = pool_pb2.EventBatch.FromString(first.result())
    event = batch.events[0]
    assert (event.kind, event.tier, batch.lost) == (pool_pb2.Event.STORED, "memory", 0)
    assert (event.keys[0].namespace_id, len(event.keys[0].hashes)) == (make_key(0)[16:32], 32)
    events.cancel()
    tier.close()

    status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="kvtier.pool.v1.Pool"))
    assert status.status == health_pb2.HealthCheckResponse.SERVING
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    info = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    (answer,) = info(iter([request]), metadata=metadata, timeout=WAIT_S)
    assert "kvtier.pool.v1.Pool" in [service.name for service in answer.list_services_response.service]
    with pytest.raises(grpc.RpcError) as error:
        list(info(iter([request]), timeout=WAIT_S))
    assert code_of(error) is grpc.StatusCode.UNAUTHENTICATED


class BrokenFiles(OsFiles):
    """Takes no bytes while it is `full`."""

    full = False

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, buffers, offset)


def test_a_failing_disk_is_in_the_stream_in_usage_and_in_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = BrokenFiles(direct=False)
    monkeypatch.setattr(disk, "OsFiles", lambda direct: files)
    monkeypatch.setattr(trouble, "_PAUSE_S", 0.01)
    metadata = (("authorization", "Bearer " + TOKENS["red"]),)
    labels = itertools.count()
    with (
        pool_rig.running_pool(disk_dir=tmp_path / "disk", disk_bytes=64 * MIB, disk_reserve_bytes=0) as addresses,
        grpc.insecure_channel(addresses.grpc[0]) as channel,
        contextlib.closing(connect(addresses.grpc[0])) as tier,
        ThreadPoolExecutor(1) as executor,
    ):
        usage = channel.unary_unary(SERVICE + "Usage")
        stream = channel.unary_stream(SERVICE + "Events")(b"", metadata=metadata, timeout=WAIT_S)

        def state() -> int:
            of_memory, of_disk = pool_pb2.UsageResponse.FromString(usage(b"", metadata=metadata)).tiers
            assert of_memory.state == pool_pb2.TierUsage.WRITABLE
            return of_disk.state

        def heard(kind: int) -> bool:
            """Writes until the stream tells of it."""
            answer = executor.submit(_hear, stream, kind)
            while not answer.done():
                tier.write([(make_key(next(labels)), b"x")])
            return answer.result()

        assert heard(pool_pb2.Event.STORED)
        assert state() == pool_pb2.TierUsage.WRITABLE
        files.full = True
        assert heard(pool_pb2.Event.READ_ONLY)
        assert state() == pool_pb2.TierUsage.READ_ONLY
        with urllib.request.urlopen(f"http://{addresses.http}/metrics") as answer:
            assert 'kvtier_tier_state{state="read_only",tier="disk"} 1.0' in answer.read().decode()
        files.full = False
        assert heard(pool_pb2.Event.WRITABLE)
        assert state() == pool_pb2.TierUsage.WRITABLE
        stream.cancel()


def _hear(stream: Iterator[bytes], kind: int) -> bool:
    """Reads on until there is an event of this kind about the disk."""
    for message in stream:
        events = [e for e in pool_pb2.EventBatch.FromString(message).events if (e.kind, e.tier) == (kind, "disk")]
        if events:
            return kind == pool_pb2.Event.STORED or not any(event.keys for event in events)
    return False


def test_event_streams_beyond_the_limit_are_refused_and_places_come_back(address: str) -> None:
    metadata = (("authorization", "Bearer " + TOKENS["red"]),)

    def opened(channel: grpc.Channel) -> bool:
        stream = channel.unary_stream(SERVICE + "Events")(b"", metadata=metadata, timeout=WAIT_S)
        streams.append(stream)
        with contextlib.suppress(grpc.FutureTimeoutError):
            return not wait_done(stream, 0.3)
        return True

    def wait_done(stream: grpc.Call, seconds: float) -> bool:
        done = threading.Event()
        return not stream.add_callback(done.set) or done.wait(seconds)

    streams: list[grpc.Call] = []
    with grpc.insecure_channel(address) as channel:
        assert [opened(channel) for _ in range(3)] == [True, True, False]
        assert streams[2].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with grpc.insecure_channel(address) as channel:
        poll(lambda: opened(channel))


def test_garbage_on_the_port_disturbs_nobody(address: str) -> None:
    host, _, port = address.rpartition(":")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(999)):
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while connection.recv(4096):
                    pass
    tier = connect(address)
    assert tier.write([(make_key("after garbage"), b"x")]) == [WriteStatus.STORED]
    tier.close()


def test_a_server_that_is_no_pool_is_a_miss() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        metrics = Metrics()
        tier = connect(f"127.0.0.1:{server.getsockname()[1]}", call_timeout_s=0.3, metrics=metrics)
        assert tier.lookup([make_key(0)]) == [Status.MISS]
        assert read_blocks(tier, [make_key(0)], BLOCK_BYTES) == [None]
        assert tier.usage() == Usage(0, 0, 0)
        assert sample(metrics, op="read", error="UnavailableError") == 1
        tier.close()


def test_damage_on_the_way_is_a_miss_and_a_counter(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block arrives with a flipped bit and the second under the third one's header."""
    receive = grpc_transport._receive

    def damaged(stream: Iterator[bytes], into: Sequence[memoryview]) -> Iterator[tuple[int, bytes]]:
        headers = dict(receive(stream, into))
        into[0][100] ^= 4
        headers[1] = headers[2]
        yield from headers.items()

    monkeypatch.setattr(grpc_transport, "_receive", damaged)
    metrics = Metrics()
    transport = GrpcTransport(address, TOKENS["red"])
    tier = PoolTier(transport, RED, metrics=metrics, breaker=CircuitBreaker(3, 1.0))
    batch = [(make_key(("damage", i)), PAYLOADS[i]) for i in range(3)]
    tier.write(batch)
    assert read_blocks(tier, [key for key, _ in batch], BLOCK_BYTES) == [None, None, PAYLOADS[2]]
    assert metrics.registry.get_sample_value("kvtier_corrupt_blocks_total", {"tier": "pool"}) == 2
    tier.close()


def test_a_port_in_use_is_a_clear_error(address: str) -> None:
    settings = PoolSettings(
        tenants=TENANTS, memory_bytes=MIB, listen=(), grpc_listen=(address,), http_listen="127.0.0.1:0"
    )
    with pytest.raises(ConfigError, match=re.escape(address)):
        PoolService(settings).start()


def test_kill_minus_9_during_reads_is_misses_and_heals_by_itself() -> None:
    with pool_process() as pool:
        metrics = Metrics()
        tier = connect(pool.grpc, call_timeout_s=5.0, metrics=metrics)
        assert tier.write(items(16)) == [WriteStatus.STORED] * 16
        answers: list[list[bytes | None]] = []
        some_read, stop = threading.Event(), threading.Event()

        def keep_reading() -> None:
            while not stop.is_set():
                answers.append(read_blocks(tier, [make_key(i) for i in range(16)], BLOCK_BYTES))
                some_read.set()

        with ThreadPoolExecutor(1) as executor:
            reading = executor.submit(keep_reading)
            assert some_read.wait(WAIT_S)
            pool.process.kill()
            pool.process.wait(WAIT_S)
            poll(lambda: answers[-1] == [None] * 16)
            stop.set()
            reading.result(WAIT_S)
        assert all(block in (None, PAYLOADS[i]) for answer in answers for i, block in enumerate(answer))
        assert answers[0] == list(PAYLOADS.values())
        assert sample(metrics, op="read", error="UnavailableError") > 0

        restarted = pool.again()
        try:
            poll(lambda: tier.write(items(1)) == [WriteStatus.STORED])
            assert read_blocks(tier, [make_key(0)], BLOCK_BYTES) == [PAYLOADS[0]]
        finally:
            restarted.kill()
        tier.close()


def test_a_stopped_pool_costs_one_deadline_each_until_the_breaker_opens(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    with pool_process() as pool:
        metrics = Metrics()
        breaker = CircuitBreaker(2, 10.0, clock=lambda: now[0])
        tier = connect(pool.grpc, call_timeout_s=0.7, metrics=metrics, breaker=breaker)
        patient = connect(pool.grpc)
        assert patient.write(items(2)) == [WriteStatus.STORED] * 2
        patient.close()
        os.kill(pool.process.pid, signal.SIGSTOP)
        try:
            for _ in range(5):
                assert read_blocks(tier, [make_key(0)], BLOCK_BYTES) == [None]
            assert tier.write(items(4)) == [WriteStatus.FAILED] * 4
            assert sample(metrics, op="read", error="UnavailableError") == 2
            assert sample(metrics, op="read", error="BreakerOpen") == 3
            assert sample(metrics, op="write", error="BreakerOpen") == 1
            now[0] = 10.0  # one probe, which fails
            assert tier.lookup([make_key(0)]) == tier.lookup([make_key(0)]) == [Status.MISS]
            assert sample(metrics, op="lookup", error="UnavailableError") == 1
        finally:
            os.kill(pool.process.pid, signal.SIGCONT)
        assert tier.lookup([make_key(0)]) == [Status.MISS]

        def probe_reads() -> bool:
            now[0] += 10.0
            return read_blocks(tier, [make_key(0), make_key(1)], BLOCK_BYTES) == [PAYLOADS[0], PAYLOADS[1]]

        poll(probe_reads)
        assert [r.message.split(":")[1].strip() for r in caplog.records if r.name == "kvtier.tiers.pool.tier"] == [
            "left alone for now, everything misses",
            "answers again",
        ]
        tier.close()


def test_sigterm_drains_to_disk_and_a_restart_serves_the_bytes(tmp_path: Path) -> None:
    disk = (f"--disk-dir={tmp_path / 'disk'}", "--disk-bytes=64MiB")
    with pool_process(*disk, grpc_listen=f"unix:{tmp_path}/pool.sock") as pool:
        tier = connect(pool.grpc)
        assert tier.write(items(16)) == [WriteStatus.STORED] * 16
        tier.close()
        code, log = pool.terminate()
        assert code == 0
        assert re.search(r"drained: \d+ blocks written to disk, 0 abandoned", log)
    with pool_process(*disk) as pool:
        tier = connect(pool.grpc)
        assert tier.lookup([make_key(i) for i in range(16)]) == [Status.HIT] * 16
        assert read_blocks(tier, [make_key(i) for i in range(16)], BLOCK_BYTES) == list(PAYLOADS.values())
        tier.close()


def test_a_config_file_with_a_flag_that_wins(tmp_path: Path) -> None:
    (digest,) = [digest for digest, name in TENANTS.items() if name == "blue"]
    (tmp_path / "blue.sha256").write_text(digest + "\n")
    config = tmp_path / "pool.toml"
    config.write_text(
        '[tenants.blue]\ntoken_sha256 = ["file:blue.sha256"]\n'
        '[pool_service]\nlisten = ["127.0.0.1:0"]\ngrpc_listen = ["256.0.0.1:1"]\n'
        'http_listen = "127.0.0.1:0"\nmemory_bytes = "8MiB"\n'
    )
    pool = PoolProcess([f"--config={config}", "--grpc-listen=127.0.0.1:0"])
    pool.start()
    try:
        tier = connect(pool.grpc, "blue")
        assert tier.write([(make_key("a", tenant=BLUE), b"x")]) == [WriteStatus.STORED]
        assert tier.usage().capacity_bytes == 8 * MIB
        tier.close()
    finally:
        pool.kill()


def test_healthz_metrics_and_no_torch() -> None:
    with pool_process() as pool:
        tier = connect(pool.grpc)
        tier.write(items(3))
        tier.close()
        with urllib.request.urlopen(f"http://{pool.http}/healthz", timeout=WAIT_S) as answer:
            assert (answer.status, answer.read()) == (200, b"ok\n")
        with urllib.request.urlopen(f"http://{pool.http}/metrics", timeout=WAIT_S) as answer:
            text = answer.read().decode()
        assert 'kvtier_pool_written_blocks_total{status="stored"} 3.0' in text
        assert 'kvtier_pool_calls_total{code="OK",verb="Write"} 1.0' in text
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{pool.http}/", timeout=WAIT_S)
        libraries = {Path(m.path).name for m in psutil.Process(pool.process.pid).memory_maps()}
        assert not [name for name in libraries if name.startswith("libtorch")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "token_sha256"),
        (["--tenant", "red"], "NAME=SHA256"),
        (["--tenant", "red=abc"], "64 lower-case hex"),
        (["--tenant", f"red={'0' * 64}", "--memory-bytes", "lots"], "memory_bytes"),
        (["--tenant", f"red={'0' * 64}", "--listen", "256.0.0.1:99999"], "256.0.0.1:99999"),
        (["--tenant", f"red={'0' * 64}", "--listen", "127.0.0.1:0", "--http-listen", "nowhere"], "nowhere"),
    ],
)
def test_a_wrong_command_line_says_what_to_do(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["kvtier", "pool", "serve", *arguments])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(SystemExit) as exit_:
            main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert exit_.value.code == 1
    assert message in capsys.readouterr().err
