"""The block protocol to the cache pool: what engines speak. Imports no grpc."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvtier.clock import MONOTONIC
from kvtier.codec import HEADER_BYTES, PIECE_BYTES, ArrivingBlock, encode_header
from kvtier.errors import ClosedError, CorruptBlockError, UnavailableError
from kvtier.keys import NamespaceId, StoreKey, TenantId
from kvtier.metrics import Metrics
from kvtier.tiers.base import ReadableBuffer, Status, Usage, WriteStatus
from kvtier.tiers.pool.connection import PoolConnection
from kvtier.tiers.pool.groups import group, require_count
from kvtier.wire.address import Address
from kvtier.wire.block import Fields, Verb
from kvtier.wire.tls import ClientTls, require_credentials

_MAX_IDLE = 8
"""Connections kept for the next call; more threads than that at a time connect anew."""


class SocketTransport:
    """`PoolTransport` over a few connections, one for each thread that is in a call. Any thread.

    Connects when a call needs it. A connection that the pool has closed meanwhile, e.g. by a restart, is
    replaced by a fresh one and the call made again, once, as long as no answer has come. A call that fails or
    is late closes its connection, so that no late byte meets another call or its buffers.

    The tenant is the token's: the transport sends no tenant, and the pool answers for no other.
    """

    def __init__(
        self,
        address: str,
        token: str | None,
        tenant: TenantId,
        *,
        connect_timeout_s: float = 1.0,
        tls: ClientTls | None = None,
        namespaces: Sequence[NamespaceId] = (),
        metrics: Metrics | None = None,
    ) -> None:
        """Connects to nobody yet.

        :param address: `host:port` or `unix:/path`.
        :param token: the tenant's bearer token, sent in the clear without `tls`. None: a certificate stands for it.
        :param tenant: whose credentials they are; a pool that takes them for another's is refused.
        :param connect_timeout_s: for a connection, the handshake of TLS and the pool's greeting together.
        :param tls: over TCP; a Unix socket needs none.
        :param namespaces: all that will be used, for the pool to hold us to; none: any may be.
        :param metrics: takes the bytes moved, by path: `unix`, `tcp` or `tls`.
        """
        self._address = Address.parse(address)
        require_credentials(token, None if self._address.path else tls)
        self._token, self._tenant = token, tenant
        self._tls, self._namespaces = tls, tuple(namespaces)
        self._connect_timeout_s = connect_timeout_s
        path_bytes = (metrics if metrics is not None else Metrics()).path_bytes
        path = "unix" if self._address.path else "tcp" if tls is None else "tls"
        self._read_bytes = path_bytes.labels(path, "read")
        self._written_bytes = path_bytes.labels(path, "write")
        self._lock = threading.Lock()
        self._idle: list[PoolConnection] = []
        """Ready for a call, the one used last at the end. Guarded by _lock."""
        self._closed = False
        """Guarded by _lock."""

    def connect(self) -> None:
        """Opens a connection ahead of the first call. Blocks up to `connect_timeout_s`; raises as the verbs do."""
        with self._translated():
            connection = self.open_connection(MONOTONIC() + self._connect_timeout_s)
        self._give_back(connection)

    def lookup(self, keys: Sequence[StoreKey], timeout_s: float) -> list[Status]:
        """See `PoolTransport.lookup`."""
        grouped = group(keys)
        with self._call(Verb.LOOKUP, {"groups": grouped.fields}, timeout_s) as (_, answer):
            found = answer.members("statuses", Status)
            require_count(len(found), len(keys))
        statuses = [Status.MISS] * len(keys)
        for i, status in zip(grouped.order, found, strict=True):
            statuses[i] = status
        return statuses

    def read(
        self, keys: Sequence[StoreKey], into: Sequence[memoryview], timeout_s: float
    ) -> Iterator[tuple[int, CorruptBlockError | None]]:
        """See `PoolTransport.read`. Each piece is checked as soon as it is there."""
        grouped = group(keys, [len(buffer) for buffer in into])
        num_answered = 0
        with self._call(Verb.READ, {"groups": grouped.fields}, timeout_s) as (connection, answer):
            while statuses := answer.members("statuses", Status):
                places = grouped.order[num_answered : num_answered + len(statuses)]
                require_count(len(statuses), len(places))
                num_answered += len(statuses)
                hits = [i for i, status in zip(places, statuses, strict=True) if status is Status.HIT]
                headers = answer.data("headers")
                require_count(len(headers), len(hits) * HEADER_BYTES)
                connection.require_payload(sum(len(into[i]) for i in hits))
                arriving = [
                    _Arriving(i, headers[at * HEADER_BYTES : (at + 1) * HEADER_BYTES], keys[i], into[i])
                    for at, i in enumerate(hits)
                ]
                self._read_bytes.inc(sum(len(block.into) for block in arriving))
                yield from _receive(connection, arriving)
                answer = connection.receive_answer()
            require_count(num_answered, len(keys))

    def write(self, items: Sequence[tuple[StoreKey, ReadableBuffer]], timeout_s: float) -> list[WriteStatus]:
        """See `PoolTransport.write`."""
        headers = b"".join(encode_header(key, payload) for key, payload in items)
        payloads = [payload for _, payload in items]
        with self._call(Verb.WRITE, {"headers": headers}, timeout_s, payloads) as (_, answer):
            statuses = answer.members("statuses", WriteStatus)
        require_count(len(statuses), len(items))
        self._written_bytes.inc(sum(map(len, payloads)))
        return statuses

    def discard(self, keys: Sequence[StoreKey], timeout_s: float) -> int:
        """See `PoolTransport.discard`."""
        with self._call(Verb.DISCARD, {"groups": group(keys).fields}, timeout_s) as (_, answer):
            return answer.number("num_discarded")

    def usage(self, timeout_s: float) -> Usage:
        """See `PoolTransport.usage`."""
        with self._call(Verb.USAGE, {}, timeout_s) as (_, answer):
            tiers = [
                Usage(tier.number("num_blocks"), tier.number("used_bytes"), tier.number("capacity_bytes"))
                for tier in answer.maps("tiers")
            ]
        return max(tiers, key=lambda tier: tier.used_bytes, default=Usage(0, 0, 0))

    def close(self) -> None:
        """Closes what is idle now, and the connections of calls in flight when they end. Idempotent."""
        with self._lock:
            self._closed = True
        self._drop_idle()

    @contextmanager
    def _call(
        self, verb: Verb, fields: Mapping[str, object], timeout_s: float, payload: Sequence[ReadableBuffer] = ()
    ) -> Iterator[tuple[PoolConnection, Fields]]:
        """One request. Gives the first answer, and the connection for more; takes it back when all went well."""
        with self._translated():
            connection, answer = self._ask(verb, fields, payload, MONOTONIC() + timeout_s)
            try:
                yield connection, answer
                connection.require_end()
            except BaseException:
                connection.close()
                raise
        self._give_back(connection)

    def _ask(
        self, verb: Verb, fields: Mapping[str, object], payload: Sequence[ReadableBuffer], deadline: float
    ) -> tuple[PoolConnection, Fields]:
        """The first answer, and the connection that it came on."""
        used = self._take_idle()
        if used is not None:
            try:
                return used, used.ask(verb, fields, payload, deadline)
            except ConnectionError:
                used.close()
                self._drop_idle()  # of the same age, so most likely closed as well
            except BaseException:
                used.close()
                raise
        fresh = self.open_connection(min(deadline, MONOTONIC() + self._connect_timeout_s))
        try:
            return fresh, fresh.ask(verb, fields, payload, deadline)
        except BaseException:
            fresh.close()
            raise

    def open_connection(self, deadline: float) -> PoolConnection:
        with self._lock:
            if self._closed:
                raise ClosedError("the connection to the pool is closed")
        return PoolConnection.open(
            self._address, self._token, self._tenant, deadline, tls=self._tls, namespaces=self._namespaces
        )

    def _take_idle(self) -> PoolConnection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _give_back(self, connection: PoolConnection) -> None:
        with self._lock:
            kept = not self._closed and len(self._idle) < _MAX_IDLE
            if kept:
                self._idle.append(connection)
        if not kept:
            connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            dropped, self._idle = self._idle, []
        for connection in dropped:
            connection.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Whatever a connection fails with, as one of kvtier's exceptions."""
        try:
            yield
        except OSError as error:
            raise UnavailableError(f"pool at {self._address}: {error}") from error


