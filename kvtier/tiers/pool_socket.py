"""The block protocol to the cache pool: what engines speak. Imports no grpc."""

import threading
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import repeat
from typing import TypeVar

from kvtier.clock import MONOTONIC
from kvtier.codec import HEADER_BYTES, encode_header
from kvtier.errors import ClosedError, ConfigError, InvalidInputError, UnavailableError
from kvtier.keys import NAMESPACE_ID_BYTES, TENANT_ID_BYTES, StoreKey, TenantId
from kvtier.tiers.base import ReadableBuffer, Status, Usage, WriteStatus
from kvtier.tiers.pool_connection import PoolConnection
from kvtier.wire.address import Address
from kvtier.wire.block import Fields, Verb

_NAMESPACE = slice(TENANT_ID_BYTES, TENANT_ID_BYTES + NAMESPACE_ID_BYTES)
_HASH = slice(TENANT_ID_BYTES + NAMESPACE_ID_BYTES, None)
_MAX_IDLE = 8
"""Connections kept for the next call; more threads than that at a time connect anew."""
_S = TypeVar("_S", bound=Sized)


class SocketTransport:
    """`PoolTransport` over a few connections, one for each thread that is in a call. Any thread.

    Connects when a call needs it. A connection that the pool has closed meanwhile, e.g. by a restart, is
    replaced by a fresh one and the call made again, once, as long as no answer has come. A call that fails or
    is late closes its connection, so that no late byte meets another call or its buffers.

    The tenant is the token's: the transport sends no tenant, and the pool answers for no other.
    """

    def __init__(self, address: str, token: str, tenant: TenantId, *, connect_timeout_s: float = 1.0) -> None:
        """Connects to nobody yet.

        :param address: `host:port` or `unix:/path`.
        :param token: the tenant's bearer token. Sent in the clear: use it on trusted networks.
        :param tenant: whose token it is; a pool that takes it for another's is refused.
        :param connect_timeout_s: for a connection and the pool's greeting together.
        """
        if not token or not all("!" <= c <= "~" for c in token):
            raise ConfigError("the pool's token must be printable ASCII without spaces, and not empty")
        self._address = Address.parse(address)
        self._token, self._tenant = token, tenant
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._idle: list[PoolConnection] = []
        """Ready for a call, the one used last at the end. Guarded by _lock."""
        self._closed = False
        """Guarded by _lock."""

    def connect(self) -> None:
        """Opens a connection ahead of the first call. Blocks up to `connect_timeout_s`; raises as the verbs do."""
        with self._translated():
            connection = self._open(MONOTONIC() + self._connect_timeout_s)
        self._give_back(connection)

    def lookup(self, keys: Sequence[StoreKey], timeout_s: float) -> list[Status]:
        """See `PoolTransport.lookup`."""
        groups = _grouped(keys)
        with self._call(Verb.LOOKUP, {"groups": [group for group, _ in groups]}, timeout_s) as (_, answer):
            found = _require_length(answer.members("statuses", Status), len(keys))
        statuses = [Status.MISS] * len(keys)
        for i, status in zip(_order(groups), found, strict=True):
            statuses[i] = status
        return statuses

    def read(
        self, keys: Sequence[StoreKey], into: Sequence[memoryview], timeout_s: float
    ) -> Iterator[tuple[int, bytes]]:
        """See `PoolTransport.read`. The blocks of one answer, about 8 MiB, are received and yielded together."""
        groups = _grouped(keys, [len(buffer) for buffer in into])
        order = _order(groups)
        num_answered = 0
        with self._call(Verb.READ, {"groups": [group for group, _ in groups]}, timeout_s) as (connection, answer):
            while statuses := answer.members("statuses", Status):
                places = order[num_answered : num_answered + len(statuses)]
                num_answered += len(_require_length(statuses, len(places)))
                hits = [i for i, status in zip(places, statuses, strict=True) if status is Status.HIT]
                headers = answer.data("headers")
                _require_length(headers, len(hits) * HEADER_BYTES)
                connection.receive_payload([into[i] for i in hits])
                for place, i in enumerate(hits):
                    yield i, headers[place * HEADER_BYTES : (place + 1) * HEADER_BYTES]
                answer = connection.receive_answer()
            _require_length(range(num_answered), len(keys))

    def write(self, items: Sequence[tuple[StoreKey, ReadableBuffer]], timeout_s: float) -> list[WriteStatus]:
        """See `PoolTransport.write`."""
        headers = b"".join(encode_header(key, payload) for key, payload in items)
        payloads = [payload for _, payload in items]
        with self._call(Verb.WRITE, {"headers": headers}, timeout_s, payloads) as (_, answer):
            return _require_length(answer.members("statuses", WriteStatus), len(items))

    def discard(self, keys: Sequence[StoreKey], timeout_s: float) -> int:
        """See `PoolTransport.discard`."""
        groups = _grouped(keys)
        with self._call(Verb.DISCARD, {"groups": [group for group, _ in groups]}, timeout_s) as (_, answer):
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
        fresh = self._open(min(deadline, MONOTONIC() + self._connect_timeout_s))
        try:
            return fresh, fresh.ask(verb, fields, payload, deadline)
        except BaseException:
            fresh.close()
            raise

    def _open(self, deadline: float) -> PoolConnection:
        with self._lock:
            if self._closed:
                raise ClosedError("the connection to the pool is closed")
        return PoolConnection.open(self._address, self._token, self._tenant, deadline)

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


_Group = tuple[dict[str, object], list[int]]
"""What the request says of keys of one namespace and size, and where in the batch they stand."""


def _grouped(keys: Sequence[StoreKey], sizes: Sequence[int] | None = None) -> list[_Group]:
    """:param sizes: payload bytes of each block, for verbs that ask for them."""
    places: dict[tuple[bytes, int], list[int]] = {}
    for i, (key, size) in enumerate(zip(keys, sizes or repeat(0, len(keys)), strict=True)):
        places.setdefault((key[_NAMESPACE], size), []).append(i)
    groups: list[_Group] = []
    for (namespace, size), of_group in places.items():
        group: dict[str, object] = {"namespace": namespace, "hashes": b"".join([keys[i][_HASH] for i in of_group])}
        if sizes is not None:
            group["payload_bytes"] = size
        groups.append((group, of_group))
    return groups


def _order(groups: Sequence[_Group]) -> list[int]:
    """Places in the batch in the order in which the pool answers."""
    return [i for _, places in groups for i in places]


def _require_length(found: _S, expected: int) -> _S:
    if len(found) != expected:
        raise InvalidInputError(f"garbled answer of the pool: {len(found)} items, {expected} expected")
    return found
