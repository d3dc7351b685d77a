"""What is where: the slots of the arenas, and mirrors of the tiers that the movers keep for themselves."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from kvtier.identity.keys import TENANT_ID_BYTES, BlockKey, TenantId
from kvtier.offload.changes import ContentChanges
from kvtier.offload.messages import HOST, Inventory
from kvtier.offload.planner import MISSING, PENDING, BlockStatus
from kvtier.policies.base import EvictionPolicy
from kvtier.policies.lru import LRU
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.host.entries import Entry
from kvtier.tiers.host.slot_index import SlotIndex


class BlockIndex:
    """Answers for all ranks at once: slot ids are the same in every arena. Scheduler thread only."""

    def __init__(
        self,
        num_slots: int,
        num_ranks: int,
        local_tiers: Sequence[str],
        on_evict: Callable[[BlockKey], None],
        make_policy: Callable[[], EvictionPolicy[BlockKey]] = LRU,
    ) -> None:
        """
        :param local_tiers: tiers below the arena that belong to each mover alone, in order of preference.
        :param on_evict: told which block lost its slot to another one.
        :param make_policy: makes the order in which blocks lose their slots.
        """
        self._on_evict = on_evict
        self.slots: SlotIndex[BlockKey] = SlotIndex(num_slots, make_policy)
        self._forgetting: Counter[str] = Counter()
        """Tiers that are being emptied: what they have does not count."""
        self._mirrors: dict[str, list[set[bytes]]] = {tier: [set() for _ in range(num_ranks)] for tier in local_tiers}
        self._num_blocks = {tier: Counter[bytes]() for tier in local_tiers}
        """Blocks of each tenant that the first rank has in a local tier, by tier."""
        self.content_changes: ContentChanges | None = None
        """Every block that comes or goes is noted there, while somebody watches."""

    def locate(self, key: BlockKey) -> BlockStatus:
        """Returns where the block is, as far as is known without asking anybody."""
        entry = self.slots.find(key)
        if entry is not None:
            return BlockStatus(Status.HIT, HOST) if entry.ready else PENDING
        return self.locate_below(key)

    def locate_below(self, key: BlockKey) -> BlockStatus:
        """Returns where the block is in the local tiers below the arenas."""
        for tier in self._mirrors:
            if self.has(tier, key):
                return BlockStatus(Status.HIT, tier)
        return MISSING

    def has(self, tier: str, key: BlockKey) -> bool:
        """Whether every rank can read this block in that tier, which is `HOST` or one of the local ones."""
        if tier == HOST:
            entry = self.slots.find(key)
            return entry is not None and entry.ready
        return not self._forgetting[tier] and all(key in mirror for mirror in self._mirrors[tier])

    def note(self, tier: str, keys: Iterable[BlockKey]) -> None:
        """Notes that these blocks may have come to the tier or gone from it."""
        if self.content_changes is not None:
            self.content_changes.note(tier, keys)

    def prepare(self, key: BlockKey) -> Entry[BlockKey] | None:
        """Returns a slot to write this block to; None when it has one already or all are in use."""
        prepared = self.slots.prepare(key)
        if isinstance(prepared, WriteStatus):
            return None
        if prepared.evicted is not None:
            self.note(HOST, [prepared.evicted])
            self._on_evict(prepared.evicted)
        return prepared.entry

    def commit(self, entry: Entry[BlockKey]) -> None:
        """Makes a block readable that all ranks have written to its slot."""
        self.slots.commit(entry, nbytes=0)
        self.note(HOST, [entry.key])

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Notes that a job has used these blocks, the last one first, so that tails are evicted before heads."""
        for key in reversed(keys):
            self.slots.touch(key)

    def near_eviction(self, depth: int) -> list[BlockKey]:
        """Returns the ready blocks that the next `depth` new ones would evict. O(depth)."""
        at_risk = depth - self.slots.num_free
        return self.slots.coldest(at_risk) if at_risk > 0 else []

    def in_local_tier(self, tier: str) -> set[BlockKey]:
        """Returns the blocks that some rank has in this tier."""
        return {BlockKey(key) for mirror in self._mirrors[tier] for key in mirror}

    def num_blocks_of(self, tenant: TenantId, tier: str) -> int:
        """Returns how many blocks of the tenant the first rank has in a local tier."""
        return self._num_blocks[tier][tenant]

    def begin_forgetting(self, tier: str) -> None:
        """Finds nothing in this tier until `end_forgetting` has been called as often."""
        self._forgetting[tier] += 1
        self._note_all(tier)

    def end_forgetting(self, tier: str) -> None:
        """Ends a `begin_forgetting`, of which the mirrors know by now."""
        self._forgetting[tier] -= 1
        self._note_all(tier)

    def apply(self, rank: int, changes: Inventory) -> None:
        """Takes in what one mover's tier has gained and lost."""
        mirror = self._mirrors[changes.tier][rank]
        if changes.cleared:
            self._note_all(changes.tier)
            mirror.clear()
        if not rank:
            self._count(changes)
        mirror.update(changes.added)
        mirror.difference_update(changes.removed)
        self.note(changes.tier, map(BlockKey, chain(changes.added, changes.removed)))

    def _count(self, changes: Inventory) -> None:
        """Counts what the first rank's tier has gained and lost, before its mirror knows."""
        mirror, counts = self._mirrors[changes.tier][0], self._num_blocks[changes.tier]
        if changes.cleared:
            counts.clear()
        counts.update(key[:TENANT_ID_BYTES] for key in changes.added if key not in mirror)
        counts.subtract(key[:TENANT_ID_BYTES] for key in changes.removed if key in mirror)

    def _note_all(self, tier: str) -> None:
        if self.content_changes is not None:
            self.content_changes.note(tier, self.in_local_tier(tier))
