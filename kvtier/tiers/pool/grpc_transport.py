"""gRPC to the cache pool. The only module on the engine's side that imports grpc."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, groupby
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvtier.codec.stored_form import decode, header_from_checksum
from kvtier.errors import CorruptBlockError, InvalidInputError
from kvtier.identity.keys import NAMESPACE_ID_BYTES, TENANT_ID_BYTES, StoreKey
from kvtier.memory.pages import copy_bytes
from kvtier.memory.pieces import together
from kvtier.metrics import Metrics
from kvtier.net.certificates import read_pem
from kvtier.net.tls import ClientTls, require_credentials
from kvtier.protocol import pool_pb2
from kvtier.protocol.frames import decode_frames, encode_blocks
from kvtier.protocol.groups import require_count
from kvtier.protocol.retention import PinStatus
from kvtier.protocol.status import error_for
from kvtier.system.tracing import tracing
from kvtier.tiers.base import Item, Status, Usage, WriteStatus
from kvtier.tiers.pool.carried import Incoming, Outgoing, carried, land_whole, landing_whole
from kvtier.tiers.pool.path_counts import PathCounts

_SERVICE = "/" + pool_pb2.DESCRIPTOR.services_by_name["Pool"].full_name + "/"
_NAMESPACE = slice(TENANT_ID_BYTES, TENANT_ID_BYTES + NAMESPACE_ID_BYTES)
_HASH = slice(TENANT_ID_BYTES + NAMESPACE_ID_BYTES, None)
_MAX_MESSAGE_BYTES = 4 << 20
_TLS_REMEDIES = (
    ("WRONG_VERSION_NUMBER", "no TLS is spoken there: take tls_ca out of [pool], or give the pool a tls_certificate"),
    ("Hostname Verification", "the pool's certificate is not for that host: see tls_server_name in [pool]"),
    ("CERTIFICATE_VERIFY_FAILED", "the pool's certificate must be valid, and signed by a CA in tls_ca of [pool]"),
    (
        ": Socket closed",
        "if the pool speaks TLS: is tls_ca set in [pool], and does the pool's tls_client_ca ask for another "
        "certificate than tls_certificate?",
    ),
)
"""Parts of what gRPC says, and what they mean."""


class GrpcTransport:
    """`PoolTransport` over one gRPC channel. Any thread. Connects with the first call, and again by itself.

    The tenant is the token's: the transport sends no tenant, and the pool answers for no other.
    """

    def __init__(
        self,
        address: str,
        token: str | None,
        *,
        connect_timeout_s: float = 1.0,
        tls: ClientTls | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """
        :param address: `host:port` or `unix:/path`.
        :param token: the tenant's bearer token, sent in the clear without `tls`. None: a certificate stands for it.
        :param connect_timeout_s: one attempt to connect; calls made meanwhile fail with it.
        :param tls: over TCP; a Unix socket needs none. Its files are read now, and not again when they are renewed.
        :param metrics: takes the bytes moved.
        """
        require_credentials(token, None if address.startswith("unix:") else tls)
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._channel = _channel(address, connect_timeout_s, tls)
        self._counts = PathCounts("grpc", metrics)
        # No (de)serializers: messages are bytes, encoded where it matters by hand.
        self._lookup: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(_SERVICE + "Lookup")
        self._read: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(_SERVICE + "Read")
        self._write: grpc.StreamUnaryMultiCallable[bytes, bytes] = self._channel.stream_unary(_SERVICE + "Write")
        self._discard: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(_SERVICE + "Discard")
        self._pin: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(_SERVICE + "Pin")
        self._unpin: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(_SERVICE + "Unpin")
        self._usage: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(_SERVICE + "Usage")

    def lookup(self, keys: Sequence[StoreKey], timeout_s: float) -> list[Status]:
        """Asks for a status per key, in order, in one gRPC call."""
        request = pool_pb2.LookupRequest(groups=_groups(keys)).SerializeToString()
        with _translated():
            answer = self._lookup(request, timeout=timeout_s, metadata=self._traced())
            statuses = [Status(byte) for byte in pool_pb2.LookupResponse.FromString(answer).statuses]
        require_count(len(statuses), len(keys))
        return statuses

    def read(
        self, keys: Sequence[StoreKey], into: Sequence[Incoming], timeout_s: float
    ) -> Iterator[tuple[int, CorruptBlockError | None]]:
        """Yields the index of each block that arrived, with None once it is in `into`, or with what is wrong."""
        runs = groupby(zip(keys, into, strict=True), key=lambda item: (item[0][_NAMESPACE], len(item[1])))
        groups = [
            pool_pb2.ReadGroup(keys=_keys_of([key for key, _ in run]), payload_bytes=size) for (_, size), run in runs
        ]
        request = pool_pb2.ReadRequest(groups=groups).SerializeToString()
        with self._counts.timed("read"), _translated():
            stream = self._read(request, timeout=timeout_s, metadata=self._traced())
            try:
                landings = [landing_whole(target) for target in into]
                for i, header in _receive(stream, landings):
                    self._counts.read_bytes.inc(len(into[i]))
                    fault = _fault(header, keys[i], landings[i])
                    yield i, fault or land_whole(landings[i], into[i])
            finally:
                stream.cancel()

    def lease(
        self, keys: Sequence[StoreKey], nbytes: int, ready: Collection[int], timeout_s: float, *, verified: bool
    ) -> None:
        """Lends nothing: the pool's memory cannot be reached from here."""

    def write(self, items: Sequence[Item[Outgoing]], timeout_s: float) -> list[WriteStatus]:
        """Sends all blocks as a stream in one gRPC call; a status per block, in order."""
        # Runs on a thread of grpc, which may still be copying a block when the call has timed out. What it
        # copies then is sent to nobody.
        blocks = (
            (i, 0, header_from_checksum(items[i][0], len(payload), checksum), together(payload))
            for i, (payload, checksum) in enumerate(map(carried, items))
        )
        with self._counts.timed("write"), _translated():
            answer = self._write(encode_blocks(blocks), timeout=timeout_s, metadata=self._traced())
            statuses = [WriteStatus(byte) for byte in pool_pb2.WriteResponse.FromString(answer).statuses]
        self._counts.written_bytes.inc(sum(len(payload) for _, payload, _ in items))
        require_count(len(statuses), len(items))
        return statuses

    def discard(self, keys: Sequence[StoreKey], timeout_s: float) -> int:
        """Forgets these keys, in one gRPC call; returns how many were there."""
        request = pool_pb2.DiscardRequest(groups=_groups(keys)).SerializeToString()
        with _translated():
            answer = self._discard(request, timeout=timeout_s, metadata=self._traced())
            return pool_pb2.DiscardResponse.FromString(answer).num_discarded

    def pin(self, keys: Sequence[StoreKey], ttl_ms: int, timeout_s: float) -> list[PinStatus] | None:
        """Pins blocks for `ttl_ms`; a status per key, in order. None when the pool has no pins, which is no failure."""
        request = pool_pb2.PinRequest(groups=_groups(keys), ttl_ms=ttl_ms).SerializeToString()
        with _translated():
            answer = self._ask_of_pins(self._pin, request, timeout_s)
            if answer is None:
                return None
            statuses = [PinStatus(byte) for byte in pool_pb2.PinResponse.FromString(answer).statuses]
        require_count(len(statuses), len(keys))
        return statuses

    def unpin(self, keys: Sequence[StoreKey], timeout_s: float) -> int | None:
        """Ends pins; returns how many there were, None when the pool has no pins."""
        request = pool_pb2.UnpinRequest(groups=_groups(keys)).SerializeToString()
        with _translated():
            answer = self._ask_of_pins(self._unpin, request, timeout_s)
            return None if answer is None else pool_pb2.UnpinResponse.FromString(answer).num_unpinned

    def usage(self, timeout_s: float) -> Usage:
        """Blocks and bytes of this tenant in the tier of the pool that keeps most of them, and that tier's capacity."""
        with _translated():
            answer = self._usage(b"", timeout=timeout_s, metadata=self._traced())
            tiers = pool_pb2.UsageResponse.FromString(answer).tiers
        largest = max(tiers, key=lambda tier: tier.used_bytes, default=pool_pb2.TierUsage())
        return Usage(largest.num_blocks, largest.used_bytes, largest.capacity_bytes)

    def _traced(self) -> tuple[tuple[str, str], ...]:
        """The metadata of a call: who makes it, and within which trace."""
        context = tracing.context()
        return (*self._metadata, ("traceparent", context)) if context else self._metadata

    def close(self) -> None:
        """Closes the connection; calls in flight fail. Idempotent."""
        self._channel.close()

    def _ask_of_pins(
        self, call: "grpc.UnaryUnaryMultiCallable[bytes, bytes]", request: bytes, timeout_s: float
    ) -> bytes | None:
        """None from a pool without pins."""
        try:
            return call(request, timeout=timeout_s, metadata=self._traced())
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return None
            raise


