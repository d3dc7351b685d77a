"""What the tiers below host memory have not been given yet, by each tier's write policy."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice

from kvtier.identity.keys import BlockKey
from kvtier.tiers.common.admission_gate import AdmissionGate
from kvtier.tiers.common.write_policy import UseCounts, WritePolicy

NO_TIER = "none"
"""The source of blocks that no tier has under their keys: all tiers are owed them."""


class PendingWrites:
    """Decides which tiers get a block when it enters host memory, and keeps a list of what others get later.

    A tier with `write_through_selective` is owed a block at its n-th use, one with `write_back` from the
    start; a debt becomes due at once, or when the block comes close to eviction. A tier with an admission is owed
    what that lets in; what it keeps out is offered again at each use in host memory. Scheduler thread only.
    """

    def __init__(
        self,
        policies: Mapping[str, WritePolicy],
        uses: UseCounts[BlockKey],
        gates: Mapping[str, AdmissionGate] | None = None,
        block_bytes: int = 0,
    ) -> None:
        """
        :param policies: by name of the tier below.
        :param uses: shared with the device's boundary; noted by the directory.
        :param gates: the admissions of those tiers that have one, by their names.
        :param block_bytes: what a block takes in such a tier, in all ranks together.
        """
        self._uses, self._gates, self._block_bytes = uses, gates or {}, block_bytes
        self._policies = policies
        self._kept_out: dict[str, set[BlockKey]] = {name: set() for name in self._gates}
        """Blocks in host memory that are offered to a tier at their next use, by tier."""
        self.at_once = [
            name for name, policy in policies.items() if policy is WritePolicy.WRITE_THROUGH and name not in self._gates
        ]
        """Tiers that get a block in the same batch that copies it from the device. A block that comes from another
        tier is due at once."""
        self._selective = [n for n, p in policies.items() if p is WritePolicy.WRITE_THROUGH_SELECTIVE]
        self._late: dict[str, dict[BlockKey, None]] = {
            name: {} for name, policy in policies.items() if policy is WritePolicy.WRITE_BACK
        }
        """Blocks that a tier with write_back gets before host memory forgets them, by tier. Oldest first."""
        self._due: dict[str, dict[BlockKey, None]] = {name: {} for name in policies}
        """Blocks that a tier gets now, by tier."""
        self._refused: dict[str, set[BlockKey]] = {name: set() for name in policies}
        """Blocks in host memory that a tier was given and did not take, by tier. They are written again once due."""

    @property
    def by_uses(self) -> bool:
        """Whether some tier gets blocks for their uses."""
        return bool(self._selective or self._gates)

    @property
    def owes_after_saves(self) -> bool:
        """Whether some tier gets blocks from the device only after host memory has them."""
        return len(self.at_once) < len(self._policies)

    @property
    def late(self) -> int:
        """Blocks that wait for their eviction to come close."""
        return sum(map(len, self._late.values()))

    @property
    def due(self) -> int:
        """Blocks that are to be written now."""
        return sum(map(len, self._due.values()))

    def unpaid(self) -> list[tuple[str, int]]:
        """Returns how many blocks are owed to each tier, now or later."""
        tiers = {**self._due, **{tier: {} for tier in self._late}}
        return [(tier, len(self._due[tier]) + len(self._late.get(tier, ()))) for tier in tiers]

    def entered(self, keys: Sequence[BlockKey], source: str) -> None:
        """Notes that host memory got the blocks of a request from the tier `source`, or from the device when that is
        empty. The batch that copies them from the device gives them to `at_once` by itself."""
        for tier in self._policies:
            if tier == source:
                continue
            wanted = keys
            if tier in self._selective:
                wanted = [key for key in keys if self._uses.is_enough(key)]
            if tier in self._gates and source:
                # A load ends with a use of all that it has brought: that is the offer, and a second one is not made.
                self._kept_out[tier].update(wanted)
            elif source or tier not in self.at_once:
                self._owe(tier, wanted)

    def used(self, keys: Collection[BlockKey]) -> None:
        """Offers those of a request's blocks once more that a tier's admission has kept out."""
        for tier, kept_out in self._kept_out.items():
            self._owe(tier, [key for key in keys if key in kept_out])

    def used_enough(self, keys: Sequence[BlockKey]) -> None:
        """Notes that these blocks, in host memory, had their n-th use just now."""
        for tier in self._selective:
            self._owe(tier, keys)

    def refused(self, tier: str, keys: Iterable[BlockKey]) -> None:
        """Notes that the tier did not take these blocks, which are in host memory."""
        self._refused[tier].update(keys)

    def evicting(self, keys: Iterable[BlockKey]) -> None:
        """Makes blocks that come close to eviction due now."""
        for key in keys:
            for tier, blocks in self._late.items():
                if key in blocks:
                    del blocks[key]
                    self._due[tier][key] = None

    def settle_all(self) -> None:
        """Makes everything due that waits for its eviction."""
        for blocks in self._late.values():
            self.evicting(list(blocks))

    def evicted(self, key: BlockKey) -> list[str]:
        """Notes that host memory has lost the block. Returns the tiers that had to get it and did not. Tiers that write
        through and were not given it do not count: the block came from a tier that has it."""
        unpaid = {tier for debts in (self._due, self._late) for tier, blocks in debts.items() if key in blocks}
        lost = unpaid.difference(self.at_once).union(tier for tier, keys in self._refused.items() if key in keys)
        self._forget(key)
        return sorted(lost)

    def take_due(self, most: int) -> list[tuple[str, list[BlockKey]]]:
        """Removes and returns at most `most` blocks that are due now, by tier."""
        taken: list[tuple[str, list[BlockKey]]] = []
        for tier, blocks in self._due.items():
            keys = list(islice(blocks, most))
            for key in keys:
                del blocks[key]
                self._refused[tier].discard(key)
            most -= len(keys)
            if keys:
                taken.append((tier, keys))
        return taken

    def clear(self) -> None:
        """Forgets all writes that are owed: host memory was emptied on purpose."""
        for blocks in (*self._due.values(), *self._late.values()):
            blocks.clear()
        for keys in (*self._refused.values(), *self._kept_out.values()):
            keys.clear()

    def _owe(self, tier: str, keys: Sequence[BlockKey]) -> None:
        """Notes that the tier is owed these blocks, if they are let in."""
        if keys and (gate := self._gates.get(tier)) is not None:
            answers = gate.admits([(key, self._block_bytes) for key in keys], len(keys))
            kept_out = {key for key, admitted in zip(keys, answers, strict=True) if not admitted}
            self._kept_out[tier].difference_update(keys)
            self._kept_out[tier] |= kept_out
            keys = [key for key in keys if key not in kept_out]
        (self._late if tier in self._late else self._due)[tier].update(dict.fromkeys(keys))

    def _forget(self, key: BlockKey) -> None:
        for owed in (*self._due.values(), *self._late.values()):
            owed.pop(key, None)
        for keys in (*self._refused.values(), *self._kept_out.values()):
            keys.discard(key)
