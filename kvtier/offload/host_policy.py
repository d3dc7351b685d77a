"""Which of the device's blocks are copied to host memory, and when; and the uses that write policies go by."""

from collections.abc import Iterable, Sequence

from kvtier.identity.keys import BlockKey
from kvtier.offload.index import BlockIndex
from kvtier.offload.jobs import Block
from kvtier.offload.pending_writes import PendingWrites
from kvtier.tiers.common.write_policy import UseCounts, WritePolicy


class HostPolicy:
    """The boundary between the device and the arenas; `PendingWrites` has those below. Scheduler thread only."""

    def __init__(self, policy: WritePolicy, uses: UseCounts[BlockKey], index: BlockIndex, owed: PendingWrites) -> None:
        """:param uses: counted here for all boundaries."""
        self._policy, self._uses, self._index, self._owed = policy, uses, index, owed
        self._selective = policy is WritePolicy.WRITE_THROUGH_SELECTIVE

    def note_uses(self, keys: Iterable[BlockKey]) -> set[BlockKey]:
        """Counts a use of each; returns those that had their n-th just now. Free where no policy looks at uses."""
        if not self._owed.by_uses and not self._selective:
            return set()
        used = list(keys)
        self._owed.used(used)
        enough = [key for key in used if self._uses.note(key)]
        self._owed.used_enough([key for key in enough if self._index.slots.find(key) is not None])
        return set(enough)

    def of_full(self, blocks: Sequence[Block]) -> list[Block]:
        """Returns the blocks that are to be copied now that they have become full, which is a use of each."""
        self.note_uses(key for key, _ in blocks)
        if self._policy is WritePolicy.WRITE_BACK:
            return []
        return [block for block in blocks if not self._selective or self._uses.is_enough(block[0])]

    def of_hit(self, blocks: Sequence[Block]) -> list[Block]:
        """Returns the blocks that have become worth a copy by being hit on the device, which is a use of each."""
        enough = self.note_uses(key for key, _ in blocks)
        return [block for block in blocks if block[0] in enough] if self._selective else []

    def of_evicted(self, key: BlockKey) -> bool:
        """Whether a block that the device is about to lose should be copied before."""
        if self._selective and not self._uses.is_enough(key):
            return False
        return self._index.slots.find(key) is None
