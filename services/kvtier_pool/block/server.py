"""The listening block protocol server: one bounded thread per connection."""

import contextlib
import logging
import socket
import threading

from kvtier.config import Config
from kvtier.config.tls_files import pool_service_tls
from kvtier.errors import LimitExceededError, UnavailableError
from kvtier.identity.keys import TenantId
from kvtier.net.address import Address
from kvtier.net.stream import PlainStream
from kvtier.net.tls import ServerTls, TlsStream
from kvtier.protocol.block import VERSIONS, Result, encode_head
from kvtier.protocol.block_socket import FrameSocket
from kvtier.store.store import Store
from kvtier_pool.auth import Login
from kvtier_pool.block.large_requests import LargeRequests
from kvtier_pool.block.session import BlockSession
from kvtier_pool.block.shared_memory import SharedClients
from kvtier_pool.limits import PoolLimits
from kvtier_pool.listener import Listener, SocketAccess
from kvtier_pool.logins import Logins
from kvtier_pool.metrics import PoolMetrics
from kvtier_pool.places import TenantPlaces
from kvtier_pool.rates import TenantRates
from kvtier_pool.strangers import name_of
from kvtier_pool.turns import FairTurns

_log = logging.getLogger(__name__)
_MAX_CONNECTIONS = "max_connections"
_PAUSE_S = 0.1
"""Seconds to pause after an `accept` that failed, most often for want of descriptors."""
_LAST_WAIT_S = 5.0
"""Seconds to wait for sessions whose connection was cut: they end as soon as the disk lets them."""