def _channel(address: str, connect_timeout_s: float, tls: ClientTls | None) -> grpc.Channel:
    options: list[tuple[str, Any]] = [
        # A connection of its own: another tenant's trouble is not ours.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.min_reconnect_backoff_ms", max(1, round(connect_timeout_s * 1000))),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
    ]
    compression = grpc.Compression.NoCompression
    if tls is None or address.startswith("unix:"):
        return grpc.insecure_channel(address, options=options, compression=compression)
    tls.check()  # names what is wrong, which gRPC does not
    if tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    *pair, ca = map(read_pem, tls.files.named)
    certificate, key = pair or (None, None)
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    return grpc.secure_channel(address, credentials, options=options, compression=compression)


def _receive(stream: Iterator[bytes], into: Sequence[memoryview]) -> Iterator[tuple[int, bytes]]:
    """Puts frames together; yields a block's index and header when its buffer is full."""
    block, filled, header = -1, 0, b""
    for frame in chain.from_iterable(map(decode_frames, stream)):
        if frame.block >= len(into):
            raise InvalidInputError(f"frame of block {frame.block}: {len(into)} were asked for")
        if frame.header or frame.status != Status.HIT:
            block, filled, header = frame.block, 0, bytes(frame.header)
        if frame.status != Status.HIT:
            continue
        end = filled + len(frame.payload)
        if frame.block != block or end > len(into[block]):
            raise InvalidInputError(f"frame of block {frame.block}: out of order or longer than asked for")
        copy_bytes(into[block][filled:end], frame.payload)
        filled = end
        if filled == len(into[block]):
            yield block, header


