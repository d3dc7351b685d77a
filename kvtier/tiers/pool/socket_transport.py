"""The block protocol to the cache pool: what engines speak. Imports no grpc."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

from kvtier.clock import MONOTONIC
from kvtier.codec.stored_form import HEADER_BYTES, header_from_checksum
from kvtier.errors import CorruptBlockError
from kvtier.identity.keys import NamespaceId, StoreKey, TenantId
from kvtier.memory.pieces import together
from kvtier.metrics import Metrics
from kvtier.net.address import Address
from kvtier.net.tls import ClientTls
from kvtier.protocol.arriving import CHECKSUM, ArrivingBlock, receive_blocks
from kvtier.protocol.block import MAX_FRAME_BLOCKS, Fields, Verb
from kvtier.protocol.groups import group, require_count, windows
from kvtier.protocol.retention import PinStatus
from kvtier.tiers.base import Item, Status, Usage, WriteStatus
from kvtier.tiers.pool.calls import PoolCalls
from kvtier.tiers.pool.carried import (
    Incoming,
    Outgoing,
    arriving,
    can_stream,
    carried,
    land,
    landing,
    streamed,
)
from kvtier.tiers.pool.connection import PoolConnection
from kvtier.tiers.pool.path_counts import PathCounts
from kvtier.tiers.pool.sealed_blocks import SealedArrival

_WRITE_PART_BYTES = 4 << 20
"""Payload of one request of a write: little enough to stay in the processor's cache from its checksum to the socket."""
_STREAMED_PART_BYTES = 16 << 20
"""Payload of one request of a write of blocks that are made while they are sent."""
_T = TypeVar("_T")


class _WithoutPins(Exception):
    """The pool has offered none to this connection."""


