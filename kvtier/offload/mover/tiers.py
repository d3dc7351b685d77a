"""The tiers below a rank's arena, as its mover knows them."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier.identity.keys import StoreKey
from kvtier.offload.inventory import InventoryLog
from kvtier.offload.mover.lending import Lender
from kvtier.offload.replica import ALONE, Replica
from kvtier.tiers.base import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverTiers:
    """Tiers by name, and what is special about some. The caller owns them and closes them after the mover."""

    by_name: Mapping[str, Tier]
    inventory: InventoryLog
    """Hears the events of those tiers that belong to this rank alone."""
    lenders: Mapping[str, Lender[Any]] = field(default_factory=dict)
    """What lends blocks of a tier for direct loads, by the name of the tier."""
    shared: Collection[str] = ()
    """The names of those tiers that the movers of all ranks have."""
    replica: Replica = ALONE
    """Says which of the blocks for shared tiers are this rank's to write."""
    forget_untold: Callable[[str], None] = lambda tier: None
    """Has the tier of this name drop blocks that it has written since its last message to the inventory, of which the
    directory cannot know. It is called when a discard arrives, and must not block."""

    def writes(self, tier: str, key: StoreKey) -> bool:
        """Whether it is this rank that writes the block to the tier."""
        return tier not in self.shared or self.replica.writes(key)
