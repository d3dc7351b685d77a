"""One connection of the block protocol: HELLO, then requests one after the other."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvtier.clock import MONOTONIC
from kvtier.codec import HEADER_BYTES, Header, parse_header
from kvtier.errors import CorruptBlockError, InvalidInputError, KvtierError
from kvtier.keys import NAMESPACE_ID_BYTES, TENANT_ID_BYTES, StoreKey, TenantId
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.host_slots import WriteSlot
from kvtier.tiers.pool.groups import windows
from kvtier.wire.arriving import ArrivingBlock, receive_blocks
from kvtier.wire.block import (
    MAX_FRAME_BLOCKS,
    MAX_FRAME_PAYLOAD_BYTES,
    MAX_HELLO_BYTES,
    VERSIONS,
    Fields,
    Result,
    StrangerError,
    Verb,
    result_for,
)
from kvtier.wire.block_socket import FrameSocket, require_no_payload
from kvtier.wire.tls_errors import TlsError
from kvtier_pool.auth import Authenticator
from kvtier_pool.core import PoolCore
from kvtier_pool.metrics import PoolMetrics
from kvtier_pool.requests import add_keys, pin_ttl_ms, require_blocks, require_bytes, require_room
from kvtier_pool.settings import PoolLimits
from kvtier_pool.shared_memory import ClientMemory, SharedClients
from kvtier_pool.shared_verbs import SHARED_VERBS, SharedVerbs, close_all
from kvtier_pool.strangers import answer_for

_log = logging.getLogger(__name__)
_HELLO_S = 5.0
"""How long a peer may keep a thread before it has shown a token."""
_PIECE_BYTES = 2 << 20
"""Of payloads that come in: with many writers, fewer turns of the interpreter's lock and of the cores count for more
than the processor's second-level cache."""
_LAST_WORDS_S = 1.0
"""How long the answer that ends a connection may take to be sent and received."""
_NAMESPACE = slice(TENANT_ID_BYTES, TENANT_ID_BYTES + NAMESPACE_ID_BYTES)
"""Of a store key."""
_Answer = dict[str, object]
_Handler = Callable[[TenantId, Fields, int, float], _Answer | None]
"""(tenant, request, payload bytes that follow, deadline) -> fields of the last answer, None for none."""


