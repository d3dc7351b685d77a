"""Calls to the cache pool over a few connections that are kept, without a word of what is asked."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from kvtier.clock import MONOTONIC
from kvtier.errors import ClosedError, UnavailableError
from kvtier.identity.keys import NamespaceId, TenantId
from kvtier.net.address import Address
from kvtier.net.tls import ClientTls, require_credentials
from kvtier.protocol.block import Fields, Verb
from kvtier.tiers.pool.connection import PoolConnection

_MAX_IDLE = 8
"""Connections kept for the next call; more threads than that at a time connect anew."""
Call = AbstractContextManager[tuple[PoolConnection, Fields]]
"""A call under way: its first answer, and the connection on which more may come."""


class PoolCalls:
    """One connection for each thread that is in a call. Any thread.

    A call connects when it has to. A connection that the pool has closed meanwhile, e.g. by a restart, is
    replaced by a fresh one and the call made again, once, as long as no answer has come. A call that fails or
    is late closes its connection, so that no late byte meets another call or its buffers.
    """

    def __init__(
        self,
        address: Address,
        token: str | None,
        tenant: TenantId,
        *,
        connect_timeout_s: float,
        tls: ClientTls | None,
        namespaces: Sequence[NamespaceId],
    ) -> None:
        """Connects to nobody yet. Parameters are those of `SocketTransport`."""
        require_credentials(token, None if address.path else tls)
        self._address, self._token, self._tenant = address, token, tenant
        self._tls, self._namespaces = tls, tuple(namespaces)
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._idle: list[PoolConnection] = []
        """Ready for a call, the one used last at the end. Guarded by _lock."""
        self._closed = False
        """Guarded by _lock."""

    def connect(self) -> None:
        """Opens a connection ahead of the first call. Blocks up to `connect_timeout_s`; raises as calls do."""
        self._give_back(self.open_new())

    def open_new(self) -> PoolConnection:
        """Returns a connection that belongs to the caller, who closes it. Blocks up to `connect_timeout_s`; raises as
        calls do."""
        with self._translated():
            return self.open_connection(MONOTONIC() + self._connect_timeout_s)

    def call(self, verb: Verb, fields: Mapping[str, object], deadline: float) -> Call:
        """One request without a payload; see `call_with`."""
        return self.call_with(lambda connection: connection.send(verb, fields, (), deadline), deadline)

    @contextmanager
    def call_with(
        self, send: Callable[[PoolConnection], None], deadline: float
    ) -> Iterator[tuple[PoolConnection, Fields]]:
        """One or several requests. Gives the first answer, and the connection for more; takes it back when all is well.

        :param send: sends the requests. Called again with another connection if need be.
        """
        with self._translated():
            connection, answer = self._ask(send, deadline)
            try:
                yield connection, answer
                connection.require_end()
            except BaseException:
                connection.close()
                raise
        self._give_back(connection)

    def _ask(self, send: Callable[[PoolConnection], None], deadline: float) -> tuple[PoolConnection, Fields]:
        """The first answer, and the connection that it came on."""
        used = self._take_idle()
        if used is not None:
            try:
                return used, _first_answer(used, send, deadline)
            except ConnectionError:
                used.close()
                self._drop_idle()  # of the same age, so most likely closed as well
            except BaseException:
                used.close()
                raise
        fresh = self.open_connection(min(deadline, MONOTONIC() + self._connect_timeout_s))
        try:
            return fresh, _first_answer(fresh, send, deadline)
        except BaseException:
            fresh.close()
            raise

    def open_connection(self, deadline: float) -> PoolConnection:
        """Returns a connection that belongs to the caller, who closes it."""
        with self._lock:
            if self._closed:
                raise ClosedError("the connection to the pool is closed")
        return PoolConnection.open(
            self._address, self._token, self._tenant, deadline, tls=self._tls, namespaces=self._namespaces
        )

    def close(self) -> None:
        """Closes what is idle now, and the connections of calls in flight when they end. Idempotent."""
        with self._lock:
            self._closed = True
        self._drop_idle()

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


def _first_answer(connection: PoolConnection, send: Callable[[PoolConnection], None], deadline: float) -> Fields:
    send(connection)
    return connection.receive_answer(deadline)
