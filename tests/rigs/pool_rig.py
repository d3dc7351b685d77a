"""What the tests of the pool share: cores, services in this process, services in their own."""

import contextlib
import hashlib
import mmap
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from free_port import free_port
from gated_files import GatedFiles
from kvtier.clock import MONOTONIC, Clock
from kvtier.codec.sealing import SealingKeys
from kvtier.codec.stored_form import encode_header, parse_header
from kvtier.config import Config, parse_config
from kvtier.identity.keys import StoreKey, TenantId, tenant_id
from kvtier.metrics import Metrics
from kvtier.net.address import Address
from kvtier.net.certificates import TlsFiles
from kvtier.policies.admission_text import parse_admission
from kvtier.store.event_hub import EventHub
from kvtier.store.lower_tiers import LowerTier
from kvtier.store.metrics import StoreMetrics
from kvtier.store.retention import RetentionLimits
from kvtier.store.store import Store
from kvtier.store.write_behind import WriteBehindSettings
from kvtier.testing.blocks import summed
from kvtier.testing.contract import make_key, make_payload
from kvtier.tiers.base import Item, Tier, WriteStatus
from kvtier.tiers.common.breaker import CircuitBreaker
from kvtier.tiers.common.write_policy import WritePolicy
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.host.slots import WriteSlot
from kvtier.tiers.pool.access import PoolAccess, open_transport
from kvtier.tiers.pool.connection import PoolConnection
from kvtier.tiers.pool.tier import PoolTier
from kvtier_pool.limits import PoolLimits
from kvtier_pool.service import Addresses, PoolService

MIB = 1 << 20
WAIT_S = 20.0
"""Bound on everything that is waited for; never reached when the code works."""
RED, BLUE = tenant_id("red"), tenant_id("blue")
TOKENS = {"red": "red-token-for-tests", "blue": "blue-token-for-tests"}
TENANTS = {hashlib.sha256(token.encode()).hexdigest(): name for name, token in TOKENS.items()}
BLOCK_BYTES = 64 * 1024


def keys(labels: Iterable[object], tenant: TenantId = RED) -> list[StoreKey]:
    return [make_key(label, tenant=tenant) for label in labels]


def payloads(labels: Iterable[object]) -> list[bytes]:
    return [make_payload(label, BLOCK_BYTES) for label in labels]


def items(labels: Iterable[object], tenant: TenantId = RED) -> list[Item[bytes]]:
    return [summed(make_key(label, tenant=tenant), make_payload(label, BLOCK_BYTES)) for label in labels]


