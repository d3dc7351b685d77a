"""A cache pool as a process of its own, and every way to it."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.clock import MONOTONIC
from kvtier.codec.sealing import SealingKeys
from kvtier.config import token_sha256
from kvtier.errors import KvtierError, UnavailableError
from kvtier.identity.keys import tenant_id
from kvtier.metrics import Metrics
from kvtier.system.processes import Service
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.pool.grpc_transport import GrpcTransport
from kvtier.tiers.pool.local_transport import LocalTransport
from kvtier.tiers.pool.socket_transport import SocketTransport
from kvtier.tiers.pool.tier import PoolTier, PoolTransport
from kvtier_bench.measuring.blocks import TENANT

CALL_TIMEOUT_S = 30.0


SHM = "shm"


@dataclass(frozen=True, slots=True)
class PoolProcess:
    """A pool that serves."""

    pid: int
    token: str
    tcp: str
    unix: str
    grpc: str
    http: str
    shared_memory: bool
    """Whether it offers its memory to be mapped."""
    tenant: str = TENANT
    """The tenant whose token it is."""

    def paths(self) -> list[str]:
        """Every way there is, the one that engines prefer first, by the names that reports have for them."""
        return [*([SHM] if self.shared_memory else []), "unix", "tcp", "grpc"]

    def local_transport(self, metrics: Metrics) -> LocalTransport:
        """Returns a transport over shared memory where that works, else over the Unix socket; `metrics` tells which it
        is."""
        socket = SocketTransport(self.unix, self.token, tenant_id(self.tenant), metrics=metrics)
        return LocalTransport(socket, metrics=metrics)

    def tier(self, path: str, stack: ExitStack, *, only: bool = True, sealing: SealingKeys | None = None) -> PoolTier:
        """A tier over one of them, closed when `stack` is.

        :param sealing: keys that it seals with.
        :param only: leaving the stack raises when bytes went another way.
        """
        metrics = Metrics()
        tier = PoolTier(
            self.transport(path, metrics),
            tenant_id(self.tenant),
            metrics=metrics,
            breaker=CircuitBreaker(3, 1.0),
            call_timeout_s=CALL_TIMEOUT_S,
            sealing=sealing,
        )
        stack.callback(tier.close)

        def require_path(error: type[BaseException] | None, *_: object) -> None:
            if error is None and (other := _other_paths(metrics, path)):
                raise KvtierError(f"bytes for {path} went over {other}: the figures would mean nothing")

        if only:
            stack.push(require_path)
        return tier

    def tiers(self, stack: ExitStack) -> dict[str, PoolTier]:
        """A tier over each of them."""
        return {path: self.tier(path, stack) for path in self.paths()}

    def transport(self, path: str, metrics: Metrics) -> PoolTransport:
        """One of the ways to it, by its name; the caller closes it."""
        match path:
            case "shm":
                return self.local_transport(metrics)
            case "unix" | "tcp":
                address = self.unix if path == "unix" else self.tcp
                return SocketTransport(address, self.token, tenant_id(self.tenant), metrics=metrics)
            case _:
                return GrpcTransport(self.grpc, self.token)


def _other_paths(metrics: Metrics, path: str) -> str:
    """What else than `path` has carried bytes."""
    samples = [sample for family in metrics.path_bytes.collect() for sample in family.samples]
    others = {s.labels["path"] for s in samples if s.name.endswith("_total") and s.value and s.labels["path"] != path}
    return ", ".join(sorted(others))


def _shares_memory(unix: str, token: str, tenant: str) -> bool:
    transport = LocalTransport(SocketTransport(unix, token, tenant_id(tenant)), metrics=Metrics())
    try:
        transport.memory.acquire([], [], MONOTONIC() + CALL_TIMEOUT_S)
    except UnavailableError:
        return False
    finally:
        transport.close()
    return True


@contextmanager
def pool_process(folder: Path, memory_bytes: int, settings: Sequence[str] = ()) -> Iterator[PoolProcess]:
    """Starts a pool with one tenant; leaving the context stops it.

    :param folder: for its configuration, its log and its socket: keep the path short.
    :param settings: lines of its table `pool_service`, beside those that are always there.
    """
    with pool_of_tenants(folder, memory_bytes, settings, {TENANT: ()}) as pools:
        yield pools[TENANT]


@contextmanager
def pool_of_tenants(
    folder: Path, memory_bytes: int, settings: Sequence[str], tenants: Mapping[str, Sequence[str]]
) -> Iterator[dict[str, PoolProcess]]:
    """Starts a pool, as `pool_process` does, and gives it as each of its tenants sees it, by the tenant's name.

    :param tenants: lines of each tenant's table, beside its token.
    """
    tokens = {name: secrets.token_urlsafe(32) for name in tenants}
    config = folder / "pool.toml"
    config.write_text(
        f'[pool_service]\nlisten = ["127.0.0.1:0", "unix:{folder}/pool.sock"]\n'
        f'grpc_listen = ["127.0.0.1:0"]\nhttp_listen = "127.0.0.1:0"\nmemory_bytes = {memory_bytes}\n'
        + "".join(f"{line}\n" for line in settings)
        + "".join(
            f'[tenants.{name}]\ntoken_sha256 = ["{token_sha256(tokens[name])}"]\n' + "".join(f"{line}\n" for line in of)
            for name, of in tenants.items()
        )
    )
    with Service(["pool", "serve", "--config", str(config)], log=folder / "pool.log", environ={}) as service:
        ready = service.ready()
        tcp, unix = ready["block"].split(",")
        first = next(iter(tenants))
        shares = _shares_memory(unix, tokens[first], first)
        yield {
            name: PoolProcess(service.process.pid, token, tcp, unix, ready["grpc"], ready["http"], shares, name)
            for name, token in tokens.items()
        }
