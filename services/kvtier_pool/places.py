"""Places of a pool, such as connections and threads: what one tenant takes of them leaves the others theirs."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kvtier.errors import LimitExceededError
from kvtier.identity.keys import TenantId
from kvtier_pool.metrics import PoolMetrics

_KEPT_PART = 2
"""One in so many of all places is kept for tenants that have not taken it. More: a busy tenant gets less than the pool
could give. Less: a tenant that comes last can do little at a time."""


class TenantPlaces:
    """How many places of one kind each tenant has taken, over all its connections. Any thread.

    Half of the places is divided among the configured tenants, and kept for each of them whatever the others do; the
    rest goes to whoever comes first. So one tenant of two gets three quarters, and one that is alone gets all.
    """

    def __init__(
        self, limit: str, num_places: int, names: Mapping[TenantId, str], metrics: PoolMetrics, *, least: int = 1
    ) -> None:
        """
        :param limit: what the configuration calls the number of places, for errors and metrics.
        :param num_places: of all tenants together; more, if that is too few for `least`.
        :param names: all tenants, by their configured names.
        :param least: places that are kept for each tenant at least.
        """
        self._limit = limit
        self._metrics = metrics
        self._num_wanted = num_places
        self._least = least
        self._changed = threading.Condition()
        self._taken: Counter[TenantId] = Counter()
        """Guarded by _changed, as all that follows."""
        self.num_places = 0
        """How many places there are. They are never all taken as long as a tenant has not taken what is kept for it.
        Read without the lock."""
        self.set_tenants(names)

    def set_tenants(self, names: Mapping[TenantId, str]) -> None:
        """Divides the places among these tenants from now on. What is taken stays taken until it is given back, also
        by tenants that are gone."""
        num = max(1, len(names))
        with self._changed:
            self._names = dict(names)
            for name in names.values():
                self._metrics.tenant_refusals.labels(name, self._limit)
            self._num_kept = max(self._least, self._num_wanted // (_KEPT_PART * num))
            self.num_places = max(self._num_wanted, self._num_kept * num)
            self._num_shared = self.num_places - self._num_kept * num
            self._changed.notify_all()

    def take(self, tenant: TenantId, *, wait_s: float = 0.0) -> None:
        """Takes a place, which goes back by `give_back`. Blocks up to `wait_s` seconds for one.

        :raises LimitExceededError: there is none for this tenant, which is counted.
        """
        with self._changed:
            if self._changed.wait_for(lambda: self._fits(tenant), wait_s):
                self._taken[tenant] += 1
                return
            num_taken, name = self._taken[tenant], self._names.get(tenant, "removed")
        self._metrics.tenant_refusals.labels(name, self._limit).inc()
        raise LimitExceededError(
            f"{self._limit}: {num_taken} of {self.num_places} are this tenant's already, and of the others "
            f"{self._num_kept} are kept for each tenant; retry later"
        )

    def has_one_for(self, tenant: TenantId) -> bool:
        """Whether the tenant could take a place now."""
        with self._changed:
            return self._fits(tenant)

    def give_back(self, tenant: TenantId) -> None:
        with self._changed:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]
            self._changed.notify_all()

    @contextmanager
    def held(self, tenant: TenantId, *, wait_s: float = 0.0) -> Iterator[None]:
        """A place for as long as the block lasts; see `take`."""
        self.take(tenant, wait_s=wait_s)
        try:
            yield
        finally:
            self.give_back(tenant)

    def _fits(self, tenant: TenantId) -> bool:
        """Whether a place is the tenant's: one that is kept for it, or one that is kept for nobody. O(tenants) where
        the former are taken. Caller holds the lock."""
        kept = self._num_kept if tenant in self._names else 0
        if self._taken[tenant] < kept:
            return True
        beyond = sum(
            max(0, num - (self._num_kept if other in self._names else 0)) for other, num in self._taken.items()
        )
        return beyond < self._num_shared
