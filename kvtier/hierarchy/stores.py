"""Blocks that are in the arenas already, on their way to tiers below: what write policies owe, carried out."""

from collections.abc import Callable, Iterable, Sequence

from kvtier.hierarchy.index import BlockIndex
from kvtier.hierarchy.jobs import DirectorySettings, Store, chunks
from kvtier.hierarchy.messages import StoreBatch, ToMover
from kvtier.hierarchy.owed import OwedWrites
from kvtier.keys import BlockKey


class Stores:
    """Gives the movers what has become due, and pins it in the arenas until they are done. Scheduler thread only."""

    def __init__(
        self,
        index: BlockIndex,
        owed: OwedWrites,
        settings: DirectorySettings,
        *,
        ranks: Iterable[int],
        send: Callable[[ToMover], None],
        new_id: Callable[[], int],
    ) -> None:
        """
        :param send: hands a message to every mover.
        :param new_id: makes batch ids, which saves and loads have of the same kind.
        """
        self._index, self._owed, self._settings = index, owed, settings
        self._ranks, self._send, self._new_id = frozenset(ranks), send, new_id
        self._depth = max(1, min(settings.write_back_blocks, index.slots.num_slots // 4))
        self._stores: dict[int, Store] = {}
        self.num_blocks = 0
        """Arena slots that are pinned for stores."""

    def __contains__(self, batch_id: int) -> bool:
        return batch_id in self._stores

    def moving(self) -> set[BlockKey]:
        """Blocks under way."""
        return {entry.key for store in self._stores.values() for entry in store.entries}

    def issue(self, most: int) -> None:
        """Sends what is due, at most so many blocks; the rest stays due."""
        if most <= 0:
            return
        if self._owed.late:
            self._owed.evicting(self._index.near_eviction(self._depth))
        for tier, keys in self._owed.take_due(most):
            for chunk in chunks(keys, self._settings.batch_blocks):
                self._start(tier, chunk)

    def end(self, batch_id: int, rank: int) -> None:
        """A rank reads the store's arena slots no longer."""
        store = self._stores[batch_id]
        store.on_arena.discard(rank)
        if store.on_arena:
            return
        del self._stores[batch_id]
        self.num_blocks -= len(store.entries)
        for entry in store.entries:
            self._index.slots.unpin(entry)

    def _start(self, tier: str, keys: Sequence[BlockKey]) -> None:
        entries = [entry for key in keys if (entry := self._index.slots.pin(key)) is not None]
        if not entries:
            return
        batch_id = self._new_id()
        self._stores[batch_id] = Store(entries, set(self._ranks))
        self.num_blocks += len(entries)
        self._send(StoreBatch(batch_id, tier, [e.key for e in entries], [e.slot for e in entries]))
