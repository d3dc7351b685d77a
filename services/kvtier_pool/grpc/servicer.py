"""gRPC adapter of the pool: decodes, calls `Store`, encodes. The API is `kvtier/protocol/pool.proto`."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from itertools import groupby, islice
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from kvtier.errors import InvalidInputError, KvtierError, UnauthenticatedError, UnavailableError
from kvtier.events import Event, EventKind, TierState
from kvtier.identity.keys import CHAIN_HASH_BYTES, StoreKey, TenantId, split_store_key
from kvtier.protocol import pool_pb2
from kvtier.protocol.frames import Frame, decode_frames, encode_blocks, require_few_fields
from kvtier.protocol.groups import windows
from kvtier.protocol.status import CODES, code_for
from kvtier.store.cold_reads import Block
from kvtier.store.event_hub import Subscription
from kvtier.store.store import Store
from kvtier.system.interpreter_time import interpreter_s
from kvtier.system.tracing import NO_CONTEXT, is_context, tracing
from kvtier.tiers.base import Status
from kvtier_pool.auth import Login
from kvtier_pool.grpc.call_places import CallPlaces
from kvtier_pool.grpc.callers import Callers
from kvtier_pool.grpc.upload import Upload
from kvtier_pool.limits import PoolLimits
from kvtier_pool.metrics import PoolMetrics
from kvtier_pool.rates import Pace, TenantRates
from kvtier_pool.request_span import pool_span
from kvtier_pool.requests import add_keys, pin_ttl_ms, require_room
from kvtier_pool.turns import FairTurns, Turn

_log = logging.getLogger(__name__)

SERVICE = pool_pb2.DESCRIPTOR.services_by_name["Pool"].full_name
_READ_WINDOW_BYTES = 4 << 20
"""Blocks read at once: enough for parallel disk reads, little enough to pin and to copy."""
_REQUEST_BLOCKS = 500
"""A call that names more blocks is as many requests to its tenant's rate."""
_TURN_FRAMES = 256
"""Frames of a write that are taken in one turn: a message of tiny ones has more than a million."""
_MOST_FIELDS = 1024
"""Groups in a request, four times as many as the block protocol takes: parsed, each of them takes 50 bytes, and as sent
it may take two."""
_EVENT_KINDS = {
    EventKind.STORED: pool_pb2.Event.STORED,
    EventKind.REMOVED: pool_pb2.Event.REMOVED,
    EventKind.CLEARED: pool_pb2.Event.CLEARED,
    EventKind.WRITABLE: pool_pb2.Event.WRITABLE,
    EventKind.READ_ONLY: pool_pb2.Event.READ_ONLY,
    EventKind.OFF: pool_pb2.Event.OFF,
}
_TIER_STATES = {
    TierState.WRITABLE: pool_pb2.TierUsage.WRITABLE,
    TierState.READ_ONLY: pool_pb2.TierUsage.READ_ONLY,
    TierState.OFF: pool_pb2.TierUsage.OFF,
}
_M = TypeVar("_M", bound=Message)
_Place = Callable[[TenantId], AbstractContextManager[None]]


