"""Which key lives in which slot of an arena, and which slot may be taken next. Bookkeeping only."""

from collections.abc import Callable
from typing import Generic, NamedTuple

from kvtier.errors import InvariantError
from kvtier.policies.base import EvictionPolicy
from kvtier.policies.lru import LRU
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.host.entries import Entries, Entry, K


class Prepared(NamedTuple, Generic[K]):
    """A slot to write to, until `commit` or `abort` of `entry`."""

    entry: Entry[K]
    evicted: K | None
    """The key that lost its place for it."""


class SlotIndex(Entries[K]):
    """`Entries` that have one arena of slots, all of one size, to themselves. Guarded as they are."""

    def __init__(self, num_slots: int, make_policy: Callable[[], EvictionPolicy[K]] = LRU) -> None:
        """Manages slots 0 to `num_slots - 1`."""
        super().__init__(make_policy(), self._free_slot)
        self._free_slots: dict[int, None] = dict.fromkeys(reversed(range(num_slots)))
        """Slots nobody holds."""
        self._held: dict[int, Entry[K]] = {}
        """Every entry that holds a slot, visible or not, by its slot."""

    @property
    def num_free(self) -> int:
        """Slots that can be prepared without evicting."""
        return len(self._free_slots)

    @property
    def num_slots(self) -> int:
        return len(self._free_slots) + len(self._held)

    def prepare(self, key: K) -> Prepared[K] | WriteStatus:
        """Takes a free slot, or the slot of the policy's first unpinned victim.

        Returns `WriteStatus.EXISTS` when the key is there or being written, `WriteStatus.FULL` when
        every slot is pinned or being written.
        """
        if self.find(key) is not None:
            return WriteStatus.EXISTS
        evicted = None
        if not self._free_slots:
            victim = self.evict()
            if victim is None:
                return WriteStatus.FULL
            evicted = victim.key
        slot, _ = self._free_slots.popitem()
        entry = self._held[slot] = self.enter(key, slot)
        return Prepared(entry, evicted)

    def discard_ready(self) -> list[K]:
        """Discards every key that is ready, and returns them; those being written stay. O(slots)."""
        ready = [entry.key for entry in self._held.values() if entry.ready and self.find(entry.key) is entry]
        for key in ready:
            self.discard(key)
        return ready

    def check(self) -> None:
        """Verifies the bookkeeping; raises `InvariantError`. O(slots)."""
        if self._free_slots.keys() & self._held.keys():
            raise InvariantError("slot index: a slot is free and held")
        if any(entry.slot != slot for slot, entry in self._held.items()):
            raise InvariantError("slot index: an entry holds another slot than its own")
        self.check_held(self._held.values())

    def _free_slot(self, entry: Entry[K]) -> None:
        del self._held[entry.slot]
        self._free_slots[entry.slot] = None
