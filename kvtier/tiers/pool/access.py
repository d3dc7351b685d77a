"""What an engine needs to reach the cache pool, and the transport that comes of it."""

import contextlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.errors import ConfigError, KvtierError
from kvtier.identity.keys import NamespaceId, TenantId
from kvtier.memory import memfd
from kvtier.metrics import Metrics
from kvtier.net.address import GRPC_PREFIX, UNIX_PREFIX, Address
from kvtier.net.tls import ClientTls
from kvtier.tiers.pool.calls import PoolCalls
from kvtier.tiers.pool.local_transport import LocalTransport
from kvtier.tiers.pool.paths_transport import PathsTransport
from kvtier.tiers.pool.socket_transport import SocketTransport
from kvtier.tiers.pool.tier import PoolTransport

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolAccess:
    """One tenant's ways to one pool."""

    addresses: Sequence[str]
    """`unix:/path`, `host:port` or `grpc:host:port`, of the same pool. The order does not matter."""
    tenant: TenantId
    token: str | None = field(repr=False)
    """None: the certificate of `tls` stands for it."""
    tls: ClientTls | None = None
    namespaces: Sequence[NamespaceId] = ()
    """All that will be used; none: any may be."""
    connect_timeout_s: float = 1.0
    shared_memory: bool = True
    """Map the pool's memory where it offers that, on a Unix socket."""

    def may_use(self, address: str) -> bool:
        """Whether we could say who we are there."""
        return self.token is not None or not address.startswith(UNIX_PREFIX)


def open_transport(access: PoolAccess, metrics: Metrics, *, connect_ahead: bool = True) -> PoolTransport:
    """The best of the ways that works, call by call: shared memory, Unix socket, TCP, gRPC. Does not block.

    Raises `ConfigError` when there is no way that could be used.

    :param metrics: takes the bytes moved, by path.
    :param connect_ahead: connect in the background, so that the first request does not wait for it.
    """
    ordered = sorted(filter(access.may_use, access.addresses), key=rank)
    if not ordered:
        raise ConfigError(
            f"pool.address: {', '.join(access.addresses)} needs the tenant's token: set it, or add a TCP address, "
            "where a certificate stands for it"
        )
    for address in sorted(set(access.addresses) - set(ordered)):
        _log.warning("%s is not used: over a Unix socket no certificate can stand for a token", address)
    transports = [(address, _transport(access, address, metrics, connect_ahead)) for address in ordered]
    return transports[0][1] if len(transports) == 1 else PathsTransport(transports)


def plain_calls(access: PoolAccess) -> list[PoolCalls]:
    """The ways on which an event loop can wait for answers, the best first: Unix sockets, and TCP without TLS. Connects
    to nobody yet; the caller closes them."""
    ordered = sorted(filter(access.may_use, access.addresses), key=rank)
    return [
        PoolCalls(
            Address.parse(address),
            access.token,
            access.tenant,
            connect_timeout_s=access.connect_timeout_s,
            tls=None,
            namespaces=access.namespaces,
        )
        for address in ordered
        if address.startswith(UNIX_PREFIX) or (access.tls is None and not address.startswith(GRPC_PREFIX))
    ]


def rank(address: str) -> int:
    """The place of an address among a pool's: the lower, the faster the blocks go."""
    return 0 if address.startswith(UNIX_PREFIX) else 2 if address.startswith(GRPC_PREFIX) else 1


def _transport(access: PoolAccess, address: str, metrics: Metrics, connect_ahead: bool) -> PoolTransport:
    if address.startswith(GRPC_PREFIX):
        # Imported here, because engines that speak the block protocol have no use for grpc.
        from kvtier.tiers.pool.grpc_transport import GrpcTransport

        return GrpcTransport(
            address.removeprefix(GRPC_PREFIX),
            access.token,
            connect_timeout_s=access.connect_timeout_s,
            tls=access.tls,
            metrics=metrics,
        )
    socket = SocketTransport(
        address,
        access.token,
        access.tenant,
        connect_timeout_s=access.connect_timeout_s,
        tls=access.tls,
        namespaces=access.namespaces,
        metrics=metrics,
    )
    if connect_ahead:
        ahead = threading.Thread(target=_connect, args=(socket,), name="kvtier-connect", daemon=True)
        with contextlib.suppress(RuntimeError):  # the process may have no more threads: the first call connects
            ahead.start()
    if access.shared_memory and address.startswith(UNIX_PREFIX) and memfd.available():
        return LocalTransport(socket, metrics=metrics)
    return socket


def _connect(transport: SocketTransport) -> None:
    """Ends within `connect_timeout_s`."""
    try:
        transport.connect()
    except KvtierError as error:
        _log.warning("no connection yet, everything misses until there is one: %s", error)
