"""Connections to the gRPC port, which gRPC only counts: whose they are, and which of them make way."""

import logging
import sys
import threading
from collections.abc import Callable, Collection
from urllib.parse import unquote

from kvtier.clock import MONOTONIC
from kvtier.identity.keys import TenantId
from kvtier.net.own_sockets import Ends, OwnSocket, OwnSockets
from kvtier.system.quiet_log import QuietLog
from kvtier_pool.auth import Login
from kvtier_pool.grpc.gathered import GatheredBytes
from kvtier_pool.places import TenantPlaces

_log = logging.getLogger(__name__)
_PAUSE_S = 0.1
"""Seconds between two looks, or 39 times what one takes: what watching costs where few come. A flood lasts as long, and
brings half a GiB a second."""
_PAUSE_CROWDED_S = 0.02
"""Seconds where half of the places are taken, or much has come that no call was given, or 9 times what a look takes. As
many may come in that time as there are places; gRPC refuses more."""
_LAST_WORDS_S = 1.0
"""Seconds that a connection has to end what it is told, before it is ended."""
_ANY = ("0.0.0.0", "::")
_OVER_TCP = ("ipv4:", "ipv6:")
_Found = dict[Ends, tuple[OwnSocket, int]]


class GrpcConnections:
    """Connections over TCP whose calls have shown a tenant's credentials have a place of that tenant; those without
    make way, the oldest first, when there are more connections than places. Any thread.

    gRPC for Python tells nobody of connections. They are sockets of this process, so they are found among its
    descriptors, and the address of its peer says which one a call came over. Linux only: elsewhere connections are
    only counted, by gRPC. Unix sockets have no such addresses, and permissions of files instead.
    """

    def __init__(self, places: TenantPlaces) -> None:
        """`start` starts to watch."""
        self._places = places
        self.num_places = places.num_places
        """How many connections there may be; in between, there are more for a moment."""
        self._sockets = OwnSockets()
        """Guarded by _lock."""
        self._listening: frozenset[Ends] = frozenset()
        """Set by `start`, before there are connections."""
        self._lock = threading.Lock()
        self._open: dict[Ends, None] = {}
        """Peers of connections, the oldest first, as of the last look. Guarded by _lock."""
        self._logins: dict[str, tuple[Ends, Login]] = {}
        """The last login over each connection that has a place, by what gRPC calls its peer. Changed under _lock,
        read without."""
        self._stale_since_s: dict[str, float] = {}
        """The time at which the login of a peer was first found to be accepted no more. Guarded by _lock."""
        self._gathered = GatheredBytes()
        """Guarded by _lock."""
        self._flood_log = QuietLog(_log)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-grpc-peers", daemon=True)

    def listening(self) -> frozenset[Ends]:
        """Returns the addresses that this process listens on now."""
        if sys.platform != "linux":
            return frozenset()
        with self._lock:
            return frozenset(found.here for found in self._sockets.look() if found.there is None)

    def start(self, addresses: Collection[Ends]) -> None:
        """Watches the connections to these addresses, which gRPC listens on."""
        self._listening = frozenset(addresses)
        if addresses:
            self._thread.start()

    def stop(self) -> None:
        """Watches no longer. Idempotent; allowed without `start`."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def log_in(self, peer: str, login: Login) -> None:
        """Takes one of the tenant's places for the connection of a call, with its first call. 0.1 us after that. Where
        the tenant seems to have none left, 2 us for each descriptor of the process.

        :param peer: as gRPC calls it.
        :raises LimitExceededError: the tenant has none left.
        """
        if not self._listening or not peer.startswith(_OVER_TCP):
            return
        if (known := self._logins.get(peer)) is not None:
            if known[1] != login:
                self._renew(peer, login)
            return
        if not self._places.has_one_for(login.tenant):
            self._look()  # places of connections that have ended go back
        self._places.take(login.tenant)
        with self._lock:
            is_first = peer not in self._logins
            if is_first:
                self._logins[peer] = _ends_of(peer), login
        if not is_first:
            self._places.give_back(login.tenant)

    def note(self, peer: str, nbytes: int) -> None:
        """A call was given a message of this length that has come from a peer. 1 us."""
        known = self._logins.get(peer)
        if known is not None:
            with self._lock:
                self._gathered.note(known[0], nbytes)

    def end_stale(self, is_current: Callable[[Login], bool]) -> None:
        """Ends connections whose last login has not been accepted any more for a second, in which their calls hear why:
        whoever had a token that is gone keeps no places of its tenant. Called every second or so, by one thread."""
        with self._lock:
            stale = [peer for peer, (_, login) in self._logins.items() if not is_current(login)]
            now_s = MONOTONIC()
            self._stale_since_s = {peer: self._stale_since_s.get(peer, now_s) for peer in stale}
            is_due = any(now_s - since_s >= _LAST_WORDS_S for since_s in self._stale_since_s.values())
        if not is_due:
            return
        there = self._look()
        with self._lock:
            for peer, since_s in self._stale_since_s.items():
                ends, _ = self._logins.get(peer, (None, None))
                if ends in there and now_s - since_s >= _LAST_WORDS_S:
                    self._sockets.end(*there[ends])

    def _renew(self, peer: str, login: Login) -> None:
        """The tenant shows another token over a connection that it has. The place stays that of the first tenant."""
        with self._lock:
            known = self._logins.get(peer)
            if known is not None and known[1].tenant == login.tenant:
                self._logins[peer] = known[0], login

    def _run(self) -> None:
        """Looks often while many are there, so that whoever comes finds room."""
        pause_s = _PAUSE_S
        while not self._stopping.wait(pause_s):
            start_s = MONOTONIC()
            there = self._look()
            self._make_room(there)
            self._end_floods(there)
            look_s = MONOTONIC() - start_s
            is_crowded = len(there) > self.num_places // 2 or self._gathered.is_much
            pause_s = max(_PAUSE_S, 39 * look_s)
            if is_crowded:  # where a look takes long because of a flood, the next one is all the more urgent
                pause_s = min(_PAUSE_S, max(_PAUSE_CROWDED_S, 9 * look_s))

    def _look(self) -> _Found:
        """The connections that are open, by their peers; gives places of those that have ended back."""
        there: _Found = {}
        gone: list[TenantId] = []
        try:
            with self._lock:
                for found, descriptor in self._sockets.look().items():
                    if found.there is not None and self._is_ours(found):
                        there[found.there] = found, descriptor
                for peer in [peer for peer, (ends, _) in self._logins.items() if ends not in there]:
                    gone.append(self._logins.pop(peer)[1].tenant)
                self._open = {ends: None for ends in (*self._open, *there) if ends in there}
        except OSError as error:
            _log.warning("cannot see the connections to the gRPC port: %s", error)
        for tenant in gone:
            self._places.give_back(tenant)
        return there

    def _end_floods(self, there: _Found) -> None:
        """Ends connections that have sent much more than calls were given."""
        counts = {ends: self._sockets.received_bytes(*found) for ends, found in there.items()}
        received = {ends: count for ends, count in counts.items() if count is not None}
        with self._lock:
            owners = {ends: login.tenant for ends, login in self._logins.values()}
            floods = self._gathered.flooding(received, owners)
            for ends in floods:
                self._sockets.end(*there[ends])
        for host, _ in floods:
            self._flood_log.warning(f"gRPC connection from {host} ended: it has sent more than its calls were given")

    def _make_room(self, there: _Found) -> None:
        """Ends connections that nobody has logged in over, the oldest first, as far as there are too many."""
        with self._lock:
            logged_in = {ends for ends, _ in self._logins.values()}
            nameless = [ends for ends in self._open if ends in there and ends not in logged_in]
            for ends in nameless[: max(0, len(there) - self.num_places)]:
                self._sockets.end(*there[ends])

    def _is_ours(self, found: OwnSocket) -> bool:
        host, port = found.here
        return bool({(host, port), *((each, port) for each in _ANY)} & self._listening)


def _ends_of(peer: str) -> Ends:
    """Reads `ipv4:1.2.3.4:5` or `ipv6:%5B::1%5D:5`."""
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    return host.removeprefix("[").removesuffix("]").partition("%")[0], int(port)
