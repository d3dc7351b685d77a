"""What connections have sent that no call was given: gRPC gathers it, however much it is."""

from collections import Counter, defaultdict
from collections.abc import Mapping

from kvtier.identity.keys import TenantId
from kvtier.net.own_sockets import Ends

_MOST_OF_STRANGERS_BYTES, _MOST_OF_TENANT_BYTES = 64 << 20, 128 << 20
"""What may be gathered over all connections without a login together, and over those of each tenant: what is read
ahead, and a message of each call that is served. Less ends connections of clients whose calls are often refused."""
_MUCH_BYTES = 16 << 20
"""What makes looks more frequent. Less than a bound: a flood has brought as much again until the next look."""
_OVERHEAD = 1.005
"""Bytes over the network for each byte of a message, at most, with the heads of HTTP/2 and TLS."""
_HEADERS_BYTES = 512
"""What comes with a message besides: the headers of its call. Where they are longer, that is gathered."""


class GatheredBytes:
    """Bytes that have come over each connection, less those of messages that calls were given. Not thread-safe.

    Nothing of it is forgotten while the connection lasts, or a slow flood would go unseen: pings, health checks and
    refused calls add up, until the connection makes way for a new one after days.

    gRPC 1.85 keeps all fields of headers that do not end (CONTINUATION frames of HTTP/2), beyond its own limit for
    metadata: without this, clients without a token take gigabytes of a pool.
    """

    def __init__(self) -> None:
        self._given: Counter[Ends] = Counter()
        """Bytes that messages have explained since the last look."""
        self._seen: dict[Ends, tuple[int, int]] = {}
        """Bytes that had come at the last look, and how many of them were gathered."""
        self.is_much = False
        """Whether more was gathered, as of the last look, than clients that go about their work bring together."""

    def note(self, connection: Ends, nbytes: int) -> None:
        """A call was given a message of this length that has come over this connection."""
        self._given[connection] += round(nbytes * _OVERHEAD) + _HEADERS_BYTES

    def flooding(self, received: Mapping[Ends, int], owners: Mapping[Ends, TenantId]) -> list[Ends]:
        """The connections to end: of a tenant, or of all without one, over which too much was gathered, those with the
        most.

        :param received: bytes that have come so far, by the peer, of all connections.
        :param owners: the tenants of those that somebody has logged in over.
        """
        seen, self._seen = self._seen, {}
        of_owners = defaultdict[TenantId | None, list[tuple[int, Ends]]](list)
        for connection, num_come in received.items():
            num_before, gathered = seen.get(connection, (0, 0))
            gathered = max(0, gathered + num_come - num_before - self._given[connection])
            self._seen[connection] = num_come, gathered
            of_owners[owners.get(connection)].append((gathered, connection))
        self._given.clear()
        self.is_much = sum(gathered for _, gathered in self._seen.values()) > _MUCH_BYTES
        floods = list[Ends]()
        for owner, found in of_owners.items():
            left = sum(gathered for gathered, _ in found)
            most = _MOST_OF_STRANGERS_BYTES if owner is None else _MOST_OF_TENANT_BYTES
            if left <= most:
                continue
            for gathered, connection in sorted(found, reverse=True):
                if left <= most // 2:
                    break
                floods.append(connection)
                left -= gathered
        return floods
