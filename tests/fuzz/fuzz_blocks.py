"""Targets: the block protocol, by what a pool makes of an engine's bytes, and an engine of a pool's."""

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry

from block_rig import GOLDEN, split_frames
from fuzz_mending import HEADER_BYTES, mended_frames
from fuzz_streams import FeedStream
from fuzz_target import KEY, MENDED, Execute, Target, flagged, internal_errors, payload_of, require_none
from kvtier.codec.stored_form import decode, encode_header
from kvtier.config.credentials import AcceptedToken, Role
from kvtier.errors import CorruptBlockError, KvtierError
from kvtier.identity.keys import StoreKey
from kvtier.net.address import Address
from kvtier.net.wrong_protocol import PRELUDE_BYTES
from kvtier.protocol.block import Result, decode_header, decode_prelude, encode_head
from kvtier.protocol.block_socket import FrameSocket
from kvtier.protocol.groups import group
from kvtier.protocol.shared_memory import WORD
from kvtier.store.retention import RetentionLimits
from kvtier.testing.blocks import make_key, summed
from kvtier.tiers.pool.calls import PoolCalls
from kvtier.tiers.pool.carriage import Carriage
from kvtier.tiers.pool.carried import sealed_targets
from kvtier.tiers.pool.connection import PoolConnection
from kvtier.tiers.pool.sealed_blocks import SealedPayload
from kvtier.tiers.pool.socket_transport import SocketTransport
from kvtier_pool.audit import AuditLog
from kvtier_pool.auth import Authenticator
from kvtier_pool.block.client_memory import ClientLimits
from kvtier_pool.block.session import BlockSession
from kvtier_pool.block.shared_memory import SharedClients
from kvtier_pool.limits import PoolLimits
from kvtier_pool.logins import Logins
from kvtier_pool.metrics import PoolMetrics
from kvtier_pool.wrong_protocol import answer_for
from pool_rig import BLUE, MIB, RED, TENANTS, TOKENS, core_rig
from seal_rig import carriage_keys

