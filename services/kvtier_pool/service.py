"""A whole cache pool in one object: tiers, core, block protocol, gRPC, HTTP; what `kvtier pool serve` runs."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvtier.clock import MONOTONIC
from kvtier.config import Config
from kvtier.config.accepted import accepted_certificates, accepted_tokens, pool_files, require_clients
from kvtier.config.tls_files import pool_service_tls
from kvtier.errors import ConfigError
from kvtier.identity.keys import tenant_id
from kvtier.net.certificates import TlsFiles
from kvtier.store.event_hub import EventHub
from kvtier.store.write_behind import DrainReport
from kvtier.system.process_metrics import describe_process
from kvtier.traces.recorder import TraceRecorder
from kvtier_pool.administration import Administration
from kvtier_pool.auth import Authenticator
from kvtier_pool.block.client_memory import ClientLimits
from kvtier_pool.block.server import BlockServer
from kvtier_pool.block.shared_memory import SharedClients
from kvtier_pool.configured_parts import (
    audit_log_of,
    open_store,
    recorder_of,
    share_of,
    shares_memory,
    start_recorder,
    tenant_names,
    trace_description,
)
from kvtier_pool.exposure import require_protected, tokens_in_clear
from kvtier_pool.grpc.call_places import CallPlaces
from kvtier_pool.grpc.callers import Callers
from kvtier_pool.grpc.connections import GrpcConnections
from kvtier_pool.grpc.server import PoolServer
from kvtier_pool.grpc.servicer import PoolServicer
from kvtier_pool.http import StatusServer
from kvtier_pool.http_metrics import HttpMetrics
from kvtier_pool.http_tenants import HttpTenants
from kvtier_pool.limits import PoolLimits
from kvtier_pool.logins import Logins
from kvtier_pool.metrics import PoolMetrics, UnwrittenBlocks
from kvtier_pool.places import TenantPlaces
from kvtier_pool.rates import TenantRates
from kvtier_pool.startable import place_attempts
from kvtier_pool.storage_keys import StorageKeys
from kvtier_pool.turns import FairTurns

_log = logging.getLogger(__name__)
_CALLS_SHARE_OF_GRACE = 0.25
"""The part of a stop's time that calls in flight may take; the disk gets what is left."""
_MOST_NAMED = 100
"""Credentials that a line of the audit log names."""
_SHORTEST_S = 0.25
"""How long an operation of the disk may take in a stop that has no time."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """The places at which the service listens, with real ports."""

    block: tuple[str, ...]
    grpc: tuple[str, ...]
    http: str


class PoolService:
    """Start, serve, stop; once each. One thread owns it."""

    name = "pool"
    what = "tenants, tokens and shares"

    def __init__(self, config: Config, limits: PoolLimits | None = None) -> None:
        """Opens and reads nothing yet: see `start`.

        :param limits: what one call may ask for; tests have smaller ones than the default.
        """
        self._config = config
        self._limits = limits if limits is not None else PoolLimits()
        self._phase: str | None = "starting"
        """Why it does not serve; None while it does. Written by the owner, read by HTTP threads."""

    def start(self) -> Addresses:
        """Opens the tiers, listens, serves.

        :raises ConfigError: no client could be let in, or others could read what they send; files for TLS or secrets
            are no good; an address or the folder cannot be had.
        """
        config, table, limits = self._config, self._config.pool_service, self._limits
        require_clients(config)
        require_protected(config)
        for attempt in place_attempts(config):
            attempt()
        authenticator = Authenticator(accepted_tokens(config), accepted_certificates(config))
        tls = pool_service_tls(config)
        registry = CollectorRegistry()
        describe_process(registry)
        metrics = PoolMetrics(registry)
        self.audit = audit_log_of(config, metrics)
        self._logins = logins = Logins(authenticator, self.audit, metrics)
        tenants = tenant_names(config)
        self._calls = calls = CallPlaces(table.num_threads, limits, tenants, metrics)
        connections = TenantPlaces("max_connections", table.max_connections, tenants, metrics)
        self._recorder = recorder_of(config, metrics)
        hub = EventHub(max_streams=calls.num_streams, buffer=limits.event_buffer)
        self._storage_keys = StorageKeys(config)
        seals = self._storage_keys.seals
        self._turns = turns = FairTurns()
        parts = turns.one_at_a_time.parts
        self._core = open_store(config, seals, hub, registry, recorder=self._recorder, parts=parts)
        self._clients = self._shared_clients(metrics) if shares_memory(table) else None
        grpc_connections = TenantPlaces("max_connections", table.max_connections, tenants, metrics)
        callers = Callers(logins, GrpcConnections(grpc_connections))
        self._places = (calls, connections, grpc_connections)
        self._rates = rates = TenantRates(metrics)
        rates.set_tenants(tenants, config.tenants)
        self._servicer = servicer = PoolServicer(self._core, callers, limits, metrics, calls, rates, turns)
        with ExitStack() as undo:
            undo.callback(self._core.close)
            self.audit.start()
            undo.callback(self.audit.stop)
            self._require_guarantees(config)
            self._set_shares(config)
            if self._recorder is not None:
                start_recorder(self._recorder, config)
                undo.callback(self._recorder.close)
            self._core.start()
            turns.load.start()
            undo.callback(turns.load.stop)
            if self._clients is not None:
                self._clients.start()
                undo.callback(self._clients.stop)
            self.administration = Administration(self._core, metrics, self.audit, config)
            registry.register(UnwrittenBlocks(self.administration.counts))
            self._http = self._status_server(registry, tls)
            self._http.start()
            undo.callback(self._http.stop)
            self._grpc = PoolServer(servicer, callers, config, calls)
            undo.callback(self._grpc.stop, 0.0)
            self._block = BlockServer(
                self._core, logins, config, limits, metrics, connections, self._clients, rates, turns
            )
            undo.callback(self._block.stop, 0.0)
            addresses = Addresses(self._block.start(), self._grpc.start(), self._http.address)
            undo.pop_all()
        self._phase = None
        return addresses

    def files(self, config: Config) -> list[Path]:
        """Returns the files that say whom the pool lets in: see `kvtier.config.accepted`."""
        return pool_files(config)

    def note(self, event: str, **fields: str) -> None:
        """Writes a line into the audit log."""
        self.audit.note(event, **fields)

    def take(self, config: Config) -> None:
        """Lets in those who have credentials in this configuration, and nobody else, from now on; gives its tenants
        their shares of memory and disk, their caps in Redis, places, rates and storage keys. Cuts connections
        whose credentials are gone.

        Raises `ConfigError`, and changes nothing, for credentials that cannot be, when more is guaranteed than this
        pool has, for no tenant at all, for more than it has threads for, for storage keys that cannot be, and for a
        tenant's first ones.
        """
        if not config.tenants:  # a file that is being written; revoked tokens leave their tenants there
            require_clients(config)
        tokens, certificates, names = accepted_tokens(config), accepted_certificates(config), tenant_names(config)
        if len(names) > self._calls.most_tenants:
            raise ConfigError(
                f"tenants: {len(names)}, and this pool can take {self._calls.most_tenants} until it is started anew: "
                "restart it"
            )
        seals = self._storage_keys.of(config)
        self._require_guarantees(config)
        self._storage_keys.take(seals)
        for places in self._places:
            places.set_tenants(names)
        self._rates.set_tenants(names, config.tenants)
        self._core.pins.several_tenants = len(names) > 1
        self.administration.set_tenants(config)
        added, removed = self._logins.authenticator.accept(tokens, certificates)
        self.audit.note("credentials", added=added[:_MOST_NAMED], removed=removed[:_MOST_NAMED])
        self.end_stale()
        self._set_shares(config)  # the last thing: tenants come down to caps that were lowered, for seconds perhaps

    def end_stale(self) -> int:
        """Ends connections and streams whose tokens have expired or are accepted no more; how many there were."""
        return self._block.end_stale() + self._servicer.end_stale()

    def _require_guarantees(self, config: Config) -> None:
        """Raises `ConfigError` where more is guaranteed than a tier of this pool has."""
        table, tenants = self._config.pool_service, config.tenants
        memory_bytes = self._core.local_usages()["memory"]().capacity_bytes
        for tier, nbytes in (("memory", memory_bytes), ("disk", table.disk_bytes)):
            guaranteed = sum(getattr(tenant, tier).guaranteed_bytes for tenant in tenants.values())
            if guaranteed > nbytes:
                key, since, remedy = f"{tier}_bytes", "", "guarantee less"
                if (written := getattr(config.pool_service, key)) != getattr(table, key):
                    since = f" until a restart, when it is {written:,}"
                    remedy = "restart the pool, or guarantee less" if guaranteed <= written else remedy
                raise ConfigError(
                    f"tenants.*.{tier}.guaranteed_bytes: {guaranteed:,} bytes in all, and pool_service.{key} is "
                    f"{nbytes:,}{since}; {remedy}"
                )

    def _set_shares(self, config: Config) -> None:
        tenants = config.tenants
        self._core.set_shares(
            {tenant_id(name): share_of(tenant.memory) for name, tenant in tenants.items()},
            {tenant_id(name): share_of(tenant.disk) for name, tenant in tenants.items()},
        )
        caps = {tenant_id(name): tenant.redis.cap_bytes for name, tenant in tenants.items()}
        self._core.set_remote_caps({tenant: int(cap) for tenant, cap in caps.items() if cap is not None})

    @contextmanager
    def recording(self, path: Path, max_bytes: int) -> Iterator[TraceRecorder]:
        """Records what is asked of the pool in this file until the context is left. One thread at a time, after
        `start`.

        :raises ConfigError: the configuration has it record for as long as it runs, or the file cannot be written.
        """
        if self._recorder is not None:
            raise ConfigError("pool_service.record_trace is set: this pool records all the time, to that file")
        recorder = TraceRecorder(path, trace_description(self._config.pool_service), max_bytes=max_bytes)
        recorder.start()
        try:
            self._core.recorder = recorder
            yield recorder
        finally:
            self._core.recorder = None
            recorder.close()

    def stop(self) -> list[DrainReport]:
        """Ends calls, writes down what waits, within `shutdown_grace_s`; logs what stayed behind. A report per tier."""
        grace_s = self._config.pool_service.shutdown_grace_s
        deadline = MONOTONIC() + grace_s
        self._phase = "stopping"
        self._core.end_event_streams()
        self._core.hurry(max(_SHORTEST_S, grace_s * _CALLS_SHARE_OF_GRACE))
        calls_deadline = MONOTONIC() + grace_s * _CALLS_SHARE_OF_GRACE
        self._block.stop(calls_deadline - MONOTONIC())
        self._grpc.stop(max(0.0, calls_deadline - MONOTONIC()))
        self._turns.load.stop()
        if self._clients is not None:
            self._clients.stop()
        reports = self._core.drain(max(0.0, deadline - MONOTONIC()))
        for report in reports:
            _log.log(
                logging.WARNING if report.num_abandoned or report.num_memory_only else logging.INFO,
                "drained: %d blocks written to %s, %d abandoned for want of time, %d that it did not take",
                report.num_written,
                report.tier,
                report.num_abandoned,
                report.num_memory_only,
            )
        self._core.close()
        if self._recorder is not None:
            self._recorder.close(max(_SHORTEST_S, deadline - MONOTONIC()))
        self._http.stop()
        self.audit.stop()
        return reports

    def _shared_clients(self, metrics: PoolMetrics) -> SharedClients:
        limits = self._limits
        most_held_bytes = limits.max_held_bytes or int(self._config.pool_service.memory_bytes) // 4
        client_limits = ClientLimits(
            lease_s=limits.lease_s, max_held_bytes=most_held_bytes, max_prepared_s=limits.max_prepared_s
        )
        return SharedClients(self._core, metrics, client_limits)

    def _status_server(self, registry: CollectorRegistry, tls: TlsFiles | None) -> StatusServer:
        table, logins, in_clear = self._config.pool_service, self._logins, tokens_in_clear(self._config)
        return StatusServer(
            table.http_listen,
            HttpMetrics(registry, logins, access=table.metrics_access, in_clear=in_clear).answer,
            self._problem,
            self._core.degraded,
            tls,
            HttpTenants(self.administration, logins, in_clear=in_clear).answer,
            lambda peer, error: logins.at("http", peer).not_understood(error),
        )

    def _problem(self) -> str | None:
        if self._clients is not None and not self._clients.alive:
            return self._phase or "the thread that ends leases is gone"
        return self._phase or self._core.problem() or self._block.problem()
