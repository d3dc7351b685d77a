"""Pools that run with a file of configuration, which tests change meanwhile."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.clock import MONOTONIC
from kvtier.errors import UnauthenticatedError
from kvtier.identity.keys import tenant_id
from kvtier.net.address import Address
from kvtier.system.processes import Service
from kvtier.tiers.pool.connection import PoolConnection
from pool_rig import WAIT_S, until

OLD, NEW, OTHER, BOSS = ("the-old-token-of-red", "the-new-token-of-red", "the-token-of-blue", "the-token-of-a-boss")


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def configuration(path: Path, red: str, more: str = "") -> Path:
    """A pool's, written as editors do it: another file takes the place of the old one."""
    fresh = path.with_suffix(".fresh")
    fresh.write_text(
        '[pool_service]\nlisten = ["127.0.0.1:0"]\ngrpc_listen = ["127.0.0.1:0"]\nhttp_listen = "127.0.0.1:0"\n'
        f'memory_bytes = "32MiB"\n[tenants.red]\ntoken_sha256 = [{red}]\n'
        f'[tenants.blue]\ntoken_sha256 = ["{digest(OTHER)}"]\n{more}'
    )
    fresh.replace(path)
    return path


class Pool:
    """A pool in a process of its own, and its log."""

    def __init__(self, service: Service, log: Path) -> None:
        self.service, self.log = service, log
        ready = service.ready()
        self.block, self.grpc, self.http = ready["block"], ready["grpc"], ready["http"]

    def says(self, text: str, times: int = 1) -> None:
        """Waits for it."""
        until(lambda: self.log.read_text().count(text) >= times)

    def dial(self, token: str, tenant: str = "red") -> PoolConnection:
        return PoolConnection.open(Address.parse(self.block), token, tenant_id(tenant), MONOTONIC() + WAIT_S)


@contextmanager
def running(path: Path) -> Iterator[Pool]:
    log = path.with_suffix(".log")
    with Service(["pool", "serve", "--config", str(path)], log=log, environ={}) as service:
        yield Pool(service, log)


def is_let_in(pool: Pool, token: str, tenant: str = "red") -> bool:
    try:
        pool.dial(token, tenant).close()
    except UnauthenticatedError:
        return False
    return True