class BlockServer:
    """Binds, serves and stops. One thread calls it."""

    def __init__(  # noqa: PLR0913 - the parts that it is put together from
        self,
        core: Store,
        logins: Logins,
        config: Config,
        limits: PoolLimits,
        metrics: PoolMetrics,
        places: TenantPlaces,
        clients: SharedClients | None = None,
        rates: TenantRates | None = None,
        turns: FairTurns | None = None,
    ) -> None:
        """Binds nothing yet: see `start`.

        :param places: of connections.
        :param clients: lets those on a Unix socket share memory with the pool.
        :param rates: of all tenants; None: there are no bounds.
        :param turns: of the requests of all transports; None: there is no other one.
        """
        self._core = core
        self._logins = logins
        self._table = config.pool_service
        self._limits = limits
        self._metrics = metrics
        self._places = places
        self._clients = clients
        self._rates = rates
        self._turns = turns if turns is not None else FairTurns()
        tls = pool_service_tls(config)
        self._tls = None if tls is None else ServerTls(tls)
        self._listeners: list[Listener] = []
        """Owner only."""
        self._accepting: list[threading.Thread] = []
        """Complete after `start`; changed by the owner only."""
        self._large = LargeRequests(limits.max_large_bytes)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        """Notified when a session ends."""
        self._sessions: dict[BlockSession, None] = {}
        """Oldest first, those in `_cut` not. Guarded by _lock."""
        self._cut: set[BlockSession] = set()
        """Made way for another one and are about to end; never more than `max_connections`. Guarded by _lock."""
        self._tenants: dict[BlockSession, TenantId] = {}
        """The tenant whose place each greeted session has. Guarded by _lock."""

    def start(self) -> tuple[str, ...]:
        """Listens and serves; returns the addresses with real ports.

        Raises `ConfigError` when one cannot be bound, or the files for TLS are no good.
        """
        if self._tls is not None:
            self._tls.check()
        for text in self._table.listen:
            access = SocketAccess(self._table.socket_mode, self._table.socket_group)
            self._listeners.append(Listener(Address.parse(text), access))
        for listener in self._listeners:
            thread = threading.Thread(target=self._accept, args=(listener,), name="kvtier-accept", daemon=True)
            self._accepting.append(thread)
            thread.start()
        return tuple(listener.address for listener in self._listeners)

    def end_stale(self) -> int:
        """Ends the connections whose credentials are not accepted any more, whatever they are doing; how many there
        were. Any thread."""
        stale = [
            session
            for session in self._snapshot()
            if session.login is not None and not self._logins.authenticator.is_current(session.login)
        ]
        for session in stale:
            session.cut()
        return len(stale)

    def problem(self) -> str | None:
        """What keeps it from doing its work, None when nothing does. Any thread, once started."""
        return None if all(thread.is_alive() for thread in self._accepting) else "a listening thread is gone"

    def stop(self, grace_s: float) -> None:
        """Takes no new connections and requests, gives those in flight `grace_s` seconds, then cuts them. Waits."""
        self._stopping.set()
        for listener in self._listeners:
            listener.shut_down()
        for thread in self._accepting:
            thread.join()
        for listener in self._listeners:
            listener.close()
        for session in self._snapshot():
            session.finish()
        if not self._wait_for_sessions(grace_s):
            for session in self._snapshot():
                session.cut()
            if not self._wait_for_sessions(_LAST_WAIT_S):
                _log.warning("%d connections did not end in time", len(self._snapshot()))

    def _accept(self, listener: Listener) -> None:
        while not self._stopping.is_set():
            try:
                connection = listener.accept()
            except OSError as error:
                if not self._stopping.wait(_PAUSE_S):
                    _log.warning("cannot accept a connection on %s: %s", listener.address, error)
                continue
            try:
                self._admit(connection)
            except (OSError, RuntimeError) as error:  # gone already, or no thread to be had
                connection.close()
                _log.warning("a connection on %s was dropped: %s", listener.address, error)

    def _admit(self, connection: socket.socket) -> None:
        peer = name_of(connection)  # before TLS takes the socket over
        stream = self._stream(connection)
        session = BlockSession(
            FrameSocket(stream, spins=isinstance(stream, PlainStream) and stream.is_local),
            self._core,
            self._logins.at("block", peer),
            self._limits,
            self._metrics,
            self._clients if isinstance(stream, PlainStream) and stream.is_local else None,
            stream.certificate_names if isinstance(stream, TlsStream) else frozenset,
            self._large,
            self._log_in,
            self._rates,
            self._turns,
        )
        if not self._take_in(session):
            session.door.turned_away(_MAX_CONNECTIONS)
            self._refuse(stream)
            return
        try:
            threading.Thread(target=self._serve, args=(session,), name="kvtier-block", daemon=True).start()
        except RuntimeError:
            self._forget(session)
            stream.close()
            raise

    def _take_in(self, session: BlockSession) -> bool:
        """Counts a session among those that are open; False when there are too many.

        A session that has not said who it is makes way first: a stranger must not keep out those that can.
        """
        most = self._places.num_places
        nameless = None
        with self._lock:
            if len(self._sessions) >= most:
                if len(self._cut) < most:
                    nameless = next((other for other in self._sessions if other.login is None), None)
                if nameless is None:
                    return False
                del self._sessions[nameless]
                self._cut.add(nameless)
            self._sessions[session] = None
        if nameless is not None:
            self._metrics.block_connections_refused.inc()
            nameless.door.turned_away(_MAX_CONNECTIONS)
            nameless.cut()
        return True

    def _log_in(self, session: BlockSession, login: Login) -> None:
        """Takes one of the tenant's places for a session that has said who it is."""
        try:
            self._places.take(login.tenant)
        except LimitExceededError as error:
            self._metrics.block_connections_refused.inc()
            session.door.turned_away(_MAX_CONNECTIONS, login.name)
            raise UnavailableError(str(error)) from error
        with self._lock:
            self._tenants[session] = login.tenant

    def _stream(self, connection: socket.socket) -> PlainStream | TlsStream:
        """Does not block: a handshake is the session's."""
        if self._tls is None or connection.family == socket.AF_UNIX:
            return PlainStream(connection)
        return self._tls.accept(connection)

    def _serve(self, session: BlockSession) -> None:
        self._metrics.block_connections.inc()
        try:
            session.run()
        finally:
            self._metrics.block_connections.dec()
            self._forget(session)

    def _forget(self, session: BlockSession) -> None:
        with self._changed:
            self._sessions.pop(session, None)
            self._cut.discard(session)
            tenant = self._tenants.pop(session, None)
            self._changed.notify_all()
        if tenant is not None:
            self._places.give_back(tenant)

    def _refuse(self, stream: PlainStream | TlsStream) -> None:
        """Says why and closes, without waiting for a peer that may never speak."""
        self._metrics.block_connections_refused.inc()
        message = f"{_MAX_CONNECTIONS}: {self._places.num_places} are open, and the pool takes no more"
        answer = {"id": 0, "result": Result.UNAVAILABLE, "message": message, "versions": list(VERSIONS)}
        with contextlib.closing(stream):
            if isinstance(stream, TlsStream):
                stream.turn_away()
            else:
                stream.send([memoryview(encode_head(answer))], 0)
            stream.end_sending()

    def _snapshot(self) -> list[BlockSession]:
        with self._lock:
            return [*self._sessions, *self._cut]

    def _wait_for_sessions(self, seconds: float) -> bool:
        """Whether all had ended by then."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._sessions and not self._cut, seconds)
