"""Keys by tenant, taken out a key of each tenant in turn."""

from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Mapping

from kvtier.identity.keys import StoreKey, TenantId, tenant_of


class KeysInTurn:
    """Keys of blocks whose sizes nobody has at hand, so that turns are counted in blocks. Oldest first within a tenant.

    Guarded by its owner's lock. Every method is O(keys it names); `take` is also O(tenants).
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[TenantId, OrderedDict[StoreKey, None]] = OrderedDict()
        """The keys by tenant; whoever was served last is last. None is without a key."""
        self._keys: set[StoreKey] = set()
        """The keys of all tenants."""

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: StoreKey) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[StoreKey]:
        """Yields all keys, in no order that means anything."""
        return iter(self._keys)

    def add(self, key: StoreKey) -> None:
        """Adds a key behind all others of its tenant; one that is there stays where it is."""
        if key not in self._keys:
            self._keys.add(key)
            self._lines.setdefault(tenant_of(key), OrderedDict())[key] = None

    def discard(self, key: StoreKey) -> None:
        if key in self._keys:
            self._keys.remove(key)
            line = self._lines[tenant := tenant_of(key)]
            del line[key]
            if not line:
                del self._lines[tenant]

    def clear(self) -> None:
        self._lines.clear()
        self._keys.clear()

    def take(
        self, most: int, *, among: Iterable[StoreKey] | None = None, but: Container[StoreKey] = ()
    ) -> list[StoreKey]:
        """Takes out at most so many keys.

        :param among: only these, each named once, in this order within a tenant; None: any.
        :param but: none of these.
        """
        lines: Mapping[TenantId, Iterable[StoreKey]] = self._lines if among is None else self._by_tenant(among)
        turns = deque((tenant, iter(line)) for tenant, line in lines.items())
        taken: dict[StoreKey, TenantId] = {}
        while turns and len(taken) < most:
            tenant, keys = turns.popleft()
            key = next((key for key in keys if key not in but), None)
            if key is not None:
                taken[key] = tenant
                turns.append((tenant, keys))
        for key, tenant in taken.items():
            self._lines.move_to_end(tenant)
            self.discard(key)
        return list(taken)

    def _by_tenant(self, among: Iterable[StoreKey]) -> dict[TenantId, list[StoreKey]]:
        """Returns the keys of `among` that are here; tenants in the order of their turns."""
        found: dict[TenantId, list[StoreKey]] = {}
        for key in [key for key in among if key in self._keys]:
            found.setdefault(tenant_of(key), []).append(key)
        return {tenant: found[tenant] for tenant in self._lines if tenant in found}
