"""The block protocol byte for byte: golden frames, refusals, and peers that send anything at all."""

import re
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import HealthCheck, given, settings

from block_rig import (
    GOLDEN,
    HEADER,
    KEY,
    PAYLOAD,
    mutated,
    receive_exactly,
    receive_frame,
    receive_rest,
    recorded_pool,
    session,
    split_frames,
)
from kvtier.errors import InvalidInputError, UnavailableError
from kvtier.net.stream import PlainStream
from kvtier.net.wrong_protocol import PRELUDE_BYTES
from kvtier.protocol.block import MAX_HEADER_BYTES, MAX_HELLO_BYTES, decode_header, encode_head, error_for
from kvtier.protocol.block_socket import FrameSocket
from kvtier.testing.contract import make_key, make_payload, summed
from kvtier.tiers.base import Status, Usage, WriteStatus
from kvtier.tiers.pool.socket_transport import SocketTransport
from kvtier_pool.limits import PoolLimits
from kvtier_pool.wrong_protocol import answer_for
from pool_rig import MIB, RED, TOKENS, WAIT_S, CoreRig, core_rig

HELLO = GOLDEN["hello"][0]
CONVERSATION = b"".join(request for request, _ in GOLDEN.values())
SHORT = PoolLimits(max_batch_blocks=4, max_batch_bytes=MIB, max_block_bytes=MIB // 2, max_stall_s=0.2)


@pytest.fixture
def rig() -> Iterator[CoreRig]:
    with core_rig() as rig:
        yield rig


def test_an_old_client_gets_the_answers_it_knows(rig: CoreRig) -> None:
    """Golden requests, golden answers. A change here takes a new protocol version."""
    with session(rig) as client:
        for request, answer in GOLDEN.values():
            client.sendall(request)
            assert receive_exactly(client, len(answer)) == answer


def test_requests_sent_ahead_are_answered_in_order(rig: CoreRig) -> None:
    with session(rig) as client:
        client.sendall(CONVERSATION)
        client.shutdown(socket.SHUT_WR)
        assert receive_rest(client) == b"".join(answer for _, answer in GOLDEN.values())


def test_the_client_sends_what_old_pools_know(tmp_path: Path) -> None:
    """The real client against a pool that is nothing but golden frames."""
    path = tmp_path / "pool.sock"
    with recorded_pool(path, GOLDEN) as received:
        transport = SocketTransport(f"unix:{path}", TOKENS["red"], RED)
        keys = [KEY, make_key("absent")]
        into = [memoryview(bytearray(len(PAYLOAD))) for _ in keys]
        assert transport._send([summed(KEY, PAYLOAD)], time.monotonic() + WAIT_S) == [WriteStatus.STORED]
        assert transport.lookup(keys, WAIT_S) == [Status.HIT, Status.MISS]
        assert list(transport.read(keys, into, WAIT_S)) == [(0, None)]
        assert into[0] == PAYLOAD
        assert transport.usage(WAIT_S) == Usage(1, len(PAYLOAD), 8 * MIB)
        assert transport.discard([KEY], WAIT_S) == 1
        transport.close()
    assert received == [request for request, _ in GOLDEN.values()]


def hello(**changes: object) -> bytes:
    header = {"id": 1, "verb": "hello", "versions": [1], "token": TOKENS["red"], "client": "test"}
    return encode_head(header | changes)


def request(verb: str, payload_bytes: int = 0, **fields: object) -> bytes:
    return encode_head({"id": 7, "verb": verb, **fields}, payload_bytes)


def group(num_hashes: int = 1, **changes: object) -> dict[str, object]:
    return {"namespace": bytes(16), "hashes": bytes(32 * num_hashes), "payload_bytes": 1} | changes


def prelude(header_bytes: int, payload_bytes: int = 0) -> bytes:
    return struct.pack("<4sIQ", b"KVTF", header_bytes, payload_bytes)


@pytest.mark.parametrize(
    ("sent", "result", "message"),
    [
        (hello(versions=[2, 99]), "incompatible", r"speaks versions \[1\]"),
        (hello(versions=[True]), "invalid", "versions must hold integers"),
        (hello(token="wrong-token-for-tests"), "unauthenticated", "not known"),
        (hello(token="wrong"), "unauthenticated", "shorter than 16 bytes"),
        (hello(token=None), "invalid", "token must be str"),
        (hello(token="x" * 2000), "unauthenticated", "longer than"),
        (hello(client="x" * MAX_HELLO_BYTES), "invalid", f"at most {MAX_HELLO_BYTES}"),
        (request("usage"), "invalid", "must be hello"),
        (prelude(MAX_HELLO_BYTES + 1), "invalid", f"at most {MAX_HELLO_BYTES}"),
        (prelude(3) + b"\x93\x01\x02", "invalid", "header"),
        (prelude(1) + b"\xc1", "invalid", "header: it holds a byte that msgpack does not use, 0xc1"),
        (prelude(3000) + b"\x91" * 3000, "invalid", "header: its lists and maps are nested too deeply"),
        (HELLO + request("fetch"), "invalid", "'fetch' is not known"),
        (HELLO + request("usage", payload_bytes=5), "invalid", "payload of 5 bytes"),
        (HELLO + prelude(MAX_HEADER_BYTES + 1), "invalid", "at most 8388608"),
        (HELLO + request("lookup"), "invalid", "groups must be list"),
        (HELLO + request("lookup", groups=[3]), "invalid", "where a map belongs"),
        (HELLO + request("lookup", groups=[[{}] * 200] * 10), "invalid", "more than 1024 lists and maps"),
        (HELLO + request("lookup", groups=[group(namespace=bytes(15))]), "invalid", "namespace_id of 15"),
        (HELLO + request("lookup", groups=[group(hashes=bytes(33))]), "invalid", "hashes of 33"),
        (HELLO + request("lookup", groups=[group(5)]), "limit_exceeded", "max_batch_blocks.*split"),
        (HELLO + request("discard", groups=[group(3), group(2)]), "limit_exceeded", "max_batch_blocks.*split"),
        (HELLO + request("read", groups=[group(payload_bytes=MIB)]), "limit_exceeded", "max_block_bytes"),
        (HELLO + request("read", groups=[group(3, payload_bytes=MIB // 2)]), "limit_exceeded", "max_batch_bytes"),
        (HELLO + request("read", groups=[group(payload_bytes=2**64 - 1)]), "limit_exceeded", "max_block_bytes"),
        (HELLO + request("read", groups=[group(payload_bytes=-1)]), "invalid", "payload_bytes"),
        (HELLO + request("write", headers=HEADER * 5), "limit_exceeded", "max_batch_blocks.*split"),
        (HELLO + request("write", MIB + 1, headers=HEADER), "limit_exceeded", "max_batch_bytes.*split"),
        (HELLO + request("write", 13, headers=HEADER), "invalid", "14 payload bytes before a payload of 13"),
        (HELLO + request("write", 14, headers=HEADER[:-1]), "invalid", "multiple of 96"),
        (HELLO + request("write", 14, headers=b"X" + HEADER[1:]), "invalid", "no kvtier block"),
        (b"what is this, a", "invalid", None),
        (b"what is this, a protocol?", "invalid", "begins with b'what'"),
        (bytes.fromhex("16030102000100020001fc0303000000"), "invalid", "looks like TLS"),
    ],
)  # fmt: skip
def test_what_breaks_the_protocol_or_a_limit_is_refused_and_ends_the_connection(
    rig: CoreRig, sent: bytes, result: str, message: str | None
) -> None:
    with session(rig, SHORT) as client:
        client.sendall(sent)
        if message is None:  # too little to answer
            client.shutdown(socket.SHUT_WR)
            assert receive_rest(client) == b""
            return
        last = split_frames(receive_rest(client))[-1]
    assert last.text("result") == result
    assert last.numbers("versions") == [1]
    assert re.search(message, last.text("message"))


def test_peers_of_other_protocols_are_told_in_their_own(rig: CoreRig) -> None:
    with session(rig) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: pool\r\n\r\n")
        answer = receive_rest(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"`http_listen`" in answer


def test_fields_and_versions_of_the_future_do_no_harm(rig: CoreRig) -> None:
    with session(rig) as client:
        client.sendall(hello(versions=[3, 2, 1], capabilities={"shm": 1}) + request("lookup", groups=[], hint=[1]))
        greeting, _ = receive_frame(client)
        answer, _ = receive_frame(client)
    assert (greeting.number("version"), greeting.text("result")) == (1, "ok")
    assert (answer.data("statuses"), answer.number("id")) == (b"", 7)
    assert isinstance(error_for("a result of the future", "x"), UnavailableError)
    assert str(error_for("unavailable", "a\nforged line \x1b[31m" + "x" * 3000)) == (
        "unavailable: a?forged line ?[31m" + "x" * (500 - len("unavailable: a?forged line ?[31m"))
    )


@pytest.mark.parametrize(
    "sent",
    [
        b"KVT",
        prelude(100),
        HELLO + b"KVTF\0",
        HELLO + prelude(1000) + b"\x83",
        HELLO + request("write", 14, headers=HEADER) + PAYLOAD[:5],
    ],
)
def test_a_peer_that_stalls_in_the_middle_is_cut_off(
    rig: CoreRig, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_pool.block.session._HELLO_S", 0.2)
    with session(rig, SHORT) as client:
        client.sendall(sent)
        split_frames(receive_rest(client))
    assert rig.core.lookup([KEY]) == [Status.MISS]


def test_an_idle_peer_may_wait_longer_than_any_deadline(rig: CoreRig) -> None:
    limits = PoolLimits(max_stall_s=2.5, max_call_s=2.5)
    with session(rig, limits) as client:
        client.sendall(HELLO + request("usage"))
        receive_frame(client)
        receive_frame(client)
        client.settimeout(3.0)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(WAIT_S)
        client.sendall(request("usage"))
        assert receive_frame(client)[0].text("result") == "ok"


@pytest.mark.parametrize("num_buffers", [1, 3000])
def test_frames_of_any_number_of_buffers(num_buffers: int) -> None:
    """More than one system call takes, sent and received in pieces of other sizes."""
    ours, theirs = (FrameSocket(PlainStream(end)) for end in socket.socketpair())
    sent = [make_payload(i, 5_000_000 // num_buffers) for i in range(num_buffers)]
    received = [memoryview(bytearray(len(part))) for part in sent]
    deadline = time.monotonic() + WAIT_S
    sender = threading.Thread(target=lambda: ours.send_frame({"id": 1}, sent, deadline=deadline))
    sender.start()
    fields, payload_bytes = theirs.receive_head(deadline=deadline)
    theirs.receive_into(received, deadline=deadline)
    sender.join(WAIT_S)
    assert (fields.number("id"), payload_bytes) == (1, sum(map(len, sent)))
    assert received == sent
    ours.close()
    with pytest.raises(ConnectionResetError, match="closed"):
        theirs.receive_head(deadline=deadline)
    theirs.close()


@pytest.mark.parametrize("side", ["send", "receive"])
def test_deadlines_hold_while_the_peer_moves_a_little_at_a_time(side: str) -> None:
    ours, theirs = socket.socketpair()
    connection = FrameSocket(PlainStream(ours))
    stop = threading.Event()

    def dribble() -> None:
        while not stop.wait(0.02):
            if side == "send":
                theirs.recv(1000)
            else:
                theirs.send(b"x")

    peer = threading.Thread(target=dribble)
    peer.start()
    deadline = time.monotonic() + 0.2
    buffer = memoryview(bytearray(64 * MIB))
    move = {
        "send": lambda: connection.send_frame({}, [buffer], deadline=deadline),
        "receive": lambda: connection.receive_into([buffer], deadline=deadline),
    }
    with pytest.raises(TimeoutError, match="in time"):
        move[side]()
    stop.set()
    peer.join(WAIT_S)
    connection.close()
    theirs.close()


def claims() -> Iterator[bytes]:
    """Frames that say they are, or hold, far more than they do."""
    yield HELLO + prelude(MAX_HEADER_BYTES)
    yield HELLO + prelude(20, 2**63) + bytes(20)
    yield HELLO + request("write", 2**62, headers=HEADER)
    yield HELLO + request("read", groups=[group(payload_bytes=2**62)])
    for claim in (b"\xdf", b"\xdd", b"\xc6", b"\xdb", b"\xc9"):  # map32, array32, bin32, str32, ext32
        packed = claim + b"\xff\xff\xff\xf0" + b"\x01" * 8
        yield HELLO + prelude(len(packed)) + packed
    nested = b"\xdc\xff\xff" * 1300  # arrays of 65,535 arrays of ...
    yield prelude(len(nested)) + nested


@pytest.mark.parametrize("sent", list(claims()))
def test_claims_cost_no_memory(rig: CoreRig, sent: bytes) -> None:
    with session(rig) as client:
        tracemalloc.start()
        try:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            receive_rest(client)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < MIB


@pytest.fixture(scope="module")
def shared_rig() -> Iterator[CoreRig]:
    with core_rig() as rig:
        yield rig


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(sent=st.one_of(mutated(CONVERSATION), st.binary(max_size=200), st.binary(max_size=200).map(HELLO.__add__)))
def test_any_bytes_are_answered_with_frames_or_a_closed_connection(shared_rig: CoreRig, sent: bytes) -> None:
    with session(shared_rig) as client:
        try:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
        except ConnectionError:
            pass  # closed already
        answer = receive_rest(client)
    if answer_for(sent) is None or len(sent) < PRELUDE_BYTES:
        split_frames(answer)
    else:
        assert answer == answer_for(sent)
    assert shared_rig.core.lookup([KEY]) != [Status.PENDING]


@given(packed=st.one_of(st.binary(max_size=100), st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
).map(msgpack.packb)))  # fmt: skip
@settings(deadline=None)
def test_any_header_is_a_map_or_an_error(packed: bytes) -> None:
    try:
        fields = decode_header(packed)
    except InvalidInputError:
        return
    with pytest.raises(InvalidInputError):
        fields.number("no such field")
