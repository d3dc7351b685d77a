"""The pool's gRPC API as any client may speak it: credentials, limits, grammar, broken uploads, events, health."""

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvtier.codec.stored_form import encode_header
from kvtier.identity.keys import StoreKey
from kvtier.protocol import pool_pb2
from kvtier.protocol.frames import encode_blocks
from kvtier.testing.blocks import make_key, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier_pool.limits import PoolLimits
from pool_grpc_rig import PAYLOADS, connect, items, running
from pool_rig import BLOCK_BYTES, BLUE, MIB, TOKENS, WAIT_S, until

SERVICE = "/kvtier.pool.v1.Pool/"
CREDENTIALS = (("authorization", "Bearer " + TOKENS["red"]),)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A service for tests that leave it as it is; each uses labels of its own."""
    limits = PoolLimits(max_batch_blocks=64, max_batch_bytes=4 * MIB, max_block_bytes=3 * MIB, max_event_streams=4)
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


@pytest.mark.parametrize(
    "token", [None, "Bearer nobody", "Basic " + TOKENS["red"], TOKENS["red"], "Bearer ", "Bearer " + "x" * 2000]
)
@pytest.mark.parametrize("verb", ["Lookup", "Discard", "Usage", "Read", "Write", "Events", "Pin", "Unpin"])
def test_no_token_no_service(channel: grpc.Channel, verb: str, token: str | None) -> None:
    with pytest.raises(grpc.RpcError) as error:
        call(channel, verb, b"", token)
    assert code_of(error) is grpc.StatusCode.UNAUTHENTICATED


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
    with pytest.raises(grpc.RpcError) as error:
        channel.stream_unary(SERVICE + verb)(iter(messages), metadata=CREDENTIALS, timeout=WAIT_S)
    assert code_of(error).name == code
    assert isinstance(error.value, grpc.Call)
    assert re.search(names, error.value.details() or "")


def test_a_long_pin_is_cut_and_the_answer_says_so(channel: grpc.Channel) -> None:
    request = pool_pb2.PinRequest(groups=[], ttl_ms=2**64 - 1).SerializeToString()
    assert pool_pb2.PinResponse.FromString(call(channel, "Pin", request)).ttl_ms == 86_400_000


@pytest.mark.parametrize("timeout", [None, 3600.0])
@pytest.mark.parametrize("verb", ["Read", "Write"])
def test_streams_need_a_deadline(channel: grpc.Channel, verb: str, timeout: float | None) -> None:
    with pytest.raises(grpc.RpcError) as error:
        channel.unary_unary(SERVICE + verb)(b"", metadata=CREDENTIALS, timeout=timeout)
    assert code_of(error) is grpc.StatusCode.INVALID_ARGUMENT


def test_event_streams_beyond_the_limit_are_refused_and_places_come_back(address: str) -> None:
    def begin(channel: grpc.Channel) -> tuple[grpc.Call, threading.Event]:
        """A stream, and whether it is over."""
        stream, over = channel.unary_stream(SERVICE + "Events")(b"", metadata=CREDENTIALS), threading.Event()
        if not stream.add_callback(over.set):
            over.set()
        return stream, over

    with grpc.insecure_channel(address) as channel:
        streams = [begin(channel) for _ in range(4)]
        until(lambda: any(over.is_set() for _, over in streams))
        assert [over.wait(0.1) for _, over in streams].count(True) == 1, "three stay; one is kept for another tenant"
        (refused,) = (stream for stream, over in streams if over.is_set())
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with grpc.insecure_channel(address) as channel:

        def is_taken() -> bool:
            streams.append(begin(channel))
            return not streams[-1][1].wait(0.3)

        until(is_taken)


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
    answer = channel.stream_unary(SERVICE + "Write")(messages, metadata=CREDENTIALS, timeout=WAIT_S)
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
                broken = channel.stream_unary(SERVICE + "Write").future(
                    half_a_block(key, may_end), metadata=CREDENTIALS, timeout=WAIT_S
                )
                until(lambda key=key: tier.lookup([key]) == [Status.PENDING])
                broken.cancel()
                may_end.set()
            until(lambda key=key: tier.lookup([key]) == [Status.MISS])
        assert tier.write(items(8)) == [WriteStatus.STORED] * 8
        tier.close()


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
    assert tier.write([summed(make_key("after garbage"), b"x")]) == [WriteStatus.STORED]
    tier.close()


def test_events_health_and_reflection(address: str, channel: grpc.Channel) -> None:
    stream = channel.unary_stream(SERVICE + "Events")
    tier = connect(address)
    events = stream(b"", metadata=CREDENTIALS, timeout=WAIT_S)
    labels = iter(range(1000))
    with ThreadPoolExecutor(1) as executor:
        first = executor.submit(next, events)
        while not first.done():  # until the subscription is there
            tier.write([summed(make_key(("event", next(labels))), b"x")])
        batch = pool_pb2.EventBatch.FromString(first.result())
    event = batch.events[0]
    assert (event.kind, event.tier, batch.lost) == (pool_pb2.Event.STORED, "memory", 0)
    assert (event.keys[0].namespace_id, len(event.keys[0].hashes)) == (make_key(0)[16:32], 32)
    events.cancel()
    tier.close()

    status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="kvtier.pool.v1.Pool"))
    assert status.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="kvtier"), timeout=WAIT_S)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    info = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    (answer,) = info(iter([request]), metadata=CREDENTIALS, timeout=WAIT_S)
    assert "kvtier.pool.v1.Pool" in [service.name for service in answer.list_services_response.service]
    with pytest.raises(grpc.RpcError) as error:
        list(info(iter([request]), timeout=WAIT_S))
    assert code_of(error) is grpc.StatusCode.UNAUTHENTICATED
