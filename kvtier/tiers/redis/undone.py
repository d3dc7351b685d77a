"""Discards that a server has not heard of yet: their blocks are hidden here until it has."""

import heapq
import itertools
import threading
from collections.abc import Iterable, Sequence

from kvtier.identity.keys import StoreKey, TenantId, tenant_of

_MAX_KEYS = 65_536
"""About 200 bytes each."""


class UndoneDiscards:
    """Keys that this process wants forgotten and could not tell the server. Any thread.

    Where there are too many, those of the tenant that has most are given up, the oldest first: their blocks are found
    again when the server is. So one tenant brings back none of another one's blocks that has fewer discards. Blocks are
    found again, too, when a process ends before its server has heard; and other processes see what the server has.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[TenantId, dict[StoreKey, None]] = {}
        """Keys by tenant, oldest first; no tenant is without a key. Guarded by _lock, as is the next one."""
        self._num_keys = 0

    def __bool__(self) -> bool:
        return bool(self._num_keys)

    def add(self, keys: Iterable[StoreKey]) -> int:
        """Hides these keys from now on. Returns how many were given up, of these or older ones."""
        with self._lock:
            for key in keys:
                of_tenant = self._keys.setdefault(tenant_of(key), {})
                self._num_keys += key not in of_tenant
                of_tenant[key] = None
            return self._shrink(self._num_keys - _MAX_KEYS)

    def done(self, keys: Iterable[StoreKey]) -> None:
        """The server has heard of these."""
        with self._lock:
            for key in keys:
                if key in self._keys.get(tenant_of(key), ()):
                    self._remove(key)

    def oldest(self, most: int) -> list[StoreKey]:
        """The next to tell it, at most so many, in turns of the tenants. They stay hidden."""
        with self._lock:
            turns = itertools.chain.from_iterable(itertools.zip_longest(*self._keys.values()))
            return list(itertools.islice((key for key in turns if key is not None), most))

    def among(self, keys: Sequence[StoreKey]) -> list[int]:
        """The places of those of `keys` that are hidden."""
        with self._lock:
            return [place for place, key in enumerate(keys) if key in self._keys.get(tenant_of(key), ())]

    def _shrink(self, surplus: int) -> int:
        """Gives up so many keys, one after the other, each of the tenant that has most then. O(tenants) to begin."""
        if surplus <= 0:
            return 0
        sizes = [(-len(of_tenant), tenant) for tenant, of_tenant in self._keys.items()]
        heapq.heapify(sizes)
        for _ in range(surplus):
            size, tenant = sizes[0]
            self._remove(next(iter(self._keys[tenant])))
            heapq.heapreplace(sizes, (size + 1, tenant))
        return surplus

    def _remove(self, key: StoreKey) -> None:
        tenant = tenant_of(key)
        of_tenant = self._keys[tenant]
        del of_tenant[key]
        self._num_keys -= 1
        if not of_tenant:
            del self._keys[tenant]
