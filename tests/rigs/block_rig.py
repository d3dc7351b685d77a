"""Raw ends of the block protocol, and the frames that must never change while version 1 is spoken."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis.strategies as st
from prometheus_client import CollectorRegistry

from kvtier.codec.stored_form import encode_header
from kvtier.config.credentials import AcceptedToken, Role
from kvtier.net.stream import PlainStream
from kvtier.net.wrong_protocol import PRELUDE_BYTES
from kvtier.protocol.block import Fields, decode_header, decode_prelude
from kvtier.protocol.block_socket import FrameSocket
from kvtier.testing.contract import make_key
from kvtier_pool.audit import AuditLog
from kvtier_pool.auth import Authenticator
from kvtier_pool.block.session import BlockSession
from kvtier_pool.block.shared_memory import SharedClients
from kvtier_pool.limits import PoolLimits
from kvtier_pool.logins import Logins
from kvtier_pool.metrics import PoolMetrics
from kvtier_pool.rates import TenantRates
from pool_rig import TENANTS, WAIT_S, CoreRig

KEY = make_key("golden")
PAYLOAD = b"golden payload"
HEADER = encode_header(KEY, PAYLOAD)
GOLDEN: dict[str, tuple[bytes, bytes]] = {
    "hello": (
        bytes.fromhex(
            "4b56544643000000000000000000000085a2696401a476657262a568656c6c6fa876657273696f6e739101a5746f6b656eb3"
            "7265642d746f6b656e2d666f722d7465737473a6636c69656e74a66b7674696572"
        ),
        bytes.fromhex(
            "4b5654463c000000000000000000000085a2696401a6726573756c74a26f6ba876657273696f6e739101a776657273696f6e"
            "01a674656e616e74c410edffbbe14de80b6021870359901ff95e"
        ),
    ),
    "write": (
        bytes.fromhex(
            "4b5654467a0000000e0000000000000083a2696402a476657262a57772697465a768656164657273c4604b56544201000000"
            "edffbbe14de80b6021870359901ff95e6e616d6573706163652d6e756d626572b9f5203fc6d1830b1a6f22021a18481651fd"
            "a291c44bd281ddc44181c31fe0040e000000000000000e0000000000000079912285405832df676f6c64656e207061796c6f"
            "6164"
        ),
        bytes.fromhex("4b5654461b000000000000000000000083a2696402a6726573756c74a26f6ba87374617475736573c40100"),
    ),
    "lookup": (
        bytes.fromhex(
            "4b5654467f000000000000000000000083a2696403a476657262a66c6f6f6b7570a667726f7570739182a96e616d65737061"
            "6365c4106e616d6573706163652d6e756d626572a6686173686573c440b9f5203fc6d1830b1a6f22021a18481651fda291c4"
            "4bd281ddc44181c31fe0046a7bf456417edefb8676d0dacfd5c5b0dd0724fbd9a15c06d7a6d22c6e5b3c33"
        ),
        bytes.fromhex("4b5654461c000000000000000000000083a2696403a6726573756c74a26f6ba87374617475736573c4020100"),
    ),
    "read": (
        bytes.fromhex(
            "4b5654468c000000000000000000000083a2696404a476657262a472656164a667726f7570739183a96e616d657370616365"
            "c4106e616d6573706163652d6e756d626572a6686173686573c440b9f5203fc6d1830b1a6f22021a18481651fda291c44bd2"
            "81ddc44181c31fe0046a7bf456417edefb8676d0dacfd5c5b0dd0724fbd9a15c06d7a6d22c6e5b3c33ad7061796c6f61645f"
            "62797465730e"
        ),
        bytes.fromhex(
            "4b565446860000000e0000000000000084a2696404a6726573756c74a26f6ba87374617475736573c4020100a76865616465"
            "7273c4604b56544201000000edffbbe14de80b6021870359901ff95e6e616d6573706163652d6e756d626572b9f5203fc6d1"
            "830b1a6f22021a18481651fda291c44bd281ddc44181c31fe0040e000000000000000e0000000000000079912285405832df"
            "676f6c64656e207061796c6f61644b56544624000000000000000000000084a2696404a6726573756c74a26f6ba873746174"
            "75736573c400a768656164657273c400"
        ),
    ),
    "usage": (
        bytes.fromhex("4b56544610000000000000000000000082a2696405a476657262a57573616765"),
        bytes.fromhex(
            "4b5654465d000000000000000000000083a2696405a6726573756c74a26f6ba574696572739185a46e616d65a66d656d6f72"
            "79aa6e756d5f626c6f636b7301aa757365645f62797465730eae63617061636974795f6279746573ce00800000ac75736564"
            "5f70657263656e7400"
        ),
    ),
    "discard": (
        bytes.fromhex(
            "4b56544660000000000000000000000083a2696406a476657262a764697363617264a667726f7570739182a96e616d657370"
            "616365c4106e616d6573706163652d6e756d626572a6686173686573c420b9f5203fc6d1830b1a6f22021a18481651fda291"
            "c44bd281ddc44181c31fe004"
        ),
        bytes.fromhex("4b5654461e000000000000000000000083a2696406a6726573756c74a26f6bad6e756d5f64697363617264656401"),
    ),
}
"""Request and answer of one conversation, in order."""


@contextlib.contextmanager
def session(
    rig: CoreRig,
    limits: PoolLimits | None = None,
    clients: SharedClients | None = None,
    rates: Callable[[PoolMetrics], TenantRates] = TenantRates,
) -> Iterator[socket.socket]:
    """A real session on a thread; the client's end of its connection. Its end is waited for."""
    ours, theirs = socket.socketpair()
    metrics = PoolMetrics(CollectorRegistry())
    known = Authenticator(AcceptedToken(digest, Role.TENANT, name) for digest, name in TENANTS.items())
    logins = Logins(known, AuditLog(None, metrics), metrics)
    served = BlockSession(
        FrameSocket(PlainStream(theirs)),
        rig.core,
        logins.at("block", "a test"),
        limits or PoolLimits(),
        metrics,
        clients,
        rates=rates(metrics),
    )
    thread = threading.Thread(target=served.run)
    thread.start()
    try:
        ours.settimeout(WAIT_S)
        yield ours
    finally:
        ours.close()
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the session hangs"


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        assert piece, f"closed after {len(data)} of {count} bytes: {data!r}"
        data += piece
    return data


