"""Targets: the gRPC API, by its frames and by its verbs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from fuzz_mending import mended_block
from fuzz_target import KEY, MENDED, Execute, Target, flagged, internal_errors, payload_of, require_none
from kvtier.codec.stored_form import decode, encode_header
from kvtier.config.credentials import Role
from kvtier.errors import InvalidInputError
from kvtier.identity.keys import StoreKey, split_store_key
from kvtier.protocol import pool_pb2
from kvtier.protocol.frames import Frame, decode_frames, encode_blocks
from kvtier.store.retention import RetentionLimits
from kvtier.testing.blocks import make_key
from kvtier.tiers.base import Status
from kvtier_pool.auth import Login
from kvtier_pool.grpc.call_places import CallPlaces
from kvtier_pool.grpc.servicer import SERVICE, PoolServicer
from kvtier_pool.limits import PoolLimits
from kvtier_pool.metrics import PoolMetrics
from kvtier_pool.rates import TenantRates
from pool_rig import MIB, RED, core_rig

_SIZE = 600
_PAYLOAD = payload_of(_SIZE)
_HEADER = encode_header(KEY, _PAYLOAD)
_VERBS = ("Write", "Read", "Lookup", "Discard", "Usage", "Pin", "Unpin", "Events")
_VERB, _IN_PIECES = 0x0E, 0x10
_LIMITS = PoolLimits(max_batch_blocks=64, max_batch_bytes=MIB, max_block_bytes=MIB // 2)


def _frames_seeds() -> list[bytes]:
    blocks = [(0, 0, _HEADER, _PAYLOAD), (1, Status.MISS, b"", b""), (2, Status.HIT, _HEADER, _PAYLOAD)]
    return [flagged(0, message) for count in (1, 2, 3) for message in encode_blocks(blocks[:count])]


@contextlib.contextmanager
def _frames() -> Iterator[Execute]:
    """What is taken is what protobuf itself reads, and nothing that it refuses."""

    def execute(data: bytes) -> None:
        message = data[1:]
        try:
            frames = list(decode_frames(message))
        except InvalidInputError:
            return
        try:
            expected = pool_pb2.Frames.FromString(message)
        except DecodeError as error:
            raise AssertionError("protobuf refuses what decode_frames takes") from error
        assert [(f.block, bytes(f.header), bytes(f.payload)) for f in frames] == [
            (f.block, f.header, f.payload) for f in expected.frames
        ]

    yield execute


def _servicer_seeds() -> list[bytes]:
    _, namespace, chain_hash = split_store_key(KEY)
    _, _, absent = split_store_key(make_key("absent"))
    keys = pool_pb2.Keys(namespace_id=namespace, hashes=chain_hash + absent)
    read = pool_pb2.ReadGroup(keys=keys, payload_bytes=_SIZE)
    messages = [
        b"".join(encode_blocks([(0, 0, _HEADER, _PAYLOAD)])),
        pool_pb2.ReadRequest(groups=[read, read]).SerializeToString(),
        pool_pb2.LookupRequest(groups=[keys]).SerializeToString(),
        pool_pb2.DiscardRequest(groups=[keys]).SerializeToString(),
        b"",
        pool_pb2.PinRequest(groups=[keys], ttl_ms=1000).SerializeToString(),
        pool_pb2.UnpinRequest(groups=[keys]).SerializeToString(),
        b"",
    ]
    return [
        flagged(verb << 1 | flags, message)
        for verb, message in enumerate(messages)
        for flags in (0, MENDED, _IN_PIECES)
    ]


class _AbortedError(Exception):
    """The call has ended with a status."""


class _Context:
    """What a servicer asks of a call that grpc has taken."""

    def time_remaining(self) -> float:
        return 5.0

    def is_active(self) -> bool:
        return True

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False  # the call is over already: a stream of events has nothing to wait for

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        assert code is not grpc.StatusCode.INTERNAL, details
        raise _AbortedError(code, details)


class _Callers:
    """Everybody is red."""

    def login_of(self, context: object) -> Login:
        return Login(Role.TENANT, "red", None, None)

    def noting(self, serve: Callable[..., Any]) -> Callable[..., Any]:
        return serve

    def is_current(self, login: Login) -> bool:
        return True


@contextlib.contextmanager
def _servicer() -> Iterator[Execute]:
    """All verbs, without the server: messages in, messages out. A read takes no wrong block."""
    metrics = PoolMetrics(CollectorRegistry())
    places = CallPlaces(4, _LIMITS, {RED: "red"}, metrics)
    pins = RetentionLimits(max_s=60.0, most_bytes=2 * MIB)
    with core_rig(memory_bytes=32 * MIB, pins=pins) as rig, internal_errors() as errors:
        servicer = PoolServicer(rig.core, _Callers(), _LIMITS, metrics, places, TenantRates(metrics))  # type: ignore[arg-type]
        handler = servicer.handler()
        calls = {verb: handler.service(_Details(verb)) for verb in _VERBS}  # type: ignore[arg-type]

        def execute(data: bytes) -> None:
            if not data:
                return
            verb = _VERBS[(data[0] & _VERB) >> 1]
            body = _mended_write(data[1:]) if verb == "Write" and data[0] & MENDED else data[1:]
            half = len(body) // 2 if data[0] & _IN_PIECES else len(body)
            messages = [part for part in (body[:half], body[half:]) if part or verb != "Write"][: 1 + (verb == "Write")]
            answers = _answers(calls[verb], iter(messages))
            require_none(errors)
            if verb == "Read":
                _require_sound(answers)
            rig.core.check()

        yield execute


class _Details:
    """Details of a call, as grpc asks a handler whether it is its own."""

    def __init__(self, verb: str) -> None:
        self.method = f"/{SERVICE}/{verb}"
        self.invocation_metadata = ()


def _answers(call: Any, messages: Iterator[bytes]) -> list[bytes]:
    """What has come, before the call was aborted if it was."""
    answers: list[bytes] = []
    with contextlib.suppress(_AbortedError):
        if call.response_streaming:
            answers.extend(call.stream_stream(messages, _Context()))
        else:
            answers.append(call.stream_unary(messages, _Context()))
    return answers


def _mended_write(message: bytes) -> bytes:
    """The frames, each a block of its own whose checksum is right, where protobuf can read them."""
    try:
        frames = pool_pb2.Frames.FromString(message)
    except DecodeError:
        return message
    for frame in frames.frames:
        key = StoreKey(frame.header[8:72].ljust(72 - 8, b"\0"))
        frame.header = mended_block(frame.header[:96].ljust(96, b"\0") + frame.payload, key)[:96]
    return frames.SerializeToString()


def _require_sound(answers: list[bytes]) -> None:
    """Every block is whole, and its checksum holds; a checksum cannot be forged for what `KEY` has."""
    blocks: dict[int, list[Frame]] = {}
    for answer in answers:
        for frame in decode_frames(answer):
            blocks.setdefault(frame.block, []).append(frame)
    for frames in blocks.values():
        if frames[0].status != Status.HIT:
            continue
        header, payload = bytes(frames[0].header), b"".join(bytes(frame.payload) for frame in frames)
        key = decode(header, StoreKey(header[8:72]), payload).key
        assert key[:16] == RED, "a block of another tenant"


FRAMES = Target("frames", "frames of gRPC writes and reads, against protobuf itself", _frames_seeds, _frames)
SERVICER = Target("grpc", "the verbs of the gRPC API", _servicer_seeds, _servicer)