class PoolServicer:
    """The RPCs; without those of pins where there are none. Each runs on a thread of the server, one call at a time.

    All take their request as a stream, which looks the same to clients: a call that grpc calls unary waits for its
    message, however long, before anybody asks who is calling.
    """

    def __init__(  # noqa: PLR0913 - the parts that it is put together from
        self,
        core: Store,
        callers: Callers,
        limits: PoolLimits,
        metrics: PoolMetrics,
        places: CallPlaces,
        rates: TenantRates,
        turns: FairTurns | None = None,
    ) -> None:
        """:param turns: of the requests of all transports; None: there is no other one."""
        self._core = core
        self._callers = callers
        self._limits = limits
        self._metrics = metrics
        self._places = places
        self._rates = rates
        self._turns = turns if turns is not None else FairTurns()
        self._lock = threading.Lock()
        self._streams: dict[Subscription, Login] = {}
        """Streams of events, with whose they are. Guarded by _lock."""
        for verb in pool_pb2.DESCRIPTOR.services_by_name["Pool"].methods_by_name:
            for code in (*CODES, grpc.StatusCode.CANCELLED):
                metrics.calls.labels(verb, code.name)

    def handler(self) -> grpc.GenericRpcHandler:
        """Handlers without (de)serializers: messages pass as bytes, so that payloads are not copied by protobuf."""
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Lookup": grpc.stream_unary_rpc_method_handler(self._callers.noting(self._lookup)),
            "Read": grpc.stream_stream_rpc_method_handler(self._callers.noting(self._read)),
            "Write": grpc.stream_unary_rpc_method_handler(self._callers.noting(self._write)),
            "Discard": grpc.stream_unary_rpc_method_handler(self._callers.noting(self._discard)),
            "Usage": grpc.stream_unary_rpc_method_handler(self._callers.noting(self._usage)),
            "Events": grpc.stream_stream_rpc_method_handler(self._callers.noting(self._events)),
        }
        if self._core.max_pin_s:
            handlers["Pin"] = grpc.stream_unary_rpc_method_handler(self._callers.noting(self._pin))
            handlers["Unpin"] = grpc.stream_unary_rpc_method_handler(self._callers.noting(self._unpin))
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def end_stale(self) -> int:
        """Ends the streams of events whose credentials are not accepted any more, and connections a second after it.
        Returns how many streams there were. Any thread."""
        with self._lock:
            streams = list(self._streams.items())
        stale = [subscription for subscription, login in streams if not self._callers.is_current(login)]
        for subscription in stale:
            subscription.close()
        self._callers.end_stale()
        return len(stale)

    def _lookup(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with self._call("Lookup", context) as login:
            _, is_let_in = self._paced(login)
            request = _parse(pool_pb2.LookupRequest, requests)
            with _traced("lookup", context, login) as trace, self._turn(login, trace) as turn, tracing.within(trace):
                keys = self._keys(login.tenant, request.groups)
                if not is_let_in:
                    statuses = bytes([Status.MISS]) * len(keys)
                else:
                    statuses = b"".join(bytes(self._core.lookup(part)) for part in self._turns.parts(keys, turn))
                return pool_pb2.LookupResponse(statuses=statuses).SerializeToString()

    def _read(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with self._call("Read", context) as login:
            pace, is_let_in = self._paced(login)
            self._require_deadline(context)
            request = _parse(pool_pb2.ReadRequest, requests)
            keys = self._keys(login.tenant, [group.keys for group in request.groups])
            sizes = [g.payload_bytes for g in request.groups for _ in range(len(g.keys.hashes) // CHAIN_HASH_BYTES)]
            require_room(sizes, self._limits)
            if not is_let_in:
                yield from encode_blocks(_answer(i, None) for i in range(len(keys)))
                return
            with _traced("read", context, login) as trace:
                for start, stop in windows(sizes, _READ_WINDOW_BYTES, self._limits.max_batch_blocks):
                    # All messages of a window are made before the first is sent: nothing is pinned while we wait.
                    with (
                        self._turn(login, trace),
                        tracing.within(trace),
                        self._core.read(keys[start:stop], sizes[start]) as found,
                    ):
                        messages = deque(encode_blocks(_answer(i, block) for i, block in enumerate(found, start)))
                    pace.take(nbytes=sum(map(len, messages)))
                    while messages:
                        yield messages.popleft()  # freed as soon as gRPC has sent it
            self._core.touch(keys)

    def _write(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with self._call("Write", context) as login:
            pace, is_let_in = self._paced(login)
            self._require_deadline(context)
            with closing(Upload(self._core, login.tenant, self._limits, refuses=not is_let_in)) as upload:
                for message in messages:
                    if is_let_in:
                        pace.take(nbytes=len(message))
                    else:
                        pace.refuse(len(message))
                    frames, may_have_more = decode_frames(message), True
                    while may_have_more and context.is_active():  # the rest of a call that is over is for nobody
                        with self._turns.of(login.tenant):
                            may_have_more = _feed(upload, frames)
                return pool_pb2.WriteResponse(statuses=upload.finish()).SerializeToString()

    def _discard(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with self._call("Discard", context) as login:
            self._paced(login)
            request = _parse(pool_pb2.DiscardRequest, requests)
            with self._turns.of(login.tenant) as turn:
                keys = self._keys(login.tenant, request.groups)
                num_discarded = sum(self._core.discard(part) for part in self._turns.parts(keys, turn))
            return pool_pb2.DiscardResponse(num_discarded=num_discarded).SerializeToString()

    def _pin(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with self._call("Pin", context) as login:
            self._paced(login)
            request = _parse(pool_pb2.PinRequest, requests)
            ttl_ms = pin_ttl_ms(request.ttl_ms, self._core.max_pin_s)
            with self._turns.of(login.tenant):
                statuses = self._core.pin(login.tenant, self._keys(login.tenant, request.groups), ttl_ms / 1000)
            return pool_pb2.PinResponse(statuses=bytes(statuses), ttl_ms=ttl_ms).SerializeToString()

    def _unpin(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with self._call("Unpin", context) as login:
            self._paced(login)
            request = _parse(pool_pb2.UnpinRequest, requests)
            with self._turns.of(login.tenant):
                num_unpinned = self._core.unpin(self._keys(login.tenant, request.groups))
            return pool_pb2.UnpinResponse(num_unpinned=num_unpinned).SerializeToString()

    def _usage(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with self._call("Usage", context) as login:
            self._paced(login)
            _parse(pool_pb2.UsageRequest, requests)
            tiers = [
                pool_pb2.TierUsage(
                    name=share.tier,
                    num_blocks=share.num_blocks,
                    used_bytes=share.used_bytes,
                    capacity_bytes=share.capacity_bytes,
                    used_percent=share.used_percent,
                    state=_TIER_STATES[share.state],
                )
                for share in self._core.usage(login.tenant)
            ]
            return pool_pb2.UsageResponse(tiers=tiers).SerializeToString()

    def _events(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with self._call("Events", context, self._places.of_stream) as login:
            _parse(pool_pb2.EventsRequest, requests)
            with (
                closing(self._core.subscribe(login.tenant)) as subscription,
                self._noted(subscription, login),
            ):
                if not context.add_callback(subscription.close):
                    return
                while (batch := subscription.wait()) is not None:
                    events = [_event_message(event) for event in batch.events]
                    yield pool_pb2.EventBatch(events=events, lost=batch.lost).SerializeToString()
            if not self._callers.is_current(login):
                raise UnauthenticatedError("the credentials of this stream are not accepted any more")
            raise UnavailableError("the pool is shutting down")

    def _paced(self, login: Login) -> tuple[Pace, bool]:
        """The pace of the caller's tenant, and whether this call may be served by it. Blocks for a moment."""
        pace = self._rates.of(login.tenant)
        return pace, pace.let_in(time.sleep)

    @contextmanager
    def _noted(self, subscription: Subscription, login: Login) -> Iterator[None]:
        """Inside, `end_stale` knows of the stream."""
        with self._lock:
            self._streams[subscription] = login
        try:
            yield
        finally:
            with self._lock:
                del self._streams[subscription]

    @contextmanager
    def _turn(self, login: Login, trace: str) -> Iterator[Turn | None]:
        """A turn of the tenant's, and a span of the wait for it."""
        with ExitStack() as stack:
            with tracing.within(trace), tracing.span("wait for turn"):
                turn = stack.enter_context(self._turns.of(login.tenant))
            yield turn

    @contextmanager
    def _call(self, verb: str, context: grpc.ServicerContext, place: _Place | None = None) -> Iterator[Login]:
        """Gives the caller, who is a tenant, takes a place for the call, turns exceptions into status codes, counts.

        :param place: that of a call if there is none.
        """
        code, began_s = grpc.StatusCode.CANCELLED, interpreter_s()
        try:
            login = self._callers.login_of(context)
            with (place or self._places.of_call)(login.tenant), self._turns.charged(login.tenant, began_s):
                yield login
            code = grpc.StatusCode.OK
        except KvtierError as error:
            code = code_for(error)
            context.abort(code, str(error))
        except grpc.RpcError:
            raise  # the client is gone
        except Exception:
            code = grpc.StatusCode.INTERNAL
            _log.exception("%s failed", verb)
            context.abort(code, "internal error of the pool; see its log")
        finally:
            self._metrics.calls.labels(verb, code.name).inc()

    def _keys(self, tenant: TenantId, groups: Iterable[pool_pb2.Keys]) -> list[StoreKey]:
        keys: list[StoreKey] = []
        for group in groups:
            add_keys(keys, tenant, group.namespace_id, group.hashes, self._limits)
        self._rates.of(tenant).take(num_requests=len(keys) // _REQUEST_BLOCKS)
        return keys

    def _require_deadline(self, context: grpc.ServicerContext) -> None:
        remaining_s = context.time_remaining()
        if remaining_s is None or remaining_s > self._limits.max_call_s:
            raise InvalidInputError(f"set a deadline of at most {self._limits.max_call_s:g} s on reads and writes")


def _feed(upload: Upload, frames: Iterator[Frame]) -> bool:
    """Takes frames for one turn. Whether there may be more."""
    num_fed = 0
    for num_fed, frame in enumerate(islice(frames, _TURN_FRAMES), 1):  # noqa: B007 - it is how many there were
        upload.feed(frame)
    return num_fed == _TURN_FRAMES


def _parse(kind: type[_M], requests: Iterator[bytes]) -> _M:
    """The one message of a call; waits for it."""
    message = next(requests, None)
    if message is None:
        raise InvalidInputError(f"the call ended without its {kind.__name__}")
    require_few_fields(message, _MOST_FIELDS)
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise InvalidInputError(f"not a {kind.__name__}: {error}") from error


def _answer(index: int, block: Block | None) -> tuple[int, int, bytes, memoryview]:
    """The arguments of `encode_blocks` for one block of a read."""
    if block is None:
        return index, Status.MISS, b"", memoryview(b"")
    return index, Status.HIT, block.header, block.payload


def _event_message(event: Event) -> pool_pb2.Event:
    keys = [
        pool_pb2.Keys(namespace_id=namespace, hashes=b"".join(chain_hash for _, chain_hash in run))
        for namespace, run in groupby((split_store_key(key)[1:] for key in event.keys), key=lambda pair: pair[0])
    ]
    return pool_pb2.Event(kind=_EVENT_KINDS[event.kind], tier=event.tier, keys=keys)


@contextmanager
def _traced(verb: str, context: grpc.ServicerContext, login: Login) -> Iterator[str]:
    """A span of the call, if its metadata have a `traceparent`; gives its context.

    The thread does not work within it by itself: between two messages of a stream, it may do something else.
    """
    named = dict(context.invocation_metadata()).get("traceparent", NO_CONTEXT) if tracing.is_on else NO_CONTEXT
    parent = named if isinstance(named, str) and is_context(named) else NO_CONTEXT
    with pool_span(verb, parent, login) as span:
        yield NO_CONTEXT if span is None else span.context
