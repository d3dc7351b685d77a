"""Removes everything of one tenant, from all tiers and the memory of this process."""

import gc
import time
from dataclasses import dataclass, field

from kvtier.clock import MONOTONIC
from kvtier.identity.keys import StoreKey, TenantId
from kvtier.memory.malloc import give_back_freed_memory
from kvtier.store.lower_tiers import LowerTiers
from kvtier.tiers.host.tier import HostTier

_BATCH = 4096
"""Blocks that are discarded at a time."""
_MOST_ROUNDS = 5
_PATIENCE_S = 75.0
"""Longer than a client may hold a block of its tenant."""
_PAUSE_S = 0.05
"""Seconds between two looks whether readers and writers have ended."""


@dataclass(slots=True)
class PurgeReport:
    """What a purge has removed, and what it could not."""

    removed: dict[str, int] = field(default_factory=dict)
    """Blocks by tier; of a Redis, values, of which a large block has several."""
    problems: list[str] = field(default_factory=list)
    """What is left, and why; empty when nothing is. A purge may be repeated."""


def purge(memory: HostTier, below: LowerTiers, tenant: TenantId, deadline: float) -> PurgeReport:
    """Removes all blocks of a tenant, again until a look at all tiers has found none. Blocks until then.

    What clients of the tenant write meanwhile is removed too, or remains: have its tokens revoked before. Blocks that
    somebody reads go when they have been read. Whole pages of buffers that this process has freed go back to
    the system; what is on the same page as something in use stays until it is written over.

    :param deadline: on the clock `MONOTONIC`.
    """
    report = PurgeReport({memory.name: 0})
    for _ in range(_MOST_ROUNDS):
        removed, report.problems = below.purge(tenant, deadline)
        removed[memory.name] = _sweep(memory, below, tenant)  # and what of it has come down meanwhile
        for tier, number in removed.items():
            report.removed[tier] = report.removed.get(tier, 0) + number
        if left_bytes := _left_bytes(memory, below, tenant, min(deadline, MONOTONIC() + _PATIENCE_S)):
            report.problems.append(f"{memory.name}: {left_bytes} bytes are being read or written")
        if not any(removed.values()) and not memory.usage_of(tenant).num_blocks:
            break
        if MONOTONIC() >= deadline:
            report.problems.append("the time was over before a look at all tiers had found nothing")
            break
    else:
        report.problems.append("blocks came as fast as they went: the tenant still writes")
    gc.collect()  # cycles have buffers of their own; a quarter of a second per million blocks
    give_back_freed_memory()
    return report


def _left_bytes(memory: HostTier, below: LowerTiers, tenant: TenantId, deadline: float) -> int:
    """Returns what the tenant has of memory and beside it once readers and writers have ended, or at the deadline, or
    when it has written more, which no waiting removes."""
    while left_bytes := memory.retire_tenant(tenant) + below.private_bytes(tenant):
        if memory.usage_of(tenant).num_blocks or MONOTONIC() >= deadline:
            break
        time.sleep(_PAUSE_S)
    return left_bytes


def _sweep(memory: HostTier, below: LowerTiers, tenant: TenantId) -> int:
    """Discards all that memory has, also on its way down. Returns how many blocks there were."""
    num_found = 0
    waiting: list[StoreKey] = []
    for found in memory.keys_of(tenant):
        waiting += found
        while len(waiting) >= _BATCH:
            batch, waiting = waiting[:_BATCH], waiting[_BATCH:]
            num_found += _discard(memory, below, batch)
    return num_found + _discard(memory, below, waiting)


def _discard(memory: HostTier, below: LowerTiers, keys: list[StoreKey]) -> int:
    if not keys:
        return 0
    with below.without(keys):
        memory.discard(keys)
    return len(keys)