class BlockSession:
    """Serves one peer. `run` on a thread of its own; `finish` and `cut` from any thread."""

    def __init__(
        self,
        connection: FrameSocket,
        core: PoolCore,
        authenticator: Authenticator,
        limits: PoolLimits,
        metrics: PoolMetrics,
        clients: SharedClients | None = None,
        certificate_names: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        """
        :param connection: owned from now on.
        :param clients: where the peer may share memory with the pool.
        :param certificate_names: of the peer's verified certificate; called when it has said hello.
        """
        self._connection = connection
        self._core = core
        self._authenticator = authenticator
        self._limits = limits
        self._metrics = metrics
        self._clients = clients
        self._client_memory: ClientMemory | None = None
        """What the peer holds in shared memory, once it has asked for some. Own thread only."""
        self._shared: SharedVerbs | None = None
        """Likewise."""
        self._certificate_names = certificate_names
        self._namespaces: frozenset[bytes] | None = None
        """All that the peer may use; None: any. Own thread only."""
        self._handlers: dict[str, _Handler] = {
            Verb.LOOKUP: self._lookup,
            Verb.READ: self._read,
            Verb.WRITE: self._write,
            Verb.DISCARD: self._discard,
            Verb.USAGE: self._usage,
        }
        if core.max_pin_s:
            self._handlers |= {Verb.PIN: self._pin, Verb.UNPIN: self._unpin}
        self.greeted = False
        """The peer has shown whose it is. Written by the own thread only."""
        self._request_id = 0
        """Of the request being served. Own thread only."""
        self._lock = threading.Lock()
        self._idle = False
        """Between two requests. Guarded by _lock."""
        self._finishing = False
        """Guarded by _lock."""

    def run(self) -> None:
        """Serves until the peer closes or breaks the protocol, or until `finish` or `cut`; closes the connection."""
        try:
            tenant = self._greet()
            while tenant is not None and self._next_request():
                self._serve(tenant)
        except StrangerError as error:
            _log.info("connection closed: %s", error)
            self._end_with(Result.INVALID, str(error), stranger=None if self.greeted else answer_for(error.first))
        except KvtierError as error:
            self._end_with(result_for(error), str(error))
        except TlsError as error:
            _log.info("connection refused: %s", error)
        except OSError as error:
            _log.debug("connection lost: %s", error)
        except Exception:
            _log.exception("a request failed")
            self._end_with(Result.INTERNAL, "internal error of the pool; see its log")
        finally:
            self._connection.close()
            if self._clients is not None and self._client_memory is not None:
                self._clients.end(self._client_memory)

    def finish(self) -> None:
        """Ends it now when it is idle, else after the request that it is serving."""
        with self._lock:
            self._finishing = True
            idle = self._idle
        if idle:
            self._connection.shut_down()

    def cut(self) -> None:
        """Ends it in the middle of whatever it is doing."""
        self._connection.shut_down()

    def _greet(self) -> TenantId | None:
        """The peer's tenant; None when no version is common to both."""
        deadline = MONOTONIC() + _HELLO_S
        hello, payload_bytes = self._connection.receive_head(deadline=deadline, max_header_bytes=MAX_HELLO_BYTES)
        require_no_payload(payload_bytes)
        self._request_id = hello.number("id")
        if hello.text("verb") != Verb.HELLO:
            raise InvalidInputError("the first request of a connection must be hello")
        common = [version for version in VERSIONS if version in hello.numbers("versions")]
        if not common:
            message = f"the pool speaks versions {list(VERSIONS)} of the block protocol: upgrade the older side"
            self._end_with(Result.INCOMPATIBLE, message)
            return None
        token = hello.text("token") if hello.has("token") else None
        tenant = self._authenticator.tenant_of(token, self._certificate_names())
        self.greeted = True  # before the peer hears it and opens the next one
        self._namespaces = _namespaces_of(hello)
        _log.debug("client %r connected", hello.text("client")[:100])
        self._answer(self._greeting(common[0], tenant), deadline=deadline)
        return tenant

    def _greeting(self, version: int, tenant: TenantId) -> _Answer:
        fields: _Answer = {"versions": list(VERSIONS), "version": version, "tenant": tenant}
        if self._clients is not None:
            fields["lease_ms"] = round(self._clients.lease_s * 1000)
            fields["max_held_bytes"] = self._clients.max_held_bytes
        if self._core.max_pin_s:
            fields["max_pin_ms"] = round(self._core.max_pin_s * 1000)
        return fields

    def _next_request(self) -> bool:
        """Waits for a request to begin; False when there will be none."""
        with self._lock:
            self._idle = not self._finishing
        if not self._idle or not self._connection.wait():
            return False
        with self._lock:
            self._idle = False
        return True

    def _serve(self, tenant: TenantId) -> None:
        deadline = MONOTONIC() + self._limits.max_call_s
        request, payload_bytes = self._connection.receive_head(deadline=self._piece_deadline(deadline))
        self._request_id = request.number("id")
        verb = request.text("verb")
        shared = self._clients is not None and verb in SHARED_VERBS
        handler = self._serve_shared if shared else self._handlers.get(verb)
        if handler is None:
            raise InvalidInputError(f"verb {verb[:100]!r} is not known here")
        if verb != Verb.WRITE:
            require_no_payload(payload_bytes)
        result: str = Result.INTERNAL
        try:
            answer = handler(tenant, request, payload_bytes, deadline)
            if answer is not None:
                self._answer(answer, deadline=self._piece_deadline(deadline))
            result = Result.OK
        except KvtierError as error:
            result = result_for(error)
            raise
        except OSError:
            result = "lost"
            raise
        finally:
            self._metrics.count_block_call(verb, result)

    def _serve_shared(self, tenant: TenantId, request: Fields, payload_bytes: int, deadline: float) -> _Answer | None:
        """Verbs of clients that map the memory. Those that give something back are not answered."""
        if self._shared is None:
            assert self._clients is not None
            self._client_memory = self._clients.open(tenant)
            self._shared = SharedVerbs(self._client_memory, partial(self._blocks, tenant))
        answer = self._shared.handlers[request.text("verb")](request)
        if answer is None:
            return None
        fields, descriptors = answer
        if not descriptors:
            return fields
        try:
            self._answer(fields, deadline=self._piece_deadline(deadline), descriptors=descriptors)
        finally:
            close_all(descriptors)
        return None

    def _lookup(self, tenant: TenantId, request: Fields, payload_bytes: int, deadline: float) -> _Answer:
        return {"statuses": bytes(self._core.lookup(self._keys(tenant, request.maps("groups"))))}

    def _discard(self, tenant: TenantId, request: Fields, payload_bytes: int, deadline: float) -> _Answer:
        return {"num_discarded": self._core.discard(self._keys(tenant, request.maps("groups")))}

    def _usage(self, tenant: TenantId, request: Fields, payload_bytes: int, deadline: float) -> _Answer:
        tiers = [
            {
                "name": share.tier,
                "num_blocks": share.num_blocks,
                "used_bytes": share.used_bytes,
                "capacity_bytes": share.capacity_bytes,
                "used_percent": share.used_percent,
            }
            for share in self._core.usage(tenant)
        ]
        return {"tiers": tiers}

    def _pin(self, tenant: TenantId, request: Fields, payload_bytes: int, deadline: float) -> _Answer:
        ttl_ms = pin_ttl_ms(request.number("ttl_ms"), self._core.max_pin_s)
        statuses = self._core.pin(tenant, self._keys(tenant, request.maps("groups")), ttl_ms / 1000)
        return {"statuses": bytes(statuses), "ttl_ms": ttl_ms}

    def _unpin(self, tenant: TenantId, request: Fields, payload_bytes: int, deadline: float) -> _Answer:
        return {"num_unpinned": self._core.unpin(self._keys(tenant, request.maps("groups")))}

    def _read(self, tenant: TenantId, request: Fields, payload_bytes: int, deadline: float) -> _Answer:
        """Sends the blocks piece by piece, straight from where they lie; the last answer says that this was all."""
        keys, sizes = self._blocks(tenant, request)
        for start, stop in windows(sizes, MAX_FRAME_PAYLOAD_BYTES, MAX_FRAME_BLOCKS):
            with self._core.read(keys[start:stop], sizes[start]) as found:
                blocks = [block for block in found if block is not None]
                fields: _Answer = {
                    "statuses": bytes(Status.MISS if block is None else Status.HIT for block in found),
                    "headers": b"".join(block.header for block in blocks),
                }
                payloads = [block.payload for block in blocks]
                self._answer(fields, payloads, deadline=self._piece_deadline(deadline))
        self._core.touch(keys)
        return {"statuses": b"", "headers": b""}

    def _write(self, tenant: TenantId, request: Fields, payload_bytes: int, deadline: float) -> _Answer:
        headers = _parse_headers(request.data("headers"))
        self._require_named(header.key[_NAMESPACE] for header in headers)
        require_blocks(len(headers), self._limits)
        require_bytes(payload_bytes, self._limits)
        sizes = [header.stored_length for header in headers]
        if sum(sizes) != payload_bytes:
            raise InvalidInputError(f"headers of {sum(sizes)} payload bytes before a payload of {payload_bytes}")
        statuses: list[WriteStatus] = []
        try:
            for start, stop in windows(sizes, MAX_FRAME_PAYLOAD_BYTES, MAX_FRAME_BLOCKS):
                statuses += self._take(tenant, headers[start:stop], self._piece_deadline(deadline))
        finally:
            stored = zip(headers, statuses, strict=False)
            self._core.touch([header.key for header, status in stored if status is WriteStatus.STORED])
        return {"statuses": bytes(statuses)}

    def _take(self, tenant: TenantId, headers: Sequence[Header], deadline: float) -> list[WriteStatus]:
        """Receives these payloads straight into memory's slots; what the pool does not take goes nowhere.

        What has come is kept, whatever becomes of the rest.
        """
        outcomes: list[WriteSlot | WriteStatus] = []
        arrived: list[int] = []
        """Places of those that are what their headers say."""
        try:
            for header in headers:
                outcomes.append(self._begin(tenant, header))
            arriving = [
                ArrivingBlock.wanted(i, header, outcome.view)
                if isinstance(outcome, WriteSlot)
                else ArrivingBlock(i, header.stored_length)
                for i, (header, outcome) in enumerate(zip(headers, outcomes, strict=True))
            ]
            receive_into = partial(self._connection.receive_into, deadline=deadline)
            for block in receive_blocks(receive_into, arriving, _PIECE_BYTES):
                slot = outcomes[block.tag]
                if isinstance(slot, WriteSlot) and block.fault is None:
                    arrived.append(block.tag)
                elif isinstance(slot, WriteSlot):
                    outcomes[block.tag] = self._core.abort_write(slot)
        finally:
            self._commit(arrived, headers, outcomes)
            statuses = [self._core.abort_write(o) if isinstance(o, WriteSlot) else o for o in outcomes]
        return statuses

    def _commit(
        self, arrived: Sequence[int], headers: Sequence[Header], outcomes: list[WriteSlot | WriteStatus]
    ) -> None:
        """Puts statuses in place of the slots that stand at the places `arrived`."""
        slots = [slot for i in arrived if isinstance(slot := outcomes[i], WriteSlot)]
        statuses = self._core.commit_all(slots, [headers[i].checksum for i in arrived])
        for i, status in zip(arrived, statuses, strict=True):
            outcomes[i] = status

    def _begin(self, tenant: TenantId, header: Header) -> WriteSlot | WriteStatus:
        if header.stored_length > self._limits.max_block_bytes:
            return WriteStatus.FULL
        return self._core.begin_write(tenant, header)

    def _keys(self, tenant: TenantId, groups: Sequence[Fields]) -> list[StoreKey]:
        keys: list[StoreKey] = []
        for group in groups:
            self._add_keys(keys, tenant, group)
        return keys

    def _add_keys(self, keys: list[StoreKey], tenant: TenantId, group: Fields) -> None:
        namespace = group.data("namespace")
        if self._namespaces is not None:
            self._require_named((namespace,))
        add_keys(keys, tenant, namespace, group.data("hashes"), self._limits)

    def _blocks(self, tenant: TenantId, request: Fields) -> tuple[list[StoreKey], list[int]]:
        """Keys and payload lengths of the request's groups, within the limits."""
        keys: list[StoreKey] = []
        sizes: list[int] = []
        for group in request.maps("groups"):
            self._add_keys(keys, tenant, group)
            sizes += [group.number("payload_bytes")] * (len(keys) - len(sizes))
        require_room(sizes, self._limits)
        return keys, sizes

    def _require_named(self, namespaces: Iterable[bytes]) -> None:
        """Raises `InvalidInputError` for a namespace that HELLO should have named."""
        if self._namespaces is not None:
            for namespace in namespaces:
                if namespace not in self._namespaces:
                    raise InvalidInputError(f"namespace {namespace.hex()[:100]} is none of those that hello named")

    def _piece_deadline(self, deadline: float) -> float:
        return min(deadline, MONOTONIC() + self._limits.max_stall_s)

    def _answer(
        self,
        fields: _Answer,
        payload: Sequence[memoryview] = (),
        *,
        deadline: float,
        descriptors: Sequence[int] = (),
    ) -> None:
        header = {"id": self._request_id, "result": Result.OK, **fields}
        self._connection.send_frame(header, payload, deadline=deadline, descriptors=descriptors)

    def _end_with(self, result: Result, message: str, *, stranger: bytes | None = None) -> None:
        """The last answer of this connection, if the peer still takes it."""
        deadline = MONOTONIC() + _LAST_WORDS_S
        header = {"id": self._request_id, "result": result, "message": message, "versions": list(VERSIONS)}
        try:
            if stranger is not None:
                self._connection.send_bytes(stranger, deadline=deadline)
            else:
                self._connection.send_frame(header, deadline=deadline)
            self._connection.linger(deadline=deadline)
        except OSError as error:
            _log.debug("the last answer was not sent: %s", error)


def _namespaces_of(hello: Fields) -> frozenset[bytes] | None:
    """What HELLO names; None when it names nothing, and any may be used."""
    if not hello.has("namespaces"):
        return None
    named = hello.datas("namespaces")
    if any(len(namespace) != NAMESPACE_ID_BYTES for namespace in named):
        raise InvalidInputError(f"header: namespaces must hold ids of {NAMESPACE_ID_BYTES} bytes")
    return frozenset(named)


def _parse_headers(data: bytes) -> list[Header]:
    """Concatenated stored-form headers. Without all of them nobody knows where a payload ends."""
    if len(data) % HEADER_BYTES:
        raise InvalidInputError(f"headers of {len(data)} bytes: need a multiple of {HEADER_BYTES}")
    try:
        return [parse_header(data[at : at + HEADER_BYTES]) for at in range(0, len(data), HEADER_BYTES)]
    except CorruptBlockError as error:
        raise InvalidInputError(f"a block's header: {error}") from error
