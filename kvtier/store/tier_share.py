"""What one tenant has of a tier on this machine, and how full that is."""

from dataclasses import dataclass

from kvtier.events import TierState
from kvtier.identity.keys import TenantId
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.host.tier import HostTier


@dataclass(frozen=True, slots=True)
class TierShare:
    """One tenant's share of one tier."""

    tier: str
    num_blocks: int
    used_bytes: int
    """Bytes that the tenant's blocks take in the tier, as the tier counts them."""
    capacity_bytes: int
    used_percent: int
    """How full the tier is with the blocks of all tenants, in percent of its capacity."""
    state: TierState

    @classmethod
    def of(cls, tier: HostTier | DiskTier, tenant: TenantId) -> "TierShare":
        """Asks the tier what the tenant has of it."""
        own, total = tier.usage_of(tenant), tier.usage()
        taken_bytes = total.used_bytes if isinstance(tier, DiskTier) else tier.taken_bytes()
        percent = min(100, 100 * taken_bytes // total.capacity_bytes)
        state = tier.state if isinstance(tier, DiskTier) else TierState.WRITABLE
        return cls(tier.name, own.num_blocks, own.used_bytes, total.capacity_bytes, percent, state)
