"""How many requests and bytes a second a pool serves each tenant with, over all its connections: token buckets."""

import threading
from collections.abc import Callable, Mapping

from kvtier.clock import MONOTONIC, Clock
from kvtier.config.tenant import RateConfig, TenantConfig
from kvtier.errors import UnavailableError
from kvtier.identity.keys import TenantId
from kvtier.system.token_bucket import TokenBucket
from kvtier_pool.metrics import PoolMetrics

REQUESTS, BYTES = "max_requests_per_s", "max_bytes_per_s"
MOST_WAIT_S = 0.1
"""How long a request waits for its turn. Well below the time that engines give a lookup, so that what they hear is an
answer; and it bounds what a tenant costs that goes on asking: ten requests a second of each connection."""
MOST_REFUSED_BYTES = 256 << 20
"""Payloads of refused writes that are received to nowhere, so that clients hear THROTTLED: they are on their way when a
tenant has had its part, as the rest of a batch. A tenant that sends more, and faster than it may, loses its
connections."""


class Pace:
    """What one tenant may ask for at the moment. Any thread; holds its lock for a few microseconds, and never while it
    waits. Without bounds it costs nothing."""

    def __init__(self, metrics: PoolMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._name = ""
        """The configured name. Guarded by _lock, as all that follows but for reads of `is_bounded`."""
        self._rate = RateConfig()
        self._buckets: dict[str, TokenBucket] = {}
        self._refused: TokenBucket | None = None
        """What the tenant may still send of what is refused."""
        self.is_bounded = False

    def set_rate(self, name: str, rate: RateConfig) -> None:
        """These are the bounds from now on. What stays the same goes on as it was."""
        with self._lock:
            self._name = name
            if rate == self._rate:
                return
            self._rate = rate
            for limit in (REQUESTS, BYTES):
                self._metrics.tenant_refusals.labels(name, limit)
                self._metrics.tenant_delays.labels(name, limit)
            bounds = {REQUESTS: rate.max_requests_per_s, BYTES: rate.max_bytes_per_s}
            self._buckets = {
                limit: TokenBucket(float(per_s), self._clock()) for limit, per_s in bounds.items() if per_s is not None
            }
            self._refused = None
            if rate.max_bytes_per_s is not None:
                self._refused = TokenBucket(float(rate.max_bytes_per_s), self._clock(), MOST_REFUSED_BYTES)
            self.is_bounded = bool(self._buckets)

    def let_in(self, wait: Callable[[float], object]) -> bool:
        """Whether a request may be served, by what the tenant has had so far. Blocks up to `MOST_WAIT_S`: by `wait`.

        False: not in this time, which is counted. Then it has waited as well, so that whoever asks again at once does
        not ask faster than that.
        """
        if not self.is_bounded:
            return True
        with self._lock:
            now_s = self._clock()
            owed = {
                limit: bucket.owed_s(1.0 if limit == REQUESTS else 0.0, now_s)
                for limit, bucket in self._buckets.items()
            }
            limit = max(owed, key=owed.__getitem__, default=REQUESTS)
            owed_s, name = owed.get(limit, 0.0), self._name
            is_let_in = owed_s <= MOST_WAIT_S
            if is_let_in and REQUESTS in self._buckets:
                self._buckets[REQUESTS].take(1.0)
        if owed_s:
            counter = self._metrics.tenant_delays if is_let_in else self._metrics.tenant_refusals
            counter.labels(name, limit).inc()
            wait(min(owed_s, MOST_WAIT_S))
        return is_let_in

    def take(self, *, num_requests: int = 0, nbytes: int = 0) -> None:
        """Charges the tenant with what it was served: later requests wait for it. Less than nothing gives back."""
        if not self.is_bounded:
            return
        with self._lock:
            for limit, amount in ((REQUESTS, num_requests), (BYTES, nbytes)):
                if amount and limit in self._buckets:
                    self._buckets[limit].take(amount)

    def refuse(self, nbytes: int) -> None:
        """Charges the tenant with what it sends in vain. Raises `UnavailableError` when that is not even received."""
        with self._lock:
            if self._refused is None:
                return
            if not self._refused.owed_s(float(nbytes), self._clock()):
                self._refused.take(nbytes)
                return
        raise UnavailableError(f"{BYTES}: this tenant goes on sending more than it may, and was told so; retry later")


class TenantRates:
    """The bounds of all tenants. Any thread."""

    def __init__(self, metrics: PoolMetrics, clock: Clock = MONOTONIC) -> None:
        """There are none yet: see `set_tenants`."""
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._paces: dict[TenantId, Pace] = {}
        """Guarded by _lock. Paces of tenants that are gone stay for the connections that have them."""

    def set_tenants(self, names: Mapping[TenantId, str], configured: Mapping[str, TenantConfig]) -> None:
        """Gives these tenants these bounds, by their configured names, from now on."""
        for tenant, name in names.items():
            self.of(tenant).set_rate(name, configured[name].rate)

    def of(self, tenant: TenantId) -> Pace:
        """What this tenant may ask for; the same object as long as the pool runs."""
        with self._lock:
            pace = self._paces.get(tenant)
            if pace is None:
                pace = self._paces[tenant] = Pace(self._metrics, self._clock)
            return pace
