"""Callers of gRPC: the tenant of their credentials, which has a place for their connection."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import grpc

from kvtier.errors import LimitExceededError
from kvtier.system.logs import bind_log_fields
from kvtier_pool.auth import Login
from kvtier_pool.grpc.connections import GrpcConnections
from kvtier_pool.logins import Logins, grpc_peer
from kvtier_pool.subject_names import names_in

_T = TypeVar("_T")
_Serve = Callable[[Iterator[bytes], grpc.ServicerContext], _T]
"""An RPC: from the messages of a call to its answer or answers."""


class Callers:
    """Knows who calls. Any thread."""

    def __init__(self, logins: Logins, connections: GrpcConnections) -> None:
        self._logins = logins
        self.connections = connections
        """The connections of all callers."""

    def login_of(self, context: grpc.ServicerContext) -> Login:
        """The tenant that makes this call.

        :raises UnauthenticatedError: it has shown no credentials of one.
        :raises LimitExceededError: the tenant has no place for this connection.
        """
        door = self._logins.at("grpc", grpc_peer(context.peer()))
        bind_log_fields(peer=door.peer)  # the thread has served others before
        login = door.authenticate(context.invocation_metadata(), _certificate_names_of(context))
        bind_log_fields(peer=door.peer, tenant=login.name)
        try:
            self.connections.log_in(context.peer(), login)
        except LimitExceededError:
            door.turned_away("max_connections", login.name)
            raise
        return login

    def noting(self, serve: _Serve[_T]) -> _Serve[_T]:
        """Returns an RPC that serves as `serve` does, and notes each message as given to a call of its connection."""

        def serve_noting(requests: Iterator[bytes], context: grpc.ServicerContext) -> _T:
            return serve(self._noted(requests, context.peer()), context)

        return serve_noting

    def _noted(self, requests: Iterator[bytes], peer: str) -> Iterator[bytes]:
        for message in requests:
            self.connections.note(peer, len(message))
            yield message

    def end_stale(self) -> None:
        """Ends connections whose credentials have not been accepted any more for a second."""
        self.connections.end_stale(self.is_current)

    def is_current(self, login: Login) -> bool:
        """Whether the credentials would still be accepted."""
        return self._logins.authenticator.is_current(login)


def _certificate_names_of(context: grpc.ServicerContext) -> frozenset[str]:
    """DNS names and URIs of the caller's certificate, which gRPC has verified; none without one."""
    found: Mapping[str, Any] = context.auth_context()  # to sequences of bytes, which the stubs do not say
    # Not its `peer_dns` and `peer_uri`: those are cut at a NUL, which makes one name of another.
    return frozenset().union(*(names_in(pem.decode()) for pem in found.get("x509_pem_cert", ())))