def receive_rest(connection: socket.socket) -> bytes:
    """All until the other end closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):  # it closed with bytes of ours unread
        while piece := connection.recv(1 << 16):
            data += piece
    return data


def receive_frame(connection: socket.socket) -> tuple[Fields, bytes]:
    header_bytes, payload_bytes = decode_prelude(receive_exactly(connection, PRELUDE_BYTES))
    return decode_header(receive_exactly(connection, header_bytes)), receive_exactly(connection, payload_bytes)


def split_frames(data: bytes) -> list[Fields]:
    """Headers of all frames in `data`, which must end with the last of them."""
    headers = []
    while data:
        header_bytes, payload_bytes = decode_prelude(data[:PRELUDE_BYTES])
        end = PRELUDE_BYTES + header_bytes
        headers.append(decode_header(data[PRELUDE_BYTES:end]))
        assert len(data) >= end + payload_bytes
        data = data[end + payload_bytes :]
    return headers


@contextlib.contextmanager
def recorded_pool(path: Path, golden: dict[str, tuple[bytes, bytes]], times: int = 1) -> Iterator[list[bytes]]:
    """A pool that is nothing but golden frames, for so many connections; what it was sent."""
    received: list[bytes] = []

    def serve() -> None:
        for _ in range(times):
            connection, _ = listening.accept()
            with connection, contextlib.suppress(AssertionError):  # closed before the end
                connection.settimeout(WAIT_S)
                for request, answer in golden.values():
                    received.append(receive_exactly(connection, len(request)))
                    connection.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield received
        thread.join(WAIT_S)
        assert not thread.is_alive()


@st.composite
def mutated(draw: st.DrawFn, conversation: bytes, start: int = 0) -> bytes:
    """A conversation with some bytes changed, cut out or put in, from `start` on."""
    data = bytearray(conversation)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(start, len(data)))
        removed = draw(st.sampled_from([0, 0, 1, 1, 1, 4, 100]))
        data[at : at + removed] = draw(st.binary(max_size=8))
    return bytes(data)
