"""An engine's ways to its pool: each is tried as the engine would, and what fails is told with its cause."""

import socket
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtier.cli.doctor.lines import Level, Line
from kvtier.cli.doctor.pool_failures import MOST_S, failure_line
from kvtier.clock import MONOTONIC
from kvtier.config import Config
from kvtier.config.findings import size_words
from kvtier.config.tls_files import pool_tls
from kvtier.errors import ConfigError, KvtierError, UnauthenticatedError
from kvtier.identity.keys import tenant_id
from kvtier.metrics import Metrics
from kvtier.net.address import GRPC_PREFIX, UNIX_PREFIX, Address
from kvtier.net.tls import ClientTls, client_tls
from kvtier.tiers.base import Usage
from kvtier.tiers.pool.access import PoolAccess, open_transport, rank
from kvtier.tiers.pool.socket_transport import SocketTransport

_ALL_S = 15.0
_NUM_CALLS = 5
_COMPUTES = "the engine finds no block in the pool, and computes every prompt"
_SLOWER, _NO_OTHER = "a slower way is taken", "nothing is left if the way that is taken fails"


@dataclass(frozen=True, slots=True)
class Way:
    """One address, as it was tried."""

    address: str
    kind: str
    """How blocks would go: shared memory, Unix socket, TLS, TCP or gRPC. Empty: not at all."""
    call_s: float = 0.0
    usage: Usage | None = None
    failure: Exception | None = None


def pool_lines(config: Config, ways: list[Way]) -> Iterable[Line]:
    """Tries all addresses with the credentials of each tenant, and says which way an engine takes, and why no faster.

    :param ways: takes what was found for the first tenant.
    """
    deadline = MONOTONIC() + _ALL_S
    tls = client_tls(pool_tls(config), config.pool.tls_server_name)
    first, *others = config.engine_tenants()
    ways.extend(try_way(config, first, address, tls, deadline) for address in sorted(config.pool.address, key=rank))
    works = next((way for way in ways if way.failure is None), None)
    for place, way in enumerate(ways):
        if way.failure is not None:
            is_refused = isinstance(way.failure, UnauthenticatedError)
            level = Level.PROBLEM if works is None or is_refused else Level.WARNING
            effect = _COMPUTES if works is None else _SLOWER if place < ways.index(works) else _NO_OTHER
            yield failure_line(config, first, way.address, way.failure, level, effect)
    if works is None:
        return
    yield _best(works)
    yield from _why_not_faster(config, works)
    for name in others:
        way = try_way(config, name, works.address, tls, deadline)
        if way.failure is not None:
            yield failure_line(config, name, way.address, way.failure, Level.PROBLEM, f"tenant {name}: {_COMPUTES}")


def try_way(config: Config, tenant: str, address: str, tls: ClientTls | None, deadline: float) -> Way:
    """Connects, shows the tenant's token, and asks how much the tenant has there: nothing is changed."""
    timeout_s = min(config.pool.connect_timeout_s, MOST_S)
    access = PoolAccess(
        addresses=[address],
        tenant=tenant_id(tenant),
        token=config.pool_token(tenant),
        tls=tls,
        connect_timeout_s=timeout_s,
        shared_memory=False,
    )
    if MONOTONIC() + timeout_s > deadline:
        return Way(address, "", failure=TimeoutError("not tried: others took all the time"))
    try:
        transport = open_transport(access, Metrics(), connect_ahead=False)
    except ConfigError as error:
        return Way(address, "", failure=error)
    try:
        shares = False
        if isinstance(transport, SocketTransport):
            with_memory = transport.open_connection(MONOTONIC() + timeout_s)
            shares = with_memory.lease_s > 0 and config.pool.shared_memory
            with_memory.close()
        usage = transport.usage(timeout_s)
        times = [_seconds(lambda: transport.usage(timeout_s)) for _ in range(_NUM_CALLS)]
        return Way(address, _kind(address, tls, shares), statistics.median(times), usage)
    except (OSError, KvtierError) as error:
        return Way(address, "", failure=error)
    finally:
        transport.close()


def _best(way: Way) -> Line:
    assert way.usage is not None
    holds = f"this tenant has {way.usage.num_blocks:,} blocks there, {size_words(way.usage.used_bytes)}"
    is_far = way.kind in ("TCP", "TLS") and not is_here(way.address)
    kind = f"{way.kind}, the fastest way to another host" if is_far else way.kind
    found = f"blocks go by {kind}; a call takes {way.call_s * 1e6:,.0f} us; {holds}"
    return Line(Level.OK, f"pool.address {way.address}", found)


def _why_not_faster(config: Config, way: Way) -> Iterable[Line]:
    if way.kind == "shared memory":
        return
    subject = f"pool.address {way.address}"
    if way.kind == "Unix socket":
        if not config.pool.shared_memory:
            yield Line(Level.NOTE, "pool.shared_memory", "false: blocks go through the socket", remedy="set it to true")
        else:
            found, remedy = "the pool does not share its memory", "set shared_memory = true in its [pool_service]"
            yield Line(
                Level.NOTE, subject, found, "blocks go through the socket, which is several times slower", remedy
            )
        return
    if any(address.startswith(UNIX_PREFIX) for address in config.pool.address):
        return  # why that one is not taken was told
    if is_here(way.address):
        remedy = 'give it "unix:/run/kvtier/pool.sock" in `listen`, and this engine the same in pool.address'
        found = "the pool is on this host, and none of its Unix sockets is in pool.address"
        yield Line(Level.NOTE, subject, found, "shared memory would be several times faster", remedy)
    elif way.kind == "gRPC":
        remedy = "name the pool's `listen` in pool.address"
        yield Line(Level.NOTE, subject, "gRPC is the slowest way", "the block protocol is faster", remedy)


def is_here(address: str) -> bool:
    """Whether the address is of this machine: somebody could listen at it here."""
    host = Address.parse(address.removeprefix(GRPC_PREFIX)).host
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def _kind(address: str, tls: ClientTls | None, shares: bool) -> str:
    if address.startswith(GRPC_PREFIX):
        return "gRPC"
    if address.startswith(UNIX_PREFIX):
        return "shared memory" if shares else "Unix socket"
    return "TCP" if tls is None else "TLS"


def _seconds(call: Callable[[], object]) -> float:
    begun = MONOTONIC()
    call()
    return MONOTONIC() - begun
