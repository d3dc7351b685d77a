"""Callers of gRPC: the tenant of their credentials, which has a place for their connection."""

from collections.abc import Mapping
from typing import Any

import grpc

from kvtier.identity.keys import TenantId
from kvtier_pool.auth import Authenticator
from kvtier_pool.grpc.connections import GrpcConnections
from kvtier_pool.subject_names import names_in


class Callers:
    """Knows who calls. Any thread."""

    def __init__(self, authenticator: Authenticator, connections: GrpcConnections) -> None:
        self._authenticator = authenticator
        self.connections = connections
        """The connections of all callers."""

    def tenant_of(self, context: grpc.ServicerContext) -> TenantId:
        """The tenant that makes this call.

        :raises UnauthenticatedError: it has shown no credentials of one.
        :raises LimitExceededError: the tenant has no place for this connection.
        """
        tenant = self._authenticator.authenticate(context.invocation_metadata(), _certificate_names_of(context))
        self.connections.log_in(context.peer(), tenant)
        return tenant


def _certificate_names_of(context: grpc.ServicerContext) -> frozenset[str]:
    """DNS names and URIs of the caller's certificate, which gRPC has verified; none without one."""
    found: Mapping[str, Any] = context.auth_context()  # to sequences of bytes, which the stubs do not say
    # Not its `peer_dns` and `peer_uri`: those are cut at a NUL, which makes one name of another.
    return frozenset().union(*(names_in(pem.decode()) for pem in found.get("x509_pem_cert", ())))
