"""Which gRPC calls are served at a time, and how many more may wait: places of threads, divided among tenants."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kvtier.identity.keys import TenantId
from kvtier_pool.limits import PoolLimits
from kvtier_pool.metrics import PoolMetrics
from kvtier_pool.places import TenantPlaces

_CALLS_PER_THREAD = 4
"""Calls in flight for each that is served. The others wait, each on a thread of its own, and hold no memory."""
_LEAST_SERVED = 2
"""Calls of each tenant, at least, that are served whatever the others do."""
_WAIT_S = 10.0
"""How long a call waits to be served."""
_SPARE_THREADS = 8
"""Threads that no tenant's calls keep: for health checks, and for calls until it is known whose they are."""


class CallPlaces:
    """Places of all gRPC calls of a pool. Any thread."""

    def __init__(
        self, num_served: int, limits: PoolLimits, names: Mapping[TenantId, str], metrics: PoolMetrics
    ) -> None:
        """
        :param num_served: calls that are served at a time.
        :param names: all tenants, by their configured names.
        """
        self._served = TenantPlaces("num_threads", num_served, names, metrics, least=_LEAST_SERVED)
        self._in_flight = TenantPlaces(
            "calls_in_flight", _CALLS_PER_THREAD * self._served.num_places, names, metrics, least=_LEAST_SERVED
        )
        self._streams = TenantPlaces("max_event_streams", limits.max_event_streams, names, metrics)
        self.num_streams = self._streams.num_places
        """Streams of events at a time, of all tenants."""
        self.num_threads = self._in_flight.num_places + self.num_streams + _SPARE_THREADS
        """Threads that a server needs, so that none of its tenants waits for one."""

    @contextmanager
    def of_call(self, tenant: TenantId) -> Iterator[None]:
        """A place for a call. Blocks up to ten seconds while others of the tenant are served.

        :raises LimitExceededError: this tenant has no place left, or none in time.
        """
        with self._in_flight.held(tenant), self._served.held(tenant, wait_s=_WAIT_S):
            yield

    @contextmanager
    def of_stream(self, tenant: TenantId) -> Iterator[None]:
        """A place for a stream that lasts, and waits most of the time.

        :raises LimitExceededError: this tenant has no place left.
        """
        with self._streams.held(tenant):
            yield
