"""Calls of tiers with memory that they may use until it is no longer lent, where they can make use of that."""

from collections.abc import Sequence

from kvtier.identity.keys import StoreKey
from kvtier.memory.buffers import ReadableBuffer
from kvtier.tiers.base import Item, Status, Tier, WriteStatus
from kvtier.tiers.common.lent_memory import LentMemory
from kvtier.tiers.disk.tier import DiskTier


def read_lent(tier: Tier, keys: Sequence[StoreKey], into: Sequence[memoryview], lent: LentMemory) -> list[Status]:
    """Reads blocks into the caller's buffers as `Tier.read` does; `into` is the caller's again at `lent.when_done`."""
    return tier.read(keys, into, lent) if isinstance(tier, DiskTier) else tier.read(keys, into)


def write_lent(tier: Tier, items: Sequence[Item[ReadableBuffer]], lent: LentMemory) -> list[WriteStatus]:
    """Writes blocks as `Tier.write` does; the payloads are the caller's again at `lent.when_done`."""
    return tier.write(items, lent) if isinstance(tier, DiskTier) else tier.write(items)
