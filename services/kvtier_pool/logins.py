"""Logins at all doors of a pool: noted in the audit log, counted, and slow to answer where an address keeps failing."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from urllib.parse import unquote

from kvtier.clock import MONOTONIC, Clock
from kvtier.net.tls_errors import TlsError
from kvtier_pool.audit import AuditLog
from kvtier_pool.auth import Authenticator, Login, LoginRefusedError
from kvtier_pool.metrics import PoolMetrics
from kvtier_pool.strangers import StrangerLog

_NOBODY: frozenset[str] = frozenset()
_FREE_FAILURES = 3
"""Refusals of one address that are answered at once: an engine with a wrong token is told so."""
_FIRST_DELAY_S, _MAX_DELAY_S = 0.03, 0.5
"""The longest is below the time that clients take to connect, so that they hear why they are refused."""
_FORGIVEN_AFTER_S = 60.0
_MOST_ADDRESSES = 1024
"""Addresses whose refusals are remembered; those that failed longest ago make room."""
_MOST_CALLERS = 1024
"""gRPC peers that have logged in and need no other line: each of their calls shows credentials."""
_MOST_LATE = 4
"""Refusals of gRPC and of HTTP, each, that are late at a time: each keeps a thread. Others are answered at once. In the
block protocol, those who are refused make way for others meanwhile."""


class Logins:
    """Lets peers in. Any thread.

    Credentials are looked at before anything else, and good ones never wait: a stranger behind the address of a tenant
    (NAT) costs the tenant nothing, however often it fails. What is late is the answer to a refusal.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        audit: AuditLog,
        metrics: PoolMetrics,
        *,
        clock: Clock = MONOTONIC,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.authenticator = authenticator
        self.audit = audit
        self._strangers = StrangerLog(clock)
        self._metrics = metrics
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """How often an address has failed, and when it did last; oldest first. Guarded by _lock."""
        self._callers: OrderedDict[tuple[str, Login], None] = OrderedDict()
        """Guarded by _lock."""
        self._late = {door: threading.Semaphore(_MOST_LATE) for door in ("grpc", "http")}

    def at(self, door: str, peer: str) -> "Door":
        """The door for one peer.

        :param door: a word for the log: `block`, `grpc` or `http`.
        :param peer: its address, `host:port` where it has one.
        """
        return Door(self, door, peer)

    def accepted(self, door: str, peer: str, login: Login) -> None:
        """Notes a login, of a gRPC peer once for all its calls."""
        if door == "grpc":
            caller = (peer, login)
            with self._lock:
                if caller in self._callers:
                    return
                self._callers[caller] = None
                if len(self._callers) > _MOST_CALLERS:
                    self._callers.popitem(last=False)
        self.audit.note_repeated(
            "login",
            (door, _host(peer), login.role, login.name, login.token),
            door=door,
            address=peer,
            role=login.role,
            name=login.name,
            token=login.token,
            certificate=login.certificate_name,
        )

    def refused(
        self, door: str, peer: str, error: LoginRefusedError, wait: Callable[[float], object] | None = None
    ) -> None:
        """Notes and counts a refusal. Blocks for half a second at the most.

        :param wait: waits so long, or until the peer's connection makes way for another one; None: no matter what.
        """
        self._metrics.logins_refused.labels(error.reason).inc()
        host = _host(peer)
        self.audit.note_repeated(
            # Not by tokens that nobody has: a stranger shows another one each time.
            "login_refused",
            (door, host, error.reason, error.name, error.token if error.name is not None else None),
            door=door,
            address=peer,
            reason=error.reason,
            name=error.name,
            token=error.token,
        )
        delay_s = self._delay_s(host)
        late = self._late.get(door)
        if not delay_s or (late is not None and not late.acquire(blocking=False)):
            return
        try:
            (wait or self._sleep)(delay_s)
        finally:
            if late is not None:
                late.release()

    def not_understood(self, door: str, peer: str, error: Exception) -> None:
        """Notes, logs and counts that a peer's connection to this door was refused before it could log in."""
        reason = "tls" if isinstance(error, TlsError) else "protocol"
        self._metrics.strangers_refused.labels(door, reason).inc()
        self._strangers.note(peer, error)
        self.audit.note_repeated(
            "connection_refused", (door, _host(peer), reason), door=door, address=peer, reason=str(error)
        )

    def _delay_s(self, host: str) -> float:
        now_s = self._clock()
        with self._lock:
            count, last_s = self._failures.pop(host, (0, now_s))
            count = count + 1 if now_s - last_s < _FORGIVEN_AFTER_S else 1
            self._failures[host] = (count, now_s)
            if len(self._failures) > _MOST_ADDRESSES:
                self._failures.popitem(last=False)
        if count <= _FREE_FAILURES:
            return 0.0
        return min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(10, count - _FREE_FAILURES - 1))


