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
_LATER_TENANTS = 64
"""Tenants that may be added while the pool runs. Each costs two threads at most, once it makes calls."""
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
        self.most_tenants = len(names) + _LATER_TENANTS
        """Tenants that it can divide places among."""
        self.num_streams = max(self._streams.num_places, self.most_tenants)
        """The most streams of events at a time, of all tenants, however many are added."""
        num_calls = max(self._in_flight.num_places, _LEAST_SERVED * self.most_tenants)
        self.num_threads = num_calls + self.num_streams + _SPARE_THREADS
        """Threads that a server needs, so that none of its tenants waits for one."""

    def set_tenants(self, names: Mapping[TenantId, str]) -> None:
        """Divides the places among these tenants from now on, `most_tenants` at most."""
        for places in (self._served, self._in_flight, self._streams):
            places.set_tenants(names)

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
