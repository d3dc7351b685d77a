"""What each tenant asked for, and how often it was there or had no room."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields

from kvtier.identity.keys import TenantId

_MOST_TENANTS = 65_536
"""Tenants that are counted; a pool that has had more counts nothing for further ones."""


@dataclass(slots=True)
class Counts:
    """Numbers of blocks since the start."""

    num_hits: int = 0
    """Blocks that were read."""
    num_misses: int = 0
    """Blocks that were looked up or read, and were not there: engines read only what they have found."""
    num_full: int = 0
    """Blocks that were not written, for want of room that may be freed."""
    num_throttled: int = 0
    """Blocks that were not written, because a tier below that keeps what is acknowledged is behind."""
    num_evicted: int = 0
    """Blocks that memory has evicted; tiers below may have them."""

    def add(self, other: "Counts") -> None:
        """Adds the other's figures to these."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class TenantCounts:
    """Counts by tenant. Any thread; about a microsecond for a call, however many blocks it names."""

    def __init__(self, num_evicted_of: Callable[[TenantId | None], int]) -> None:
        """:param num_evicted_of: says how many blocks of a tenant memory has evicted; of all for None."""
        self._num_evicted_of = num_evicted_of
        self._lock = threading.Lock()
        self._counts: dict[TenantId, Counts] = {}
        """Guarded by _lock."""

    def count(
        self, tenant: TenantId, *, num_hits: int = 0, num_misses: int = 0, num_full: int = 0, num_throttled: int = 0
    ) -> None:
        """Adds to the tenant's figures."""
        with self._lock:
            counts = self._counts.get(tenant)
            if counts is None:
                if len(self._counts) >= _MOST_TENANTS:
                    return
                counts = self._counts[tenant] = Counts()
            counts.num_hits += num_hits
            counts.num_misses += num_misses
            counts.num_full += num_full
            counts.num_throttled += num_throttled

    def of(self, tenant: TenantId | None) -> Counts:
        """Returns one tenant's figures, or those of all together. O(tenants) for all."""
        summed = Counts(num_evicted=self._num_evicted_of(tenant))
        with self._lock:
            for each in self._counts.values() if tenant is None else [self._counts.get(tenant, Counts())]:
                summed.add(each)
        return summed