class _Arriving:
    """A block that is being received."""

    __slots__ = ("block", "fault", "index", "into")

    def __init__(self, index: int, header: bytes, key: StoreKey, into: memoryview) -> None:
        self.index = index
        self.into = into
        self.block: ArrivingBlock | None = None
        self.fault: CorruptBlockError | None = None
        """Why its bytes are received and not wanted."""
        try:
            self.block = ArrivingBlock(header, key, len(into))
        except CorruptBlockError as error:
            self.fault = error

    def finish(self) -> CorruptBlockError | None:
        """What is wrong with it, now that all of it is there."""
        try:
            if self.block is not None:
                self.block.require_good()
        except CorruptBlockError as error:
            return error
        return self.fault


def _receive(
    connection: PoolConnection, arriving: Sequence[_Arriving]
) -> Iterator[tuple[int, CorruptBlockError | None]]:
    """Receives these blocks in order, about a piece at a time: parts of large blocks, or several small ones."""
    for parts in _pieces(arriving):
        connection.receive_into([part for _, part, _ in parts])
        for block, part, is_last in parts:
            if block.block is not None:
                block.block.update(part)
            if is_last:
                yield block.index, block.finish()


def _pieces(arriving: Sequence[_Arriving]) -> Iterator[list[tuple[_Arriving, memoryview, bool]]]:
    """(block, part of its buffer, whether it is the last one) for about `PIECE_BYTES` at a time."""
    parts: list[tuple[_Arriving, memoryview, bool]] = []
    room = PIECE_BYTES
    for block in arriving:
        for start in range(0, max(1, len(block.into)), PIECE_BYTES):
            part = block.into[start : start + PIECE_BYTES]
            parts.append((block, part, start + PIECE_BYTES >= len(block.into)))
            room -= len(part)
            if room <= 0:
                yield parts
                parts, room = [], PIECE_BYTES
    if parts:
        yield parts