class Door:
    """The door of a pool for one peer, which logs in there. Any thread."""

    __slots__ = ("_door", "_logins", "_peer")

    def __init__(self, logins: Logins, door: str, peer: str) -> None:
        self._logins, self._door, self._peer = logins, door, peer

    @property
    def peer(self) -> str:
        """The peer's address."""
        return self._peer

    def tenant(
        self,
        token: str | None,
        certificate_names: frozenset[str] = _NOBODY,
        wait: Callable[[float], object] | None = None,
    ) -> Login:
        """`Authenticator.tenant`, noted. Blocks for a moment before it raises: by `wait`, see `Logins.refused`."""
        return self._noted(lambda auth: auth.tenant(token, certificate_names), wait)

    def log_in(self, token: str | None) -> Login:
        """`Authenticator.log_in`, noted. Blocks for a moment before it raises."""
        return self._noted(lambda auth: auth.log_in(token))

    def authenticate(
        self, metadata: Iterable[tuple[str, str | bytes]], certificate_names: frozenset[str] = _NOBODY
    ) -> Login:
        """`Authenticator.authenticate`, noted. Blocks for a moment before it raises."""
        return self._noted(lambda auth: auth.authenticate(metadata, certificate_names))

    def turned_away(self, limit: str, name: str | None = None) -> None:
        """Notes that the peer's connection was refused, or cut, for want of a place.

        :param limit: the setting that bounds the places.
        :param name: of the tenant that the peer has shown to be; None: it has not.
        """
        self._logins.audit.note_repeated(
            "connection_refused",
            (self._door, _host(self._peer), limit, name),
            door=self._door,
            address=self._peer,
            limit=limit,
            name=name,
        )

    def not_understood(self, error: Exception) -> None:
        """Notes, logs and counts that the peer's connection was refused before it could log in.

        :param error: why: it speaks another protocol than the port, or the two cannot agree on TLS.
        """
        self._logins.not_understood(self._door, self._peer, error)

    def is_current(self, login: Login) -> bool:
        """Whether the credentials would still be accepted."""
        return self._logins.authenticator.is_current(login)

    def _noted(self, log_in: Callable[[Authenticator], Login], wait: Callable[[float], object] | None = None) -> Login:
        try:
            login = log_in(self._logins.authenticator)
        except LoginRefusedError as error:
            self._logins.refused(self._door, self._peer, error, wait)
            raise
        self._logins.accepted(self._door, self._peer, login)
        return login


def grpc_peer(peer: str) -> str:
    """`host:port` of what gRPC says of a peer, such as `ipv6:%5B::1%5D:5`."""
    kind, _, rest = unquote(peer).partition(":")
    return rest if kind in ("ipv4", "ipv6") else "a Unix socket"


def _host(peer: str) -> str:
    """The address without its port, of IPv6 the network of a site: a site has as many addresses as it likes."""
    host, colon, _ = peer.rpartition(":")
    if not colon:
        return peer
    if host.startswith("["):
        return ":".join(host.strip("[]").split(":")[:4])
    return host
