"""An engine's ways to its pool: each is tried as the engine would, and what fails is told with its cause."""

import os
import socket
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvtier.cli.doctor.lines import Level, Line
from kvtier.clock import MONOTONIC
from kvtier.config import Config, token_sha256
from kvtier.config.credentials import token_id
from kvtier.config.findings import size_words
from kvtier.errors import ConfigError, KvtierError, UnauthenticatedError
from kvtier.identity.keys import tenant_id
from kvtier.metrics import Metrics
from kvtier.net.address import GRPC_PREFIX, UNIX_PREFIX, Address
from kvtier.net.tls import ClientTls, client_tls
from kvtier.net.tls_errors import TlsError
from kvtier.net.wrong_protocol import WrongProtocolError
from kvtier.tiers.base import Usage
from kvtier.tiers.pool.access import PoolAccess, open_transport, rank
from kvtier.tiers.pool.socket_transport import SocketTransport

_MOST_S = 3.0
"""Seconds for one attempt, though the file may allow more."""
_ALL_S = 15.0
_NUM_CALLS = 5
_COMPUTES = "the engine finds no block in the pool, and computes every prompt"


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
    tls = client_tls(config.pool_tls(), config.pool.tls_server_name)
    first, *others = config.engine_tenants()
    ways.extend(try_way(config, first, address, tls, deadline) for address in sorted(config.pool.address, key=rank))
    works = next((way for way in ways if way.failure is None), None)
    for way in ways:
        if way.failure is not None:
            level = Level.PROBLEM if works is None or _is_refused(way.failure) else Level.WARNING
            yield failure_line(config, first, way, level, _COMPUTES if works is None else "a slower way is taken")
    if works is None:
        return
    yield _best(config, works)
    yield from _why_not_faster(config, works)
    for name in others:
        way = try_way(config, name, works.address, tls, deadline)
        if way.failure is not None:
            yield failure_line(config, name, way, Level.PROBLEM, f"tenant {name}: {_COMPUTES}")


def try_way(config: Config, tenant: str, address: str, tls: ClientTls | None, deadline: float) -> Way:
    """Connects, shows the tenant's token, and asks how much the tenant has there: nothing is changed."""
    timeout_s = min(config.pool.connect_timeout_s, _MOST_S)
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


def failure_line(config: Config, tenant: str, way: Way, level: Level, effect: str) -> Line:
    """What an attempt that failed means, and what to do."""
    assert way.failure is not None
    below = way.failure.__cause__
    error = below if isinstance(below, OSError) and not isinstance(way.failure, OSError) else way.failure
    found, remedy = _explained(config, tenant, way.address, error)
    return Line(level, f"pool.address {way.address}", found, effect, remedy)


def _explained(config: Config, tenant: str, address: str, error: BaseException) -> tuple[str, str]:
    """What was found, and what to do."""
    if isinstance(error, UnauthenticatedError):
        token = config.pool_token(tenant)
        if token is None:
            return f"the pool refuses the certificate: {error}", ""
        found = f"the pool refuses the token of tenant {tenant!r}, whose id is {token_id(token_sha256(token))}: {error}"
        digest = "its SHA-256 (printf %s TOKEN | sha256sum) must stand in the pool's token_sha256 of that tenant"
        return found, f"give this engine the token of tenants.{tenant} that the pool knows: {digest}"
    if isinstance(error, TlsError | WrongProtocolError | ConfigError):
        return str(error), ""
    path = Path(address.removeprefix(GRPC_PREFIX).removeprefix(UNIX_PREFIX))
    if address.removeprefix(GRPC_PREFIX).startswith(UNIX_PREFIX):
        return _socket_explained(path, error)
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there", "start the pool, or correct the address: its own `listen` says which"
    if isinstance(error, TimeoutError) and "greeting" in str(error):
        return str(error), "if it is, the pool hangs or is stopped: see its log, and restart it"
    if isinstance(error, TimeoutError):
        found = f"no answer within {min(config.pool.connect_timeout_s, _MOST_S):g} s"
        return found, "look for a firewall, a wrong address, or a pool that hangs (kvtier doctor there)"
    if isinstance(error, socket.gaierror):
        return f"the name has no address here: {error.strerror}", "correct the address, or this machine's DNS"
    return str(error) or type(error).__name__, "see the pool's log, and run kvtier doctor with its file there"


def _socket_explained(path: Path, error: BaseException) -> tuple[str, str]:
    if isinstance(error, PermissionError):
        found = os.stat(path) if os.access(path.parent, os.X_OK, effective_ids=True) else None
        if found is None:
            return f"user {os.geteuid()} may not enter {path.parent}", f"let this user into it: chmod o+x {path.parent}"
        who = f"{found.st_mode & 0o777:04o} of user {found.st_uid} and group {found.st_gid}"
        remedy = "set socket_mode = 0o660 and socket_group in the pool's [pool_service], and put this user into that "
        return f"user {os.geteuid()} may not use the socket, which is {who}", f"{remedy}group (docs/deployment.md)"
    if isinstance(error, FileNotFoundError):
        remedy = "start the pool on this host, share the socket's folder with this container, or correct the path"
        return "there is no such socket", remedy
    if isinstance(error, ConnectionRefusedError):
        return "the socket is there, and nobody listens: its pool has ended", "start the pool"
    if isinstance(error, TimeoutError):
        return "no answer in time: the pool hangs or is stopped", "see the pool's log; restart it"
    return str(error) or type(error).__name__, "see the pool's log"


def _best(config: Config, way: Way) -> Line:
    assert way.usage is not None
    holds = f"this tenant has {way.usage.num_blocks:,} blocks there, {size_words(way.usage.used_bytes)}"
    found = f"blocks go by {way.kind}; a call takes {way.call_s * 1e6:,.0f} us; {holds}"
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
        return  # why that one fails was told
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


def _is_refused(error: Exception) -> bool:
    return isinstance(error, UnauthenticatedError)


def _seconds(call: object) -> float:
    begun = MONOTONIC()
    call()  # type: ignore[operator]
    return MONOTONIC() - begun