def until(condition: Callable[[], bool], within_s: float = WAIT_S) -> None:
    """Until it holds; fails rather than hangs."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.002)


@dataclass
class CoreRig:
    """A started core without a transport."""

    core: Store
    registry: CollectorRegistry
    files: GatedFiles

    def count(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(name, labels)
        assert value is not None, f"no sample {name}{labels}"
        return value

    def pinned(self) -> tuple[float, float, float]:
        """What pins hold: blocks, the bytes of their payloads, those of their slabs."""
        blocks, nbytes, slab_bytes = (
            self.count(f"kvtier_pool_pinned_{what}") for what in ("blocks", "bytes", "slab_bytes")
        )
        return blocks, nbytes, slab_bytes

    def store(self, label: object, *, tenant: TenantId = RED, nbytes: int = BLOCK_BYTES) -> WriteStatus:
        return self.write(make_key(label, tenant=tenant), make_payload(label, nbytes), tenant=tenant)

    def write(self, key: StoreKey, payload: bytes, *, tenant: TenantId = RED) -> WriteStatus:
        header = parse_header(encode_header(key, payload))
        slot = self.core.begin_write(tenant, header.key, header.stored_length)
        if not isinstance(slot, WriteSlot):
            return slot
        slot.view[:] = payload
        return self.core.commit_write(slot, header)

    def load(self, keys: list[StoreKey], nbytes: int = BLOCK_BYTES) -> list[bytes | None]:
        with self.core.read(keys, nbytes) as blocks:
            return [bytes(block.payload) if block is not None else None for block in blocks]


@contextlib.contextmanager
def core_rig(
    disk_dir: Path | None = None,
    *,
    memory_bytes: int = 8 * MIB,
    queue_bytes: int = 4 * MIB,
    files: GatedFiles | None = None,
    max_streams: int = 2,
    event_buffer: int = 100,
    remote: Tier | None = None,
    policy: WritePolicy = WritePolicy.WRITE_THROUGH,
    shared: bool = False,
    pins: RetentionLimits | None = None,
    clock: Clock = MONOTONIC,
    admission: str | None = None,
    min_residency_s: float = 0.0,
) -> Iterator[CoreRig]:
    """A core that is checked and closed at the end. Its disk, under `write_through`, keeps what is acknowledged."""
    registry = CollectorRegistry()
    tier_metrics = Metrics(registry)
    hub = EventHub(max_streams=max_streams, buffer=event_buffer)
    files = files if files is not None else GatedFiles()
    below = []
    settings = WriteBehindSettings(policy=policy, queue_bytes=queue_bytes)
    if disk_dir is not None:
        disk = DiskTier.open(
            disk_dir, 64 * MIB, reserve_bytes=0, on_event=hub.publish, metrics=tier_metrics, files=files
        )
        files.begin()
        keeps = replace(settings, keeps_acknowledged=policy is WritePolicy.WRITE_THROUGH)
        below.append(LowerTier(disk, keeps, parse_admission(admission, 64 * MIB) if admission else None))
    if remote is not None:
        below.append(LowerTier(remote, settings, parse_admission(admission, None) if admission else None))
    core = Store(
        memory_bytes=memory_bytes,
        below=below,
        hub=hub,
        metrics=StoreMetrics(registry),
        tier_metrics=tier_metrics,
        min_residency_s=min_residency_s,
        shared=shared,
        pins=pins,
        clock=clock,
    )
    core.start()
    try:
        yield CoreRig(core, registry, files)
        core.check()
    finally:
        files.may_write.set()
        files.may_read.set()
        core.close()


@dataclass
class PoolProcess:
    """`kvtier pool serve` in a process of its own."""

    arguments: list[str]
    process: "subprocess.Popen[str]" = field(init=False)
    block: str = field(init=False)
    grpc: str = field(init=False)
    http: str = field(init=False)
    launcher: Sequence[str] = ()
    """A command that starts it, such as one that makes it another user's."""

    def start(self) -> None:
        """Returns when it is ready."""
        command = [*self.launcher, sys.executable, "-m", "kvtier.cli.main", "pool", "serve", *self.arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready block="), f"{line!r} {self.process.communicate(timeout=WAIT_S)}"
        self.block, self.grpc, self.http = (part.partition("=")[2] for part in line.split()[1:])

    def again(self) -> "PoolProcess":
        """The same pool on the same ports, started anew. Only of a `pool_process`, after its end."""
        pool = PoolProcess([f"--listen={self.block}", f"--grpc-listen={self.grpc}", *self.arguments[2:]])
        pool.start()
        return pool

    def kill(self) -> None:
        """SIGKILL; waits."""
        self.process.kill()
        self.process.communicate(timeout=WAIT_S)

    def terminate(self) -> tuple[int, str]:
        """SIGTERM; exit code and log."""
        self.process.terminate()
        _, log = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, log


def pool_config(
    memory_bytes: int = 16 * MIB,
    *,
    tls: TlsFiles | None = None,
    certificate_names: Mapping[str, str] | None = None,
    rates: Mapping[str, Mapping[str, object]] | None = None,
    roles: Mapping[str, object] | None = None,
    **table: object,
) -> Config:
    """A pool on free ports that `TENANTS` may use.

    :param certificate_names: DNS name or URI of a client certificate -> tenant name.
    :param rates: tables `rate` by tenant name.
    :param roles: tables of operators and observers.
    :param table: fields of `pool_service`.
    """
    free = "127.0.0.1:0"
    defaults: dict[str, object] = {
        "listen": [free],
        "grpc_listen": [free],
        "http_listen": free,
        "min_residency_s": 0.0,
        "shutdown_grace_s": 10.0,
        "memory_bytes": memory_bytes,
    }
    if tls is not None:
        defaults |= {"tls_certificate": tls.certificate, "tls_key": tls.key, "tls_client_ca": tls.ca}
    tenants: dict[str, dict[str, Any]] = {}
    for digest, name in TENANTS.items():
        tenants[name] = {"token_sha256": [digest], "certificate_names": [], "rate": (rates or {}).get(name, {})}
    for certified, name in (certificate_names or {}).items():
        tenants[name]["certificate_names"].append(certified)
    tables = {"pool_service": defaults | table, "tenants": tenants, **(roles or {})}
    return parse_config(tables, source="a test", environ={})


@contextlib.contextmanager
def running_pool(
    memory_bytes: int = 16 * MIB, *, limits: PoolLimits | None = None, **settings: Any
) -> Iterator[Addresses]:
    """A service in this process. `settings` are those of `pool_config`."""
    service = PoolService(pool_config(memory_bytes, **settings), limits)
    addresses = service.start()
    try:
        yield addresses
    finally:
        service.stop()


@contextlib.contextmanager
def pool_process(
    *arguments: str, listen: str = "", grpc_listen: str = "", memory: str = "64MiB", launcher: Sequence[str] = ()
) -> Iterator[PoolProcess]:
    """A running pool with tenants red and blue; gone at the end. Without addresses, it has ports that it may have
    `again`."""
    listen, grpc_listen = (address or f"127.0.0.1:{free_port()}" for address in (listen, grpc_listen))
    tenants = [f"--tenant={name}={digest}" for digest, name in TENANTS.items()]
    addresses = [f"--listen={listen}", f"--grpc-listen={grpc_listen}", "--http-listen=127.0.0.1:0"]
    pool = PoolProcess([*addresses, f"--memory-bytes={memory}", *tenants, *arguments], launcher=launcher)
    pool.start()
    try:
        yield pool
    finally:
        pool.kill()


def resident_bytes(pool: PoolProcess) -> int:
    """Memory that the process has."""
    with open(f"/proc/{pool.process.pid}/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


def held_bytes(pool: PoolProcess | Addresses) -> float:
    """What its clients hold of its memory."""
    with urllib.request.urlopen(f"http://{pool.http}/metrics", timeout=WAIT_S) as answer:
        found = re.search(r"^kvtier_pool_shared_held_bytes (\S+)", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found.group(1))


def connect(
    address: str,
    tenant: str = "red",
    *,
    token: str | None = None,
    call_timeout_s: float = WAIT_S,
    metrics: Metrics | None = None,
    breaker: CircuitBreaker | None = None,
    max_batch_bytes: int = 64 * MIB,
    shared_memory: bool = False,
    sealing: SealingKeys | None = None,
) -> PoolTier:
    """A pool tier for `tenant` at an address, or several separated by commas, as engines are given them."""
    access = PoolAccess(
        addresses=address.split(","),
        tenant=tenant_id(tenant),
        token=token or TOKENS[tenant],
        shared_memory=shared_memory,
    )
    metrics = metrics or Metrics()
    return PoolTier(
        open_transport(access, metrics, connect_ahead=False),
        tenant_id(tenant),
        metrics=metrics,
        breaker=breaker or CircuitBreaker(1000, 0.05),
        call_timeout_s=call_timeout_s,
        max_batch_bytes=max_batch_bytes,
        sealing=sealing,
    )


def dial(address: str, tenant: str = "red") -> PoolConnection:
    """A connection without a tier over it."""
    return PoolConnection.open(Address.parse(address), TOKENS[tenant], tenant_id(tenant), time.monotonic() + WAIT_S)


def failed_calls(metrics: Metrics, **labels: str) -> float:
    """The failed calls of a pool tier."""
    return metrics.registry.get_sample_value("kvtier_io_errors_total", {"tier": "pool"} | labels) or 0.0
