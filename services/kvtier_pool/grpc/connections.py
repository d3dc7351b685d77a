"""Connections to the gRPC port, which gRPC only counts: whose they are, and which of them make way."""

import logging
import sys
import threading
from collections.abc import Collection
from urllib.parse import unquote

from kvtier.clock import MONOTONIC
from kvtier.identity.keys import TenantId
from kvtier.net.own_sockets import Ends, OwnSocket, OwnSockets
from kvtier_pool.places import TenantPlaces

_log = logging.getLogger(__name__)
_PAUSE_S = 0.5
"""Seconds between two looks, or 99 times what one takes: what watching costs where few come."""
_PAUSE_CROWDED_S = 0.02
"""Seconds where half of the places are taken, or 9 times what a look takes. As many may come in that time as there are
places; gRPC refuses more."""
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
        self._tenants: dict[str, tuple[Ends, TenantId]] = {}
        """The tenant whose place a connection has, by what gRPC calls its peer. Changed under _lock, read without."""
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

    def log_in(self, peer: str, tenant: TenantId) -> None:
        """Takes one of the tenant's places for the connection of a call, with its first call. 0.1 us after that, and
        2 us for each descriptor of the process before.

        :param peer: as gRPC calls it.
        :raises LimitExceededError: the tenant has none left.
        """
        if peer in self._tenants or not self._listening or not peer.startswith(_OVER_TCP):
            return
        self._look()  # places of connections that have ended go back
        self._places.take(tenant)
        with self._lock:
            is_first = peer not in self._tenants
            if is_first:
                self._tenants[peer] = _ends_of(peer), tenant
        if not is_first:
            self._places.give_back(tenant)

    def _run(self) -> None:
        """Looks often while many are there, so that whoever comes finds room."""
        pause_s = _PAUSE_S
        while not self._stopping.wait(pause_s):
            start_s = MONOTONIC()
            there = self._look()
            self._make_room(there)
            look_s = MONOTONIC() - start_s
            is_crowded = len(there) > self.num_places // 2
            pause_s = max(_PAUSE_CROWDED_S, 9 * look_s) if is_crowded else max(_PAUSE_S, 99 * look_s)

    def _look(self) -> _Found:
        """The connections that are open, by their peers; gives places of those that have ended back."""
        there: _Found = {}
        gone: list[TenantId] = []
        try:
            with self._lock:
                for found, descriptor in self._sockets.look().items():
                    if found.there is not None and self._is_ours(found):
                        there[found.there] = found, descriptor
                for peer in [peer for peer, (ends, _) in self._tenants.items() if ends not in there]:
                    gone.append(self._tenants.pop(peer)[1])
                self._open = {ends: None for ends in (*self._open, *there) if ends in there}
        except OSError as error:
            _log.warning("cannot see the connections to the gRPC port: %s", error)
        for tenant in gone:
            self._places.give_back(tenant)
        return there

    def _make_room(self, there: _Found) -> None:
        """Ends connections that nobody has logged in over, the oldest first, as far as there are too many."""
        with self._lock:
            logged_in = {ends for ends, _ in self._tenants.values()}
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
