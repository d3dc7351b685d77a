"""Blocks that wait for a tier, in a line for each tenant: lines are served in turns, so that none waits for another."""

from collections import OrderedDict
from collections.abc import Iterable

from kvtier.identity.keys import StoreKey, TenantId, tenant_of
from kvtier.tiers.host.pins import ReadPin

_TURN_BYTES = 1 << 20
"""What a tenant may write in one turn. Smaller: batches for the tier are made of many tenants' blocks, few of each.
Larger: a tenant waits longer for its turn."""
_LEAST_BYTES = _TURN_BYTES // 16
"""The least that a block counts: the smallest one takes the tier time, and a turn of such blocks would not end."""


class FairQueue:
    """Deficit round robin by bytes (Shreedhar and Varghese, SIGCOMM 1995), with equal weights.

    In each round a tenant writes about `_TURN_BYTES`, or saves them up for a block that is larger, its oldest blocks
    first. So whoever has little to write waits for a turn of each other tenant, whatever those have waiting. A tenant
    that is alone is served as by a simple queue. What is left of its turn is lost when nothing of its waits any more.

    Guarded by its owner's lock. Every method is O(keys it names) but for `take`, where a block of many turns costs as
    many looks at each tenant's line.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[TenantId, OrderedDict[StoreKey, ReadPin]] = OrderedDict()
        """What waits by tenant, oldest first. The first tenant has its turn; none is without a block."""
        self._left_bytes: dict[TenantId, int] = {}
        """What each of them may still write in its turn, or in its next one."""
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __contains__(self, key: StoreKey) -> bool:
        return key in self._lines.get(tenant_of(key), ())

    @property
    def tenants(self) -> Iterable[TenantId]:
        """Returns the tenants that have something waiting."""
        return self._lines.keys()

    def push(self, key: StoreKey, lease: ReadPin) -> None:
        """Adds a block that does not wait yet, behind all others of its tenant."""
        tenant = tenant_of(key)
        if tenant not in self._lines:
            self._lines[tenant] = OrderedDict()
            self._left_bytes[tenant] = _TURN_BYTES
        self._lines[tenant][key] = lease
        self._num_blocks += 1

    def take(self, most: int) -> dict[StoreKey, ReadPin]:
        """Takes out the blocks whose turn it is, at most so many; none only when there are none."""
        batch: dict[StoreKey, ReadPin] = {}
        while self._lines and len(batch) < most:
            tenant, line = next(iter(self._lines.items()))
            key, lease = next(iter(line.items()))
            cost_bytes = max(_LEAST_BYTES, len(lease.view))
            if cost_bytes > self._left_bytes[tenant]:
                self._left_bytes[tenant] += _TURN_BYTES
                self._lines.move_to_end(tenant)
            else:
                self._left_bytes[tenant] -= cost_bytes
                batch[key] = self.pop(key)
        return batch

    def pop(self, key: StoreKey) -> ReadPin:
        """Takes out one block."""
        tenant = tenant_of(key)
        line = self._lines[tenant]
        lease = line.pop(key)
        self._num_blocks -= 1
        if not line:
            del self._lines[tenant], self._left_bytes[tenant]
        return lease

    def pop_all(self, tenants: Iterable[TenantId]) -> dict[StoreKey, ReadPin]:
        """Takes out all blocks of these tenants."""
        return {key: self.pop(key) for tenant in list(tenants) for key in list(self._lines[tenant])}
