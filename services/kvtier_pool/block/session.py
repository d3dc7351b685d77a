"""One connection of the block protocol: HELLO, then requests one after the other, until either side ends it."""

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial

from kvtier.clock import MONOTONIC
from kvtier.errors import InvalidInputError, KvtierError, UnauthenticatedError
from kvtier.identity.keys import TenantId
from kvtier.net.tls_errors import TlsError
from kvtier.net.wrong_protocol import WrongProtocolError
from kvtier.protocol.block import MAX_HEADER_BYTES, MAX_HELLO_BYTES, VERSIONS, Result, Verb, result_for
from kvtier.protocol.block_socket import FrameSocket, require_no_payload
from kvtier.store.store import Store
from kvtier.system.logs import bind_log_fields
from kvtier.system.tracing import tracing
from kvtier_pool.auth import Login
from kvtier_pool.block.client_memory import ClientMemory
from kvtier_pool.block.client_scope import ClientScope
from kvtier_pool.block.large_requests import LargeRequests
from kvtier_pool.block.refused_verbs import RefusedVerbs, asked_bytes
from kvtier_pool.block.request_context import RequestContext
from kvtier_pool.block.shared_memory import SharedClients
from kvtier_pool.block.shared_verbs import SharedVerbs
from kvtier_pool.block.verbs import BlockVerbs, Handler
from kvtier_pool.block.waits import Waits
from kvtier_pool.limits import PoolLimits
from kvtier_pool.logins import Door
from kvtier_pool.metrics import PoolMetrics
from kvtier_pool.rates import Pace, TenantRates
from kvtier_pool.turns import FairTurns, Turn
from kvtier_pool.wrong_protocol import answer_for

_log = logging.getLogger(__name__)
_HELLO_S = 5.0
"""How long a peer may keep a thread before it has shown a token."""
_REQUEST_BYTES = 16 << 10
"""A request with a larger header, of about 500 blocks, is as many requests to its tenant's rate."""
_LAST_WORDS_S = 1.0
"""How long the answer that ends a connection may take to be sent and received."""


