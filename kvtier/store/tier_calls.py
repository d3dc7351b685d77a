"""Calls to a tier below memory: counted, and with memory that it may use until it is no longer lent."""

from collections.abc import Sequence

from kvtier.identity.keys import StoreKey
from kvtier.memory.buffers import ReadableBuffer
from kvtier.metrics import Metrics
from kvtier.tiers.base import Item, Status, Tier, WriteStatus
from kvtier.tiers.common.lent_memory import LentMemory
from kvtier.tiers.common.metered import TimedCalls
from kvtier.tiers.disk.tier import DiskTier


class TierCalls:
    """Calls one tier. Any thread; raises and blocks as the tier does."""

    def __init__(self, tier: Tier, metrics: Metrics) -> None:
        """:param tier: stays the caller's."""
        self.tier = tier
        self._calls = TimedCalls(tier.name, metrics)
        metrics.begin(tier.name)

    @property
    def name(self) -> str:
        """The tier's name."""
        return self.tier.name

    def lookup(self, keys: Sequence[StoreKey], *, counts: bool = False) -> list[Status]:
        """Asks the tier for a status per key, in order, and times the call.

        :param counts: whether the blocks count as looked up: those that a client looks up, and not those that the
            store asks about on its own, before it reads or writes them.
        """
        return self._calls.lookup(lambda: self.tier.lookup(keys), counts=counts)

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview], lent: LentMemory) -> list[Status]:
        """Reads blocks as `Tier.read` does; `into` is the caller's again at `lent.when_done`."""
        tier = self.tier
        return self._calls.read(
            lambda: tier.read(keys, into, lent) if isinstance(tier, DiskTier) else tier.read(keys, into), into
        )

    def write(self, items: Sequence[Item[ReadableBuffer]], lent: LentMemory) -> list[WriteStatus]:
        """Writes blocks as `Tier.write` does; the payloads are the caller's again at `lent.when_done`."""
        tier = self.tier
        return self._calls.write(
            lambda: tier.write(items, lent) if isinstance(tier, DiskTier) else tier.write(items),
            [payload for _, payload, _ in items],
        )

    def discard(self, keys: Sequence[StoreKey]) -> int:
        """Makes the tier forget these keys, counts the call, and returns how many were there."""
        return self._calls.discard(lambda: self.tier.discard(keys))