def _fault(header: bytes, key: StoreKey, payload: memoryview) -> CorruptBlockError | None:
    try:
        decode(header, key, payload)
    except CorruptBlockError as error:
        return error
    return None


@contextmanager
def _translated() -> Iterator[None]:
    """Turns whatever a call can end with into one of kvtier's exceptions."""
    try:
        yield
    except grpc.RpcError as error:
        # What a call raises is a Call too, which the stubs of RpcError do not say.
        if not isinstance(error, grpc.Call):
            raise error_for(grpc.StatusCode.UNKNOWN, str(error)) from error
        raise error_for(error.code(), _with_remedy(error.details() or "")) from error
    except (DecodeError, ValueError) as error:
        raise InvalidInputError(f"garbled answer of the pool: {error}") from error


def _with_remedy(details: str) -> str:
    """What gRPC says of a connection that failed, and what to do about it where that is TLS."""
    remedy = next((remedy for sign, remedy in _TLS_REMEDIES if sign in details), None)
    return details if remedy is None else f"{details}; {remedy}"


def _groups(keys: Sequence[StoreKey]) -> list[pool_pb2.Keys]:
    """Runs of keys of one namespace, in order."""
    return [_keys_of(list(run)) for _, run in groupby(keys, key=lambda key: key[_NAMESPACE])]


def _keys_of(keys: Sequence[StoreKey]) -> pool_pb2.Keys:
    return pool_pb2.Keys(namespace_id=keys[0][_NAMESPACE], hashes=b"".join(key[_HASH] for key in keys))
