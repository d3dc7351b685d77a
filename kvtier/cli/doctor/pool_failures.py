"""Why an attempt to reach the pool has failed, in words that say what to do."""

import errno
import os
import socket
import ssl
from pathlib import Path

from kvtier.cli.doctor.lines import Level, Line
from kvtier.config import Config, token_sha256
from kvtier.config.credentials import token_id
from kvtier.errors import ConfigError, UnauthenticatedError
from kvtier.net.address import GRPC_PREFIX, UNIX_PREFIX
from kvtier.net.tls_errors import TlsError
from kvtier.net.wrong_protocol import WrongProtocolError

MOST_S = 3.0
"""Seconds for one attempt, though the file may allow more."""


def failure_line(config: Config, tenant: str, address: str, failure: Exception, level: Level, effect: str) -> Line:
    """Returns what an attempt that failed means, and what to do.

    :param effect: what comes of it.
    """
    below = failure.__cause__
    explains_itself = isinstance(failure, OSError | UnauthenticatedError)
    error = below if isinstance(below, OSError) and not explains_itself else failure
    found, remedy = _explained(config, tenant, address, error)
    return Line(level, f"pool.address {address}", found, effect, remedy)


def _explained(config: Config, tenant: str, address: str, error: BaseException) -> tuple[str, str]:
    """What was found, and what to do."""
    if isinstance(error, UnauthenticatedError):
        if isinstance(error.__cause__, ssl.SSLError):
            return str(error), ""
        token = config.pool_token(tenant)
        if token is None:
            return f"the pool refuses the certificate: {error}", ""
        found = f"the pool refuses the token of tenant {tenant!r}, whose id is {token_id(token_sha256(token))}: {error}"
        digest = "its SHA-256 (printf %s TOKEN | sha256sum) must stand in the pool's token_sha256 of that tenant"
        return found, f"give this engine the token of tenants.{tenant} that the pool knows: {digest}"
    if isinstance(error, WrongProtocolError):
        remedy = "correct the address: the pool's own `listen` says which" if error.is_strange else ""
        return str(error), remedy
    if isinstance(error, TlsError | ConfigError):
        return str(error), ""
    path = Path(address.removeprefix(GRPC_PREFIX).removeprefix(UNIX_PREFIX))
    if address.removeprefix(GRPC_PREFIX).startswith(UNIX_PREFIX):
        return _socket_explained(path, error)
    if isinstance(error, ConnectionRefusedError) or "Connection refused" in str(error):  # the latter: gRPC's words
        return "nobody listens there", "start the pool, or correct the address: its own `listen` says which"
    if "SETTINGS frame" in str(error):  # gRPC's words
        remedy = "correct the address: the pool's own `grpc_listen` says which; its `listen` goes without `grpc:`"
        return "whatever listens there does not answer in gRPC", f"{remedy}. If it is that one, see the pool's log"
    if isinstance(error, TimeoutError) and "greeting" in str(error):
        remedy = "if it is, the pool hangs or is stopped: see its log, and restart it; else correct the address"
        return str(error), remedy
    if isinstance(error, TimeoutError):
        found = f"no answer within {min(config.pool.connect_timeout_s, MOST_S):g} s"
        return found, "look for a firewall, a wrong address, or a pool that hangs (kvtier doctor there)"
    if isinstance(error, socket.gaierror):
        return f"the name has no address here: {error.strerror}", "correct the address, or this machine's DNS"
    remedy = "correct the address, if it is not the pool's own `listen`; else see the pool's log, and run kvtier doctor"
    return str(error) or type(error).__name__, f"{remedy} with its file there"


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
    if isinstance(error, ConnectionRefusedError) or "Connection refused" in str(error):  # the latter: gRPC's words
        if not path.is_socket():
            kind = "a folder" if path.is_dir() else "another file"
            return f"there is no socket, but {kind}", "name the pool's socket: its own `listen` says which"
        return "the socket is there, and nobody listens: its pool has ended", "start the pool"
    if isinstance(error, TimeoutError):
        return "no answer in time: the pool hangs or is stopped", "see the pool's log; restart it"
    if isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.ENOTDIR):
        return f"no socket can be there: {os.strerror(error.errno)}", "correct the path"
    return str(error) or type(error).__name__, "see the pool's log"
