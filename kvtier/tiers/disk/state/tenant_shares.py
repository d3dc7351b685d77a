"""What tenants are owed of a disk tier, and who is furthest above that."""

import math
from collections.abc import Callable, Mapping

from kvtier.errors import InvariantError
from kvtier.identity.keys import TenantId
from kvtier.tiers.common.shares import EQUAL_SHARE, Share, require_room
from kvtier.tiers.disk.state.lowest import Lowest


class TenantShares:
    """Shares of all tenants, and how much those have that have anything. Not thread-safe: the tier's lock guards it.

    Costs the same however many tenants there are, but for `set` and `check`.
    """

    def __init__(self) -> None:
        self._shares: dict[TenantId, Share] = {}
        """The shares of tenants for whom something was said, whether they have anything or not."""
        self._excess: Lowest[TenantId] = Lowest()
        """How far each tenant that has something is above its guarantee, by its weight (`Share.excess`), negative."""
        self._bytes: dict[TenantId, int] = {}
        """What each of them has."""

    def set(self, shares: Mapping[TenantId, Share], capacity_bytes: int) -> None:
        """Gives tenants these shares from now on, and all others equal ones.

        Raises `InvalidInputError`, and changes nothing, when more would be guaranteed than there is.
        """
        require_room(shares.values(), capacity_bytes)
        self._shares = dict(shares)
        for tenant, nbytes in self._bytes.items():
            self.weigh(tenant, nbytes)

    def weigh(self, tenant: TenantId, nbytes: int) -> None:
        """The tenant has so much now."""
        self._bytes[tenant] = nbytes
        self._excess.put(tenant, -int(self._share_of(tenant).excess(nbytes)))

    def drop(self, tenant: TenantId) -> None:
        """The tenant has nothing any more; what it is owed stays."""
        del self._bytes[tenant]
        self._excess.drop(tenant)

    def most_bytes_of(self, tenant: TenantId) -> float:
        """What the tenant may have; infinite without a cap."""
        cap_bytes = self._share_of(tenant).cap_bytes
        return math.inf if cap_bytes is None else cap_bytes

    def furthest_above(self, skip: Callable[[TenantId], bool]) -> TenantId | None:
        """The tenant furthest above its guarantee, without those that `skip` says."""
        found = self._excess.first(skip)
        return found[1] if found is not None else None

    def gives(self, lender: TenantId, left_bytes: int, borrower: TenantId) -> bool:
        """Whether a tenant has to give something to another one, so that it has `left_bytes` then.

        Not below its guarantee, and not when it is less above it than the borrower is.
        """
        above = self._share_of(lender).excess(self._bytes.get(lender, 0))
        has = self._share_of(borrower).excess(self._bytes.get(borrower, 0))
        return left_bytes >= self._share_of(lender).guaranteed_bytes and above >= has

    def check(self, held: Mapping[TenantId, int]) -> None:
        """Raises `InvariantError` unless tenants have what is in `held`."""
        most = min((-int(self._share_of(tenant).excess(nbytes)) for tenant, nbytes in held.items()), default=0)
        first = self._excess.first()
        if dict(held) != self._bytes or (first[0] if first is not None else 0) != most:
            raise InvariantError("disk segments: it is not known which tenant has most")

    def _share_of(self, tenant: TenantId) -> Share:
        return self._shares.get(tenant, EQUAL_SHARE)
