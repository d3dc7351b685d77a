"""A pool with certificates, and clients with theirs, for the tests of TLS."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from certificates import Authority, Pair
from kvtier.identity.keys import tenant_id
from kvtier.metrics import Metrics
from kvtier.net.certificates import TlsFiles
from kvtier.net.tls import ClientTls
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.pool.grpc_transport import GrpcTransport
from kvtier.tiers.pool.socket_transport import SocketTransport
from kvtier.tiers.pool.tier import PoolTier, PoolTransport
from kvtier_pool.service import Addresses
from pool_rig import TOKENS, WAIT_S, running_pool

RED_URI = "spiffe://site.example/engines/red"
BLUE_NAME = "engine-7.blue.example"
NAMES = {RED_URI: "red", BLUE_NAME: "blue"}


@dataclass(frozen=True)
class Site:
    """One CA and what it has signed; and one that nobody trusts."""

    ca: Authority
    stranger: Authority
    server: Pair

    @classmethod
    def build(cls, folder: Path) -> "Site":
        ca = Authority(folder)
        return cls(ca, Authority(folder, "stranger"), ca.issue("server", "127.0.0.1", "localhost"))

    def files(self, server: Pair | None = None, *, mutual: bool = False) -> TlsFiles:
        """The files that a pool is configured with."""
        pair = server or self.server
        return TlsFiles(certificate=pair.certificate, key=pair.key, ca=self.ca.certificate if mutual else None)

    def client(
        self, pair: Pair | None = None, *, ca: Authority | None = None, server_name: str | None = None
    ) -> ClientTls:
        """An engine's side."""
        return ClientTls(
            TlsFiles(
                ca=(ca or self.ca).certificate,
                certificate=pair.certificate if pair else None,
                key=pair.key if pair else None,
            ),
            server_name,
        )

    @contextlib.contextmanager
    def pool(self, server: Pair | None = None, *, mutual: bool = False, **settings: Any) -> Iterator[Addresses]:
        """In this process. A mutual one knows `NAMES`."""
        names = NAMES if mutual else {}
        files = self.files(server, mutual=mutual)
        with running_pool(tls=files, certificate_names=names, **settings) as addresses:
            yield addresses


def transport(
    address: str, tls: ClientTls | None, *, tenant: str = "red", token: str | None = TOKENS["red"]
) -> PoolTransport:
    """To an address as engines are given it."""
    if address.startswith("grpc:"):
        return GrpcTransport(address.removeprefix("grpc:"), token, connect_timeout_s=WAIT_S, tls=tls)
    return SocketTransport(address, token, tenant_id(tenant), connect_timeout_s=WAIT_S, tls=tls)


def tier_over(transport: PoolTransport, tenant: str = "red") -> PoolTier:
    """A tier that gives its calls time."""
    return PoolTier(
        transport,
        tenant_id(tenant),
        metrics=Metrics(),
        breaker=CircuitBreaker(1000, 0.05),
        call_timeout_s=WAIT_S,
    )
