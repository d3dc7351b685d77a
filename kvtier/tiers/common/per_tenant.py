"""One tier to the engine, a client of its own for each tenant below: credentials, connections, breaker."""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, TypeVar

from kvtier.errors import InvalidInputError
from kvtier.identity.keys import TENANT_ID_BYTES, StoreKey, TenantId
from kvtier.tiers.base import (
    Item,
    PayloadT_contra,
    Status,
    TargetT_contra,
    TierOf,
    Usage,
    WriteStatus,
    require_pairs,
)
from kvtier.tiers.lease import Lease, LeasingTier

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


class PerTenant(Generic[PayloadT_contra, TargetT_contra]):
    """`Tier` that hands each key to its tenant's. Any thread.

    A batch of several tenants is several calls, one after the other, each with the deadline of its tier. A key of a
    tenant that has none raises `InvalidInputError` before anything is done.
    """

    def __init__(self, name: str, tiers: Mapping[TenantId, TierOf[PayloadT_contra, TargetT_contra]]) -> None:
        """:param tiers: owned from now on."""
        self._name, self._tiers = name, dict(tiers)

    @property
    def name(self) -> str:
        return self._name

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        """Asks the tier of each key's tenant; a status per key, in order."""
        return self._each(keys, keys, lambda tier, theirs: tier.lookup(theirs))

    def read(self, keys: Sequence[StoreKey], into: Sequence[TargetT_contra]) -> list[Status]:
        """Reads each block from the tier of its key's tenant; a status per key, in order."""
        require_pairs(keys, into)
        pairs = list(zip(keys, into, strict=True))
        return self._each(keys, pairs, lambda tier, theirs: tier.read([k for k, _ in theirs], [b for _, b in theirs]))

    def lease(
        self, keys: Sequence[StoreKey], nbytes: int, ready: Collection[int], *, verified: bool = True
    ) -> Lease | None:
        """Lends blocks of the tenant's tier. None where that does not lend, and for a batch of several tenants."""
        tenants = list(self._split(keys))
        tier = self._tiers[tenants[0]] if len(tenants) == 1 else None
        return tier.lease(keys, nbytes, ready, verified=verified) if isinstance(tier, LeasingTier) else None

    def write(self, items: Sequence[Item[PayloadT_contra]]) -> list[WriteStatus]:
        """Writes each block to the tier of its key's tenant; a status per block, in order."""
        return self._each([key for key, _, _ in items], items, lambda tier, theirs: tier.write(theirs))

    def by_tenant(self, keys: Sequence[StoreKey]) -> dict[TenantId, list[StoreKey]]:
        """The keys of each tenant that has some."""
        return {tenant: [keys[i] for i in places] for tenant, places in self._split(keys).items()}

    def discard(self, keys: Sequence[StoreKey]) -> int:
        """Forgets each key in the tier of its tenant; returns how many were there."""
        return sum(self._tiers[tenant].discard(theirs) for tenant, theirs in self.by_tenant(keys).items())

    def usage(self) -> Usage:
        """Returns the blocks and bytes of all tenants together, which share one capacity."""
        shares = [tier.usage() for tier in self._tiers.values()]
        return Usage(
            num_blocks=sum(share.num_blocks for share in shares),
            used_bytes=sum(share.used_bytes for share in shares),
            capacity_bytes=max((share.capacity_bytes for share in shares), default=0),
        )

    def check(self) -> None:
        """Verifies the bookkeeping of every tenant's tier; raises `InvariantError`."""
        for tier in self._tiers.values():
            tier.check()

    def close(self) -> None:
        """Closes the tiers of all tenants, also when closing one of them raises."""
        with contextlib.ExitStack() as stack:
            for tier in self._tiers.values():
                stack.callback(tier.close)

    def _each(
        self,
        keys: Sequence[StoreKey],
        items: Sequence[_Item],
        call: Callable[[TierOf[PayloadT_contra, TargetT_contra], list[_Item]], list[_Answer]],
    ) -> list[_Answer]:
        """An answer per item, in order."""
        answers: dict[int, _Answer] = {}
        for tenant, places in self._split(keys).items():
            theirs = [items[i] for i in places]
            answers.update(zip(places, call(self._tiers[tenant], theirs), strict=True))
        return [answers[i] for i in range(len(keys))]

    def _split(self, keys: Sequence[StoreKey]) -> dict[TenantId, list[int]]:
        """The places of each tenant's keys."""
        places: dict[TenantId, list[int]] = {}
        for i, key in enumerate(keys):
            places.setdefault(TenantId(key[:TENANT_ID_BYTES]), []).append(i)
        strangers = places.keys() - self._tiers.keys()
        if strangers:
            raise InvalidInputError(f"tier {self._name}: keys of {len(strangers)} tenants that it is not connected for")
        return places