_IN_STEPS = 0x02
"""Whether bytes come a few at a time."""
_STEP = 13
_SIZE = 600
_NOWHERE = Address.parse("unix:/nowhere")
_KEYS = [KEY, make_key("absent")]
_PAYLOAD = payload_of(_SIZE)
_SUMMED = summed(KEY, _PAYLOAD)
_HEADER = encode_header(KEY, _PAYLOAD)
_HELLO = GOLDEN["hello"][0]
_BLUE_HELLO = encode_head({"id": 1, "verb": "hello", "versions": [1], "token": TOKENS["blue"], "client": "a fuzzer"})
_LIMITS = PoolLimits(max_batch_blocks=64, max_batch_bytes=MIB, max_block_bytes=MIB // 2)


def _request(verb: str, payload: bytes = b"", **fields: object) -> bytes:
    return encode_head({"id": 2, "verb": verb, **fields}, len(payload)) + payload


def _pool_seeds() -> list[bytes]:
    """One request each, and whole conversations."""
    sized, plain = group(_KEYS, [_SIZE] * 2).fields, group(_KEYS).fields
    write = _request("write", _PAYLOAD, headers=_HEADER)
    read = _request("read", groups=sized)
    checksums = WORD.pack(_SUMMED[2])
    new = group([make_key("new")], [_SIZE]).fields
    requests = [
        write,
        read,
        _request("lookup", groups=plain),
        _request("usage"),
        _request("pin", groups=plain, ttl_ms=1000) + _request("unpin", groups=plain),
        _request("acquire", groups=sized) + _request("release", lease=1),
        _request("prepare", groups=new) + _request("commit", write=1, checksums=checksums),
        _request("prepare", groups=new) + _request("abort", write=1) + _request("map", slab=1),
        _request("discard", groups=plain),
    ]
    golden = b"".join(sent for sent, _ in GOLDEN.values())
    bodies = [*(write + request for request in requests), write + read * 2, b"".join(requests), golden]
    return [
        flagged(flags, body if flags & MENDED or body is golden else _HELLO + body)
        for body in bodies
        for flags in (0, MENDED, _IN_STEPS)
    ]


@contextlib.contextmanager
def _pool() -> Iterator[Execute]:
    """A session, its store and what it lends to clients on this host; whoever reads there takes no wrong block."""
    known = Authenticator(AcceptedToken(digest, Role.TENANT, name) for digest, name in TENANTS.items())
    metrics = PoolMetrics(CollectorRegistry())
    limits = ClientLimits(lease_s=10.0, max_held_bytes=MIB, max_prepared_s=60.0)
    pins = RetentionLimits(max_s=60.0, most_bytes=2 * MIB)
    with core_rig(shared=True, memory_bytes=32 * MIB, pins=pins) as rig, internal_errors() as errors:
        clients = SharedClients(rig.core, metrics, limits)

        def execute(data: bytes) -> None:
            if not data:
                return
            is_mended = bool(data[0] & MENDED)
            # What is forged is blue's: it stays in the pool, where red must not meet it.
            sent = _BLUE_HELLO + mended_frames(data[1:].replace(RED, BLUE)) if is_mended else data[1:]
            stream = FeedStream(sent, _STEP if data[0] & _IN_STEPS else len(sent) + 1)
            logins = Logins(known, AuditLog(None, metrics), metrics)  # anew: guesses make later answers late
            door = logins.at("block", "a fuzzer")
            BlockSession(FrameSocket(stream), rig.core, door, _LIMITS, metrics, clients).run()
            require_none(errors)
            if answer_for(sent) is None or len(sent) < PRELUDE_BYTES:
                _require_sound(bytes(stream.sent), is_mended)
            rig.core.check()

        yield execute


def _require_sound(answers: bytes, is_mended: bool) -> None:
    """All are frames; none says that the pool has failed; and no block that a reader would take is wrong."""
    assert all(header.text("result") != Result.INTERNAL for header in split_frames(answers))
    while answers:
        header_bytes, payload_bytes = decode_prelude(answers[:PRELUDE_BYTES])
        end = PRELUDE_BYTES + header_bytes
        header, payload = decode_header(answers[PRELUDE_BYTES:end]), answers[end : end + payload_bytes]
        if header.has("headers"):
            headers = header.data("headers")
            found = [headers[at : at + HEADER_BYTES] for at in range(0, len(headers), HEADER_BYTES)]
            _require_blocks(found, payload, is_mended)
        answers = answers[end + payload_bytes :]


def _require_blocks(headers: Sequence[bytes], payload: bytes, is_mended: bool) -> None:
    for head in headers:
        (nbytes,) = struct.unpack_from("<Q", head, 72)
        block, payload = payload[:nbytes], payload[nbytes:]
        try:
            key = decode(head, StoreKey(head[8:72]), block).key
        except CorruptBlockError:
            continue  # a client on this host has committed what it has not written: its readers take it for a miss
        assert key[:16] == (BLUE if is_mended else RED), "a block of another tenant"
        assert is_mended or key != KEY or block in (_PAYLOAD, b"golden payload"), "a wrong hit"
    assert not payload


_VERB, _SEALED = 0x1C, 0x20


def _answer(payload: bytes = b"", **fields: object) -> bytes:
    return encode_head({"id": 1, "result": "ok", **fields}, len(payload)) + payload


def _engine_seeds() -> list[bytes]:
    sealed, _ = SealedPayload(_SUMMED, Carriage(carriage_keys(1))).sealed()
    sealed_header = encode_header(KEY, bytes(sealed))
    end = _answer(statuses=b"", headers=b"")
    usage = {"name": "memory", "num_blocks": 1, "used_bytes": 2, "capacity_bytes": 3}
    answers = [
        (0, _answer(statuses=b"\1\0")),
        (1, _answer(_PAYLOAD, statuses=b"\1\0", headers=_HEADER) + end),
        (1, _answer(_PAYLOAD, statuses=b"\1", headers=_HEADER) + _answer(statuses=b"\0", headers=b"") + end),
        (1 | _SEALED >> 2, _answer(bytes(sealed), statuses=b"\1\0", headers=sealed_header) + end),
        (2, _answer(statuses=b"\0")),
        (3, _answer(num_discarded=2)),
        (4, _answer(tiers=[usage, usage])),
        (5, _answer(statuses=b"\0\0", ttl_ms=1000)),
        (6, _answer(num_unpinned=1)),
        (7, _answer(version=1, versions=[1], tenant=RED, lease_ms=1000, max_pin_ms=5)),
        (0, encode_head({"id": 1, "result": "limit_exceeded", "message": "split", "versions": [1]})),
    ]
    return [flagged(flags | verb << 2, body) for verb, body in answers for flags in (0, MENDED, _IN_STEPS)]


class _FedCalls(PoolCalls):
    """Calls over one connection, which is a stream that a test has made, and no way to another one."""

    def __init__(self, stream: FeedStream) -> None:
        super().__init__(_NOWHERE, TOKENS["red"], RED, connect_timeout_s=1.0, tls=None, namespaces=())
        connection = PoolConnection(stream)  # type: ignore[arg-type]
        connection.max_pin_s = 60.0
        self._idle.append(connection)

    def open_connection(self, deadline: float) -> PoolConnection:
        raise ConnectionRefusedError("there is no other")


def _fed(stream: FeedStream) -> SocketTransport:
    transport = SocketTransport(str(_NOWHERE), TOKENS["red"], RED)
    transport._calls = _FedCalls(stream)
    return transport


@contextlib.contextmanager
def _engine() -> Iterator[Execute]:
    """An engine's call, by the flags. With sealing keys, no pool whatever can make a wrong hit."""
    keys = Carriage(carriage_keys(1))

    def execute(data: bytes) -> None:
        if not data:
            return
        flags = data[0]
        sent = mended_frames(data[1:]) if flags & MENDED else data[1:]
        transport = _fed(FeedStream(sent, _STEP if flags & _IN_STEPS else len(sent) + 1))
        into = [bytearray(_SIZE) for _ in _KEYS]
        targets = sealed_targets(_KEYS, [memoryview(b) for b in into], keys if flags & _SEALED else None)
        hits: list[int] = []
        calls: list[Callable[[], object]] = [
            lambda: transport.lookup(_KEYS, 1.0),
            lambda: hits.extend(i for i, fault in transport.read(_KEYS, targets, 1.0) if fault is None),
            lambda: transport._send([_SUMMED], 1e12),
            lambda: transport.discard(_KEYS, 1.0),
            lambda: transport.usage(1.0),
            lambda: transport.pin(_KEYS, 1000, 1.0),
            lambda: transport.unpin(_KEYS, 1.0),
            lambda: transport.connect(),
        ]
        with contextlib.suppress(KvtierError):
            calls[(flags & _VERB) >> 2]()
        transport.close()
        for i in hits:
            is_right = i == 0 and into[i] == _PAYLOAD
            assert is_right or (flags & MENDED and not flags & _SEALED), "a wrong hit"

    yield execute


POOL = Target("pool", "the block protocol as a pool reads it: logins, all verbs, shared memory", _pool_seeds, _pool)
ENGINE = Target("engine", "the block protocol as an engine reads it, plain and sealed", _engine_seeds, _engine)