class SocketTransport:
    """`PoolTransport` over the connections of `PoolCalls`. Any thread.

    The tenant is the token's: the transport sends no tenant, and the pool answers for no other.
    """

    def __init__(  # noqa: PLR0913 - what may be set, by keyword
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
        where = Address.parse(address)
        self._calls = PoolCalls(
            where, token, tenant, connect_timeout_s=connect_timeout_s, tls=tls, namespaces=namespaces
        )
        path = "unix" if where.path else "tcp" if tls is None else "tls"
        self._counts = PathCounts(path, metrics)

    def connect(self) -> None:
        """Opens a connection ahead of the first call. Blocks up to `connect_timeout_s`; raises as the verbs do."""
        self._calls.connect()

    def open_connection(self, deadline: float) -> PoolConnection:
        """Returns a connection that belongs to the caller, who closes it."""
        return self._calls.open_connection(deadline)

    def lookup(self, keys: Sequence[StoreKey], timeout_s: float) -> list[Status]:
        """Asks for a status per key, in order, in one request."""
        return self._look(keys, MONOTONIC() + timeout_s)[0]

    def read(
        self, keys: Sequence[StoreKey], into: Sequence[Incoming], timeout_s: float
    ) -> Iterator[tuple[int, CorruptBlockError | None]]:
        """Reads blocks through the socket, and yields (index, None) for each that has come, or why it is not that
        block. Each piece is checked as soon as it is there."""
        grouped = group(keys, [len(buffer) for buffer in into])
        num_answered = 0
        deadline = MONOTONIC() + timeout_s
        with (
            self._counts.timed("read"),
            self._calls.call(Verb.READ, {"groups": grouped.fields}, deadline) as (connection, answer),
        ):
            while statuses := answer.members("statuses", Status):
                places = grouped.order[num_answered : num_answered + len(statuses)]
                require_count(len(statuses), len(places))
                num_answered += len(statuses)
                hits = [i for i, status in zip(places, statuses, strict=True) if status is Status.HIT]
                headers = answer.data("headers")
                require_count(len(headers), len(hits) * HEADER_BYTES)
                connection.require_payload(sum(len(into[i]) for i in hits))
                found = [(i, headers[at * HEADER_BYTES :][:HEADER_BYTES]) for at, i in enumerate(hits)]
                yield from self._receive(connection, found, keys, into)
                answer = connection.receive_answer(deadline, more=True)
            require_count(num_answered, len(keys))

    def _receive(
        self,
        connection: PoolConnection,
        found: Sequence[tuple[int, bytes]],
        keys: Sequence[StoreKey],
        into: Sequence[Incoming],
    ) -> Iterator[tuple[int, CorruptBlockError | None]]:
        """Receives the blocks of one answer, given by index and header; index and what is wrong with it of each."""
        landings: dict[int, memoryview] = {}

        def coming() -> Iterator[ArrivingBlock | SealedArrival]:
            for i, header in found:
                landings[i] = landing(into[i])
                yield arriving(i, header, keys[i], into[i], landings[i])

        for block in receive_blocks(connection.receive_into, coming()):
            self._counts.read_bytes.inc(block.nbytes)
            landed = landings.pop(block.tag)
            if block.fault is None:
                land(landed, into[block.tag])
            yield block.tag, block.fault

    def lease(
        self, keys: Sequence[StoreKey], nbytes: int, ready: Collection[int], timeout_s: float, *, verified: bool
    ) -> None:
        """Lends nothing: the pool's memory cannot be reached through the socket."""

    def write(self, items: Sequence[Item[Outgoing]], timeout_s: float) -> list[WriteStatus]:
        """Writes blocks; a status per block, in order. Asks first what is there already: that is not sent,
        and nothing is while the pool says that this tenant asks too fast."""
        deadline = MONOTONIC() + timeout_s
        if not items:
            return []
        there, answer = self._look([key for key, _, _ in items], deadline, writes=True)
        if answer.has("throttled"):
            return [WriteStatus.THROTTLED] * len(items)
        statuses = [WriteStatus.FAILED if status is Status.MISS else WriteStatus.EXISTS for status in there]
        absent = [i for i, status in enumerate(statuses) if status is WriteStatus.FAILED]
        sent = self._send([items[i] for i in absent], deadline, may_stream=answer.has("checksums_behind"))
        for i, status in zip(absent, sent, strict=True):
            statuses[i] = status
        return statuses

    def _look(self, keys: Sequence[StoreKey], deadline: float, *, writes: bool = False) -> tuple[list[Status], Fields]:
        """A status per key, in order, and the whole answer.

        :param writes: what is absent will be written: that it is says nothing of how well the pool serves.
        """
        grouped = group(keys)
        fields: dict[str, object] = {"groups": grouped.fields, **({"writes": True} if writes else {})}
        with self._calls.call(Verb.LOOKUP, fields, deadline) as (_, answer):
            return grouped.in_batch_order(answer.members("statuses", Status)), answer

    def _send(self, items: Sequence[Item[Outgoing]], deadline: float, *, may_stream: bool = False) -> list[WriteStatus]:
        """Sends blocks in several requests, one ahead of another's answer: the pool receives and checks one part while
        the next is on its way. The last part goes first, so that the batch's head is what was used last.

        :param may_stream: the pool takes checksums behind their blocks.
        """
        sizes = [len(payload) for _, payload, _ in items]
        streams = may_stream and can_stream(items)
        part_bytes = _STREAMED_PART_BYTES if streams else _WRITE_PART_BYTES
        parts = list(windows(sizes, part_bytes, MAX_FRAME_BLOCKS))[::-1]
        blocks = [items[start:stop] for start, stop in parts]

        def send(connection: PoolConnection) -> None:
            for part in blocks:
                (_send_streamed if streams else _send_whole)(connection, part, deadline)

        statuses = [WriteStatus.FAILED] * len(items)
        if not parts:
            return statuses
        with self._counts.timed("write"), self._calls.call_with(send, deadline) as (connection, answer):
            for at, (start, stop) in enumerate(parts):
                answer = answer if at == 0 else connection.receive_answer(deadline)
                of_part = answer.members("statuses", WriteStatus)
                require_count(len(of_part), stop - start)
                statuses[start:stop] = of_part
        self._counts.written_bytes.inc(sum(sizes))
        return statuses

    def discard(self, keys: Sequence[StoreKey], timeout_s: float) -> int:
        """Forgets these keys, in one request; returns how many were there."""
        with self._calls.call(Verb.DISCARD, {"groups": group(keys).fields}, MONOTONIC() + timeout_s) as (_, answer):
            return answer.number("num_discarded")

    def pin(self, keys: Sequence[StoreKey], ttl_ms: int, timeout_s: float) -> list[PinStatus] | None:
        """Pins blocks for `ttl_ms`; a status per key, in order. None when the pool has no pins, which is no failure."""
        grouped = group(keys)

        def statuses_of(answer: Fields) -> list[PinStatus]:
            return grouped.in_batch_order(answer.members("statuses", PinStatus))

        return self._ask_of_pins(Verb.PIN, {"groups": grouped.fields, "ttl_ms": ttl_ms}, timeout_s, statuses_of)

    def unpin(self, keys: Sequence[StoreKey], timeout_s: float) -> int | None:
        """Ends pins; returns how many there were, None when the pool has no pins."""
        fields = {"groups": group(keys).fields}
        return self._ask_of_pins(Verb.UNPIN, fields, timeout_s, lambda answer: answer.number("num_unpinned"))

    def usage(self, timeout_s: float) -> Usage:
        """Blocks and bytes of this tenant in the tier of the pool that keeps most of them, and that tier's capacity."""
        with self._calls.call(Verb.USAGE, {}, MONOTONIC() + timeout_s) as (_, answer):
            tiers = [
                Usage(tier.number("num_blocks"), tier.number("used_bytes"), tier.number("capacity_bytes"))
                for tier in answer.maps("tiers")
            ]
        return max(tiers, key=lambda tier: tier.used_bytes, default=Usage(0, 0, 0))

    def close(self) -> None:
        """Closes what is idle now, and the connections of calls in flight when they end. Idempotent."""
        self._calls.close()

    def _ask_of_pins(
        self, verb: Verb, fields: Mapping[str, object], timeout_s: float, parse: Callable[[Fields], _T]
    ) -> _T | None:
        """What is in the answer. None, and nothing sent, when the pool has offered no pins: the connection is closed
        then, so that the next one, perhaps to a newer pool, is greeted anew."""
        deadline = MONOTONIC() + timeout_s

        def send(connection: PoolConnection) -> None:
            if not connection.max_pin_s:
                raise _WithoutPins
            connection.send(verb, fields, (), deadline)

        try:
            with self._calls.call_with(send, deadline) as (_, answer):
                return parse(answer)
        except _WithoutPins:
            return None


def _send_whole(connection: PoolConnection, part: Sequence[Item[Outgoing]], deadline: float) -> None:
    """Sends blocks that are there as they travel."""
    travelling = [carried(item) for item in part]
    headers = b"".join(
        header_from_checksum(key, len(payload), checksum)
        for (key, _, _), (payload, checksum) in zip(part, travelling, strict=True)
    )
    connection.send(Verb.WRITE, {"headers": headers}, [together(payload) for payload, _ in travelling], deadline)


def _send_streamed(connection: PoolConnection, part: Sequence[Item[Outgoing]], deadline: float) -> None:
    """Sends blocks while they are sealed: nobody knows their checksums before."""
    fields = {
        "headers": b"".join(header_from_checksum(key, len(payload), 0) for key, payload, _ in part),
        "checksums_behind": 1,
    }
    nbytes = sum(len(payload) + CHECKSUM.size for _, payload, _ in part)
    connection.send_streamed(Verb.WRITE, fields, streamed(part), nbytes, deadline)
