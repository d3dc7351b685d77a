"""How much of memory may be pinned for one tier below, and how much of that by one tenant."""

from collections import Counter

from kvtier.identity.keys import TenantId


class FairRoom:
    """Bytes that are pinned, by tenant, and a bound for each that depends on all (Choudhury and Hahne, ToN 1998).

    There is twice the room that one tenant may have, and a tenant may have as much as is free at the moment. So one
    that is alone has `most_bytes`, which is half, and leaves as much to whoever comes: half of it to the first, half of
    what is left to the next. Tenants that all want more end up with equal parts, two of them with two thirds of
    `most_bytes` each; who had more before is refused until it has written that down. A tenant that has nothing pinned
    is never refused, whatever writes under way have added to the room of the others.

    Parts kept for each configured tenant would have to be known here, would leave little to each where there are
    many, and would take from one that is busy what all others do not use. Guarded by its owner's lock.
    """

    def __init__(self, most_bytes: int) -> None:
        """:param most_bytes: for a tenant that is alone; all together have twice as much at most."""
        self._room_bytes = 2 * most_bytes
        self.taken_bytes = 0
        """The bytes of all tenants. Only this class writes it."""
        self._taken: Counter[TenantId] = Counter()
        """Bytes of those tenants that have some."""

    def taken_by(self, tenant: TenantId) -> int:
        """Bytes of one tenant."""
        return self._taken[tenant]

    def is_full_for(self, tenant: TenantId) -> bool:
        """Whether the tenant has as much as it may have."""
        own = self._taken[tenant]
        return own > 0 and own >= self._room_bytes - self.taken_bytes

    def fits(self, tenant: TenantId, nbytes: int) -> bool:
        """Whether the tenant may have so many bytes more."""
        return self._taken[tenant] + nbytes <= self._room_bytes - (self.taken_bytes + nbytes)

    def add(self, tenant: TenantId, nbytes: int) -> None:
        """Counts so many bytes more, or fewer, of the tenant, without regard to bounds."""
        self.taken_bytes += nbytes
        self._taken[tenant] += nbytes
        if not self._taken[tenant]:
            del self._taken[tenant]
