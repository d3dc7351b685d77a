"""A whole cache pool in one object: tiers, core, block protocol, gRPC, HTTP; what `kvtier pool serve` runs."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from kvtier.clock import MONOTONIC
from kvtier.metrics import Metrics
from kvtier.tiers.disk import DiskTier
from kvtier_pool.auth import TokenAuthenticator
from kvtier_pool.block_server import BlockServer
from kvtier_pool.core import PoolCore
from kvtier_pool.event_hub import EventHub
from kvtier_pool.http import StatusServer
from kvtier_pool.metrics import PoolMetrics
from kvtier_pool.server import PoolServer
from kvtier_pool.servicer import PoolServicer
from kvtier_pool.settings import PoolSettings
from kvtier_pool.write_through import DrainReport

_log = logging.getLogger(__name__)
_CALLS_SHARE_OF_GRACE = 0.25
"""Of a stop's time, how much calls in flight may take; the disk gets what is left."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the service listens, with real ports."""

    block: tuple[str, ...]
    grpc: tuple[str, ...]
    http: str


class PoolService:
    """Start, serve, stop; once each. One thread owns it."""

    def __init__(self, settings: PoolSettings) -> None:
        """Opens nothing yet: see `start`."""
        self._settings = settings
        self._phase: str | None = "starting"
        """Why it does not serve; None while it does. Written by the owner, read by HTTP threads."""

    def start(self) -> Addresses:
        """Opens the disk, listens, serves. `ConfigError` when an address or the folder cannot be had."""
        settings = self._settings
        registry = CollectorRegistry()
        metrics = PoolMetrics(registry)
        hub = EventHub(max_streams=settings.limits.max_event_streams, buffer=settings.limits.event_buffer)
        self._core = PoolCore(
            memory_bytes=settings.memory_bytes,
            disk=_open_disk(settings, hub, Metrics(registry)),
            hub=hub,
            metrics=metrics,
            queue_bytes=settings.write_through_queue_bytes or settings.memory_bytes // 4,
            write_threads=settings.write_through_threads,
        )
        authenticator = TokenAuthenticator(settings.tenants)
        servicer = PoolServicer(self._core, authenticator, settings.limits, metrics)
        with ExitStack() as undo:
            undo.callback(self._core.close)
            self._core.start()
            self._http = StatusServer(settings.http_listen, registry, self._problem)
            self._http.start()
            undo.callback(self._http.stop)
            self._grpc = PoolServer(servicer, authenticator, settings)
            undo.callback(self._grpc.stop, 0.0)
            self._block = BlockServer(self._core, authenticator, settings, metrics)
            undo.callback(self._block.stop, 0.0)
            addresses = Addresses(self._block.start(), self._grpc.start(), self._http.address)
            undo.pop_all()
        self._phase = None
        return addresses

    def stop(self) -> DrainReport:
        """Ends calls, writes to disk what is queued, within `shutdown_grace_s`; logs what stayed behind."""
        deadline = MONOTONIC() + self._settings.shutdown_grace_s
        self._phase = "stopping"
        self._core.end_event_streams()
        calls_deadline = MONOTONIC() + self._settings.shutdown_grace_s * _CALLS_SHARE_OF_GRACE
        self._block.stop(calls_deadline - MONOTONIC())
        self._grpc.stop(max(0.0, calls_deadline - MONOTONIC()))
        report = self._core.drain(max(0.0, deadline - MONOTONIC()))
        level = logging.WARNING if report.num_abandoned or report.num_memory_only else logging.INFO
        _log.log(
            level,
            "drained: %d blocks written to disk, %d abandoned for want of time, %d in memory only are forgotten",
            report.num_written,
            report.num_abandoned,
            report.num_memory_only,
        )
        self._core.close()
        self._http.stop()
        return report

    def _problem(self) -> str | None:
        return self._phase or self._core.problem() or self._block.problem()


def _open_disk(settings: PoolSettings, hub: EventHub, metrics: Metrics) -> DiskTier | None:
    if settings.disk_dir is None:
        return None
    return DiskTier.open(
        settings.disk_dir,
        settings.disk_bytes,
        reserve_bytes=settings.disk_reserve_bytes,
        on_event=hub.publish,
        metrics=metrics,
    )
