"""Clients of gRPC that send what is cheap to send and dear to take: a pool's memory and threads stay its own."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator

import grpc
import pytest

from kvtier.clock import MONOTONIC
from kvtier.codec.stored_form import encode_header
from kvtier.identity.keys import TenantId
from kvtier.net.own_sockets import Ends
from kvtier.protocol import pool_pb2
from kvtier.tiers.base import Status, WriteStatus
from kvtier_pool.grpc.gathered import GatheredBytes
from pool_rig import BLUE, MIB, RED, TOKENS, WAIT_S, PoolProcess, connect, keys, pool_process, resident_bytes

SERVICE = "/kvtier.pool.v1.Pool/"
CREDENTIALS = (("authorization", "Bearer " + TOKENS["red"]),)
HEADERS, CONTINUATION, DATA, END_STREAM, END_HEADERS = 1, 9, 0, 1, 4
ONE, OTHER = ("127.0.0.1", 1), ("127.0.0.1", 2)


@pytest.fixture
def pool() -> Iterator[PoolProcess]:
    with pool_process() as running:
        yield running


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2."""
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def field(name: bytes, value: bytes) -> bytes:
    """A field of a header as HPACK has it without its tables."""
    return b"\0" + b"".join(_number(len(text)) + text for text in (name, value))


def _number(value: int) -> bytes:
    if value < 127:
        return bytes((value,))
    value, out = value - 127, bytearray((127,))
    while value > 127:
        out.append(value % 128 | 128)
        value //= 128
    return bytes(out) + bytes((value,))


def usage_call(stream: int) -> bytes:
    """A whole call of Usage, with a tenant's token."""
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": f"{SERVICE}Usage".encode(),
        b":authority": b"pool",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
        b"authorization": b"Bearer " + TOKENS["red"].encode(),
    }
    head = frame(HEADERS, END_HEADERS, stream, b"".join(field(*pair) for pair in fields.items()))
    return head + frame(DATA, END_STREAM, stream, bytes(5))


@pytest.mark.parametrize("knows_a_token", [False, True])
def test_headers_that_do_not_end_are_not_gathered(pool: PoolProcess, knows_a_token: bool) -> None:
    """gRPC itself would keep all of the 2 GiB that these would send, and never end a connection."""
    idle_bytes = resident_bytes(pool)
    host, port = pool.grpc.rsplit(":", 1)
    endless = frame(CONTINUATION, 0, 3, field(b"name", b"x" * 16_000)) * 16
    with contextlib.ExitStack() as stack:
        flooders = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(8)]
        for flooder in flooders:
            flooder.settimeout(WAIT_S)
            flooder.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
            if knows_a_token:
                flooder.sendall(usage_call(1))
                received = b""
                while b"grpc-status" not in received:
                    part = flooder.recv(65536)
                    assert part, received
                    received += part
            flooder.sendall(frame(HEADERS, 0, 3, field(b":method", b"POST")))
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            send_round(flooders, endless, 1000)
        assert resident_bytes(pool) - idle_bytes < 512 * MIB
        for address in (pool.block, f"grpc:{pool.grpc}"):
            tier = connect(address, "blue")
            assert tier.lookup(keys(["absent"], BLUE)) == [Status.MISS]
            tier.close()


def send_round(flooders: list[socket.socket], data: bytes, num_rounds: int) -> None:
    for _ in range(num_rounds):
        for flooder in flooders:
            flooder.sendall(data)


def test_frames_that_carry_nothing_and_groups_without_end_are_refused(pool: PoolProcess) -> None:
    refused: list[tuple[str, bytes, grpc.StatusCode]] = [
        ("Write", b"\x0a\x00" * 1_900_000, grpc.StatusCode.INVALID_ARGUMENT),
        ("Lookup", b"\x0a\x00" * 1_900_000, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("Read", b"\x0a\x00" * 1_025, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ]
    with grpc.insecure_channel(pool.grpc) as channel:
        for verb, message, code in refused:
            with pytest.raises(grpc.RpcError) as error:
                channel.unary_unary(f"{SERVICE}{verb}")(message, metadata=CREDENTIALS, timeout=WAIT_S)
            assert isinstance(error.value, grpc.Call)
            assert error.value.code() is code, error.value.details()
        call = channel.unary_unary(f"{SERVICE}Lookup")
        answer = call(b"\x0a\x12\x0a\x10" + bytes(16), metadata=CREDENTIALS, timeout=WAIT_S)
        assert answer == b"", "one group without a key"


def tiny_frames(payload: bytes) -> bytes:
    """A block's frames, of one byte each."""
    head = pool_pb2.Frame(header=encode_header(keys(["tiny"])[0], payload), payload=payload[:1])
    frames = [pool_pb2.Frame(payload=payload[i : i + 1]) for i in range(1, len(payload))]
    return pool_pb2.Frames(frames=[head, *frames]).SerializeToString()


def test_a_write_in_tiny_frames_ends_with_its_client(pool: PoolProcess) -> None:
    with grpc.insecure_channel(pool.grpc) as channel:
        write = channel.stream_unary(f"{SERVICE}Write")
        answer = write(iter([tiny_frames(bytes(5000))]), metadata=CREDENTIALS, timeout=WAIT_S)
        assert list(pool_pb2.WriteResponse.FromString(answer).statuses) == [WriteStatus.STORED]
        endless = b"\x0a\x03\x22\x01x" * 800_000
        calls = [write.future(iter([endless] * 4), metadata=CREDENTIALS, timeout=WAIT_S) for _ in range(4)]
        time.sleep(0.3)
        for call in calls:
            call.cancel()
        until_idle(pool)
        pool.process.terminate()
        assert pool.process.stderr is not None
        assert "Exception calling application" not in pool.process.stderr.read()


def until_idle(pool: PoolProcess) -> None:
    """Waits until the process computes less than a quarter of the time. A message that is under way takes seconds."""
    deadline = MONOTONIC() + 5.0
    before = processor_s(pool)
    while True:
        time.sleep(0.5)
        after = processor_s(pool)
        if after - before < 0.125:
            return
        assert MONOTONIC() < deadline, "it computes on for a client that has gone"
        before = after


def processor_s(pool: PoolProcess) -> float:
    with open(f"/proc/{pool.process.pid}/stat") as stat:
        user, system = stat.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(("owners", "most"), [({}, 64 * MIB), ({ONE: RED, OTHER: RED}, 128 * MIB)])
def test_what_no_call_was_given_is_bounded_over_all_connections(owners: dict[Ends, TenantId], most: int) -> None:
    gathered = GatheredBytes()
    assert gathered.flooding({ONE: most // 2, OTHER: most // 4}, owners) == []
    gathered.note(ONE, most)
    come = most // 2 + most
    assert gathered.flooding({ONE: come, OTHER: most // 4}, owners) == [], "what a call was given is not gathered"
    assert gathered.flooding({ONE: come, OTHER: most}, owners) == [OTHER], "the one with the most"
    assert gathered.flooding({ONE: come}, owners) == []
    assert gathered.flooding({ONE: 9 * most}, owners) == [ONE]


def test_a_slow_flood_is_one_as_well() -> None:
    gathered = GatheredBytes()
    looks = [gathered.flooding({ONE: 1000 * look}, {}) for look in range(1, 70_000)]
    assert looks.index([ONE]) == 64 * MIB // 1000
