"""How often each tenant found the blocks that it asked for."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.identity.keys import TenantId

_MOST_TENANTS = 65_536
"""Tenants that are counted; a pool that has had more counts nothing for further ones."""


@dataclass(slots=True)
class Reads:
    """Blocks, since the start."""

    num_hits: int = 0
    num_misses: int = 0
    num_evicted: int = 0
    """Evicted from memory; tiers below may have them."""


class TenantReads:
    """Counts by tenant. Any thread; about 0.3 us for a call, however many blocks it names."""

    def __init__(self, num_evicted_of: Callable[[TenantId | None], int]) -> None:
        """:param num_evicted_of: says how many blocks of a tenant memory has evicted; of all for None."""
        self._num_evicted_of = num_evicted_of
        self._lock = threading.Lock()
        self._reads: dict[TenantId, Reads] = {}
        """Guarded by _lock."""

    def count(self, tenant: TenantId, *, num_hits: int = 0, num_misses: int = 0) -> None:
        """Adds to the tenant's figures."""
        with self._lock:
            reads = self._reads.get(tenant)
            if reads is None:
                if len(self._reads) >= _MOST_TENANTS:
                    return
                reads = self._reads[tenant] = Reads()
            reads.num_hits += num_hits
            reads.num_misses += num_misses

    def of(self, tenant: TenantId | None) -> Reads:
        """One tenant's figures, or those of all together. O(tenants) for all."""
        num_evicted = self._num_evicted_of(tenant)
        with self._lock:
            chosen = list(self._reads.values()) if tenant is None else [self._reads.get(tenant, Reads())]
            return Reads(
                sum(each.num_hits for each in chosen),
                sum(each.num_misses for each in chosen),
                num_evicted,
            )