class BlockSession:
    """Serves one peer. `run` on a thread of its own; `finish` and `cut` from any thread."""

    def __init__(  # noqa: PLR0913 - the parts that it is put together from
        self,
        connection: FrameSocket,
        core: Store,
        door: Door,
        limits: PoolLimits,
        metrics: PoolMetrics,
        clients: SharedClients | None = None,
        certificate_names: Callable[[], frozenset[str]] = frozenset,
        large: LargeRequests | None = None,
        log_in: "Callable[[BlockSession, Login], None]" = lambda session, login: None,
        rates: TenantRates | None = None,
        turns: FairTurns | None = None,
    ) -> None:
        """
        :param connection: owned from now on.
        :param door: where the peer logs in.
        :param clients: where the peer may share memory with the pool.
        :param certificate_names: of the peer's verified certificate; called when it has said hello.
        :param large: the large requests of all connections; None: there is no other one.
        :param log_in: told this session, and who its peer is; raises `UnavailableError` where that tenant has enough
            connections. It must not refer to the session: its buffers would wait for the collector of garbage.
        :param rates: of all tenants; None: there are no bounds.
        :param turns: of the requests of all connections; None: there is no other one.
        """
        self._connection = connection
        self._core = core
        self.door = door
        """The door that the peer came to. Not changed."""
        self._limits = limits
        self._metrics = metrics
        self._clients = clients
        self._memory: ClientMemory | None = None
        """What the peer holds in shared memory, where there is any. Own thread only."""
        self._told_bytes = 0
        """How much HELLO has told the peer that it should hold of it at most. Own thread only."""
        self._certificate_names = certificate_names
        self._large = large if large is not None else LargeRequests(limits.max_large_bytes)
        self._large_bytes = 0
        """What the request being served has of `_large`. Own thread only."""
        self._log_in = log_in
        self._rates = rates if rates is not None else TenantRates(metrics)
        self._turns = turns if turns is not None else FairTurns()
        self.login: Login | None = None
        """What the peer has shown to be. Written by the own thread only."""
        self._request_id = 0
        """The id of the request being served. Own thread only."""
        self._lock = threading.Lock()
        self._idle = False
        """Whether the connection is between two requests. Guarded by _lock."""
        self._finishing = False
        """Guarded by _lock."""
        self._cut = threading.Event()

    def run(self) -> None:
        """Serves until the peer closes or breaks the protocol, or until `finish` or `cut`; closes the connection."""
        bind_log_fields(peer=self.door.peer)
        try:
            scope = self._greet()
            if scope is not None:
                handlers, pace = self._handlers(scope), self._rates.of(scope.tenant)
                refused = {**handlers, **RefusedVerbs(scope, pace).handlers()}
                while self._next_request():
                    waits = Waits() if tracing.is_on else None
                    is_let_in = pace.let_in(self._cut.wait)
                    turn = self._turns.begin(scope.tenant)
                    self._connection.make_few_calls(turn is not None)
                    if waits is not None:
                        waits.end()
                    try:
                        self._serve(scope.tenant, handlers if is_let_in else refused, pace, waits, turn)
                    finally:
                        self._end_large(scope.tenant)
                        if turn is not None:
                            self._turns.end(turn)
        except WrongProtocolError as error:
            self.door.not_understood(error)
            self._end_with(
                Result.INVALID, str(error), stranger=None if self.login is not None else answer_for(error.first)
            )
        except KvtierError as error:
            self._end_with(result_for(error), str(error))
        except TlsError as error:
            self.door.not_understood(error)
        except OSError as error:
            _log.debug("connection lost: %s", error)
        except Exception:
            _log.exception("a request failed")
            self._end_with(Result.INTERNAL, "internal error of the pool; see its log")
        finally:
            self._connection.close()
            if self._clients is not None and self._memory is not None:
                self._clients.end(self._memory)

    def finish(self) -> None:
        """Ends it now when it is idle, else after the request that it is serving."""
        with self._lock:
            self._finishing = True
            idle = self._idle
        if idle:
            self._connection.shut_down()

    def cut(self) -> None:
        """Ends it in the middle of whatever it is doing."""
        self._cut.set()
        self._connection.shut_down()

    def _greet(self) -> ClientScope | None:
        """Returns the peer, once it has said who it is; None when no version is common to both."""
        request = self._receive(_HELLO_S, MAX_HELLO_BYTES)
        require_no_payload(request.payload_bytes)
        hello = request.request
        if hello.text("verb") != Verb.HELLO:
            raise InvalidInputError("the first request of a connection must be hello")
        common = [version for version in VERSIONS if version in hello.numbers("versions")]
        if not common:
            message = f"the pool speaks versions {list(VERSIONS)} of the block protocol: upgrade the older side"
            self._end_with(Result.INCOMPATIBLE, message)
            return None
        token = hello.text("token") if hello.has("token") else None
        login = self.door.tenant(token, self._certificate_names(), self._cut.wait)
        tenant = login.tenant
        bind_log_fields(peer=self.door.peer, tenant=login.name)
        with self._turns.of(tenant):  # whoever opens many connections waits as for requests
            self._log_in(self, login)
        self.login = login  # before the peer hears it and opens the next one
        scope = ClientScope(tenant, hello, self._limits)
        _log.debug("client %r connected", hello.text("client")[:100])
        request.answer({"versions": list(VERSIONS), "version": common[0], "tenant": tenant, **self._offers(tenant)})
        return scope

    def _offers(self, tenant: TenantId) -> dict[str, object]:
        """What this pool has beyond the verbs that all have."""
        offers: dict[str, object] = {}
        if self._clients is not None:
            offers["lease_ms"] = round(self._clients.limits.lease_s * 1000)
            offers["max_held_bytes"] = self._told_bytes = self._clients.max_held_bytes(tenant)
        if self._core.max_pin_s:
            offers["max_pin_ms"] = round(self._core.max_pin_s * 1000)
        return offers

    def _handlers(self, scope: ClientScope) -> Mapping[str, Handler]:
        """Returns the handlers of requests by verb."""
        handlers = BlockVerbs(self._core, scope, self._limits.max_block_bytes).handlers()
        if self._clients is None:
            return handlers
        self._memory = self._clients.open(scope.tenant)
        max_held_bytes = partial(self._clients.max_held_bytes, scope.tenant)
        return handlers | SharedVerbs(self._memory, scope, max_held_bytes, self._told_bytes).handlers()

    def _next_request(self) -> bool:
        """Waits for a request to begin; False when there will be none."""
        with self._lock:
            self._idle = not self._finishing
        if not self._idle or not self._connection.wait():
            return False
        with self._lock:
            self._idle = False
        return True

    def _receive(
        self,
        seconds: float,
        max_header_bytes: int = MAX_HEADER_BYTES,
        on_large: Callable[[int], object] = lambda header_bytes: None,
    ) -> RequestContext:
        """The next request: it and its answers may take so long."""
        now = MONOTONIC()
        stall_s = self._limits.max_stall_s
        request, payload_bytes = self._connection.receive_head(
            deadline=now + min(seconds, stall_s), max_header_bytes=max_header_bytes, on_large=on_large
        )
        self._request_id = request.number("id")
        return RequestContext(self._connection, request, payload_bytes, deadline=now + seconds, max_stall_s=stall_s)

    def _begin_large(self, tenant: TenantId, header_bytes: int) -> None:
        """Waits for half of the time that the header may take, so that there is some left to receive it."""
        self._large.take(tenant, header_bytes, self._limits.max_stall_s / 2)
        self._large_bytes = header_bytes

    def _end_large(self, tenant: TenantId) -> None:
        if self._large_bytes:
            self._large.give_back(tenant, self._large_bytes)
            self._large_bytes = 0

    def _serve(
        self,
        tenant: TenantId,
        handlers: Mapping[str, Handler],
        pace: Pace,
        waits: Waits | None,
        turn: Turn | None,
    ) -> None:
        request = self._receive(self._limits.max_call_s, on_large=partial(self._begin_large, tenant))
        if turn is not None:
            request.parts = partial(self._turns.parts, turn=turn)
        if self.login is not None and not self.door.is_current(self.login):
            raise UnauthenticatedError("the credentials of this connection are not accepted any more: log in anew")
        verb = request.request.text("verb")
        handler = handlers.get(verb)
        if handler is None:
            raise InvalidInputError(f"verb {verb[:100]!r} is not known here")
        if verb != Verb.WRITE:
            require_no_payload(request.payload_bytes)
        asked = 0
        if pace.is_bounded:
            asked = asked_bytes(verb, request.request, request.payload_bytes)
            request.moved_bytes = request.payload_bytes
            pace.take(num_requests=self._large_bytes // _REQUEST_BYTES, nbytes=asked)
        result: str = Result.INTERNAL
        try:
            if waits is None:
                handler(request)
            else:
                with waits.request_span(verb, request.request, self.login):
                    handler(request)
            result = Result.OK
        except KvtierError as error:
            result = result_for(error)
            raise
        except OSError:
            result = "lost"
            raise
        finally:
            if asked:
                pace.take(nbytes=request.moved_bytes - asked)
            self._metrics.count_block_call(verb, result)

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
