"""Blocks that are in the arenas already, on their way to tiers below: what write policies owe, carried out."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.identity.keys import BlockKey
from kvtier.offload.index import BlockIndex
from kvtier.offload.jobs import DirectorySettings, chunks
from kvtier.offload.message_queue import MessageQueue
from kvtier.offload.messages import StoreBatch
from kvtier.offload.pending_writes import PendingWrites
from kvtier.tiers.host.entries import Entry


@dataclass(slots=True)
class _Batch:
    """What the movers were given. Over when `on_arena` is empty."""

    entries: list[Entry[BlockKey]]
    """Index entries of the blocks, which are pinned."""
    on_arena: set[int]
    """Ranks that may still read the arena slots."""


class Stores:
    """Gives the movers what has become due, and pins it in the arenas until they are done. Scheduler thread only."""

    def __init__(
        self, index: BlockIndex, owed: PendingWrites, settings: DirectorySettings, *, movers: MessageQueue
    ) -> None:
        self._index, self._owed, self._settings, self._movers = index, owed, settings, movers
        self._depth = max(1, min(settings.write_back_blocks, index.slots.num_slots // 4))
        self.batches: dict[int, _Batch] = {}
        """The batches under way, by id. Changed here alone."""
        self.num_blocks = 0
        """Arena slots that are pinned for stores."""

    def moving(self) -> set[BlockKey]:
        """Returns the blocks under way."""
        return {entry.key for batch in self.batches.values() for entry in batch.entries}

    def issue(self, most: int) -> None:
        """Sends what is due, at most so many blocks; the rest stays due."""
        if most <= 0:
            return
        if self._owed.late:
            self._owed.evicting(self._index.near_eviction(self._depth))
        for tier, keys in self._owed.take_due(most):
            for chunk in chunks(keys, self._settings.batch_blocks):
                self._start(tier, chunk)

    def stored(self, rank: int, batch_id: int) -> None:
        """Notes that the tier has what a rank had to write. The last one ends the batch."""
        batch = self.batches[batch_id]
        batch.on_arena.discard(rank)
        if batch.on_arena:
            return
        del self.batches[batch_id]
        self.num_blocks -= len(batch.entries)
        for entry in batch.entries:
            self._index.slots.unpin(entry)

    def _start(self, tier: str, keys: Sequence[BlockKey]) -> None:
        entries = [entry for key in keys if (entry := self._index.slots.pin(key)) is not None]
        if not entries:
            return
        batch_id = self._movers.new_id()
        self.batches[batch_id] = _Batch(entries, set(self._movers.ranks))
        self.num_blocks += len(entries)
        self._movers.send(StoreBatch(batch_id, tier, [e.key for e in entries], [e.slot for e in entries]))
