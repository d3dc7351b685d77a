"""Which key lives in which slot of an arena, and which slot may be taken next. Bookkeeping only."""

import math
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from kvtier.errors import InvalidInputError, InvariantError
from kvtier.policies.base import UNKNOWN_USE, EvictionPolicy
from kvtier.policies.lru import LRU
from kvtier.tiers.base import WriteStatus

K = TypeVar("K", bound=bytes)


class Entry(Generic[K]):
    """One occupied slot. Read its fields freely under the index's lock; only the index writes them."""

    __slots__ = ("_parked", "_visible", "checksum", "generation", "key", "nbytes", "pins", "ready", "since_s", "slot")

    def __init__(self, key: K, slot: int) -> None:
        self.key = key
        self.slot = slot
        self.ready = False
        """Committed: the slot's bytes are final."""
        self.pins = 0
        """Readers that rely on the bytes; a pinned slot is never given to another key."""
        self.nbytes = 0
        self.checksum = 0
        self.generation = 0
        """The generation of the slot's content, where the owner of the index counts it."""
        self.since_s = 0.0
        """When it was committed, by the owner's clock."""
        self._visible = True
        """Found under its key. False after discard; the slot is freed by the last holder."""
        self._parked = False
        """Was chosen as a victim while pinned; the policy gets it back at the last unpin."""


class Prepared(NamedTuple, Generic[K]):
    """A slot to write to, until `commit` or `abort` of `entry`."""

    entry: Entry[K]
    evicted: K | None
    """The key that lost its place for it."""


class SlotIndex(Generic[K]):
    """Maps keys to slots; evicts, pins, and keeps slots of discarded keys until their last holder is gone.

    An entry is being written (from `prepare` to `commit` or `abort`), then ready. Pins, commit and
    abort go by entry, not by key, because a key that was discarded may be prepared again in another
    slot while the old one is still held.

    Not thread-safe: the owner's lock guards all of it. Every method is O(1), about 1 us or less,
    unless it says otherwise.
    """

    def __init__(self, num_slots: int) -> None:
        """Manages slots 0 to `num_slots - 1`."""
        self._policy: EvictionPolicy[K] = LRU()
        """Exactly the entries that are visible, ready and not parked."""
        self._free: dict[int, None] = dict.fromkeys(reversed(range(num_slots)))
        """Slots nobody holds. A dict, so that `remove_slots` finds them."""
        self._held: dict[int, Entry[K]] = {}
        """Every entry that holds a slot, visible or not, by its slot."""
        self._entries: dict[K, Entry[K]] = {}
        """The visible entries by key."""
        self._num_ready = 0
        """Number of visible, ready entries."""
        self._ready_bytes = 0
        """Sum of their `nbytes`."""

    def __len__(self) -> int:
        """Number of visible entries, ready or being written."""
        return len(self._entries)

    @property
    def num_free(self) -> int:
        """Slots that can be prepared without evicting."""
        return len(self._free)

    @property
    def num_slots(self) -> int:
        return len(self._free) + len(self._held)

    @property
    def num_ready(self) -> int:
        """Number of entries that `pin` would find."""
        return self._num_ready

    @property
    def ready_bytes(self) -> int:
        """Sum of `nbytes` over the entries that `pin` would find."""
        return self._ready_bytes

    def find(self, key: K) -> Entry[K] | None:
        """The entry, ready or being written. Not a use; valid only as long as the lock is held, unless pinned."""
        return self._entries.get(key)

    def find_all(self, keys: Sequence[K]) -> list[Entry[K] | None]:
        """`find` of many: 0.03 us each."""
        return list(map(self._entries.get, keys))

    def prepare(self, key: K, *, young_s: float = math.inf) -> Prepared[K] | WriteStatus:
        """Takes a free slot, or the slot of the policy's first unpinned victim.

        Returns `WriteStatus.EXISTS` when the key is there or being written, `WriteStatus.FULL` when
        every slot is pinned or being written, or the victim was committed after `young_s`.
        """
        if key in self._entries:
            return WriteStatus.EXISTS
        evicted = None
        if not self._free:
            evicted = self._evict(young_s)
            if evicted is None:
                return WriteStatus.FULL
        slot, _ = self._free.popitem()
        entry = Entry(key, slot)
        self._entries[key] = self._held[slot] = entry
        return Prepared(entry, evicted)

    def commit(self, entry: Entry[K], *, nbytes: int, checksum: int = 0, now_s: float = 0.0) -> bool:
        """Makes a prepared entry ready. False when its key was discarded meanwhile: the slot is free again."""
        self._require_writing(entry)
        if not entry._visible:
            self._free_slot(entry)
            return False
        entry.nbytes = nbytes
        entry.checksum = checksum
        entry.since_s = now_s
        entry.ready = True
        self._num_ready += 1
        self._ready_bytes += nbytes
        self._policy.insert(entry.key, UNKNOWN_USE)
        return True

    def abort(self, entry: Entry[K]) -> None:
        """Gives back a prepared entry that was not committed."""
        self._require_writing(entry)
        if entry._visible:
            del self._entries[entry.key]
            entry._visible = False
        self._free_slot(entry)

    def pin(self, key: K) -> Entry[K] | None:
        """Holds a ready entry's bytes until `unpin`. None when the key is absent or being written. Not a use."""
        entry = self._entries.get(key)
        if entry is None or not entry.ready:
            return None
        entry.pins += 1
        return entry

    def unpin(self, entry: Entry[K]) -> None:
        """Ends one `pin`. Raises `InvalidInputError` when there is none."""
        if not entry.pins:
            raise InvalidInputError(f"unpin of slot {entry.slot}, which is not pinned")
        entry.pins -= 1
        if entry.pins:
            return
        if not entry._visible:
            self._free_slot(entry)
        elif entry._parked:
            entry._parked = False
            self._policy.insert(entry.key, UNKNOWN_USE)

    def touch(self, key: K) -> None:
        """Notes a use. Ignores keys that are absent or being written."""
        entry = self._entries.get(key)
        if entry is not None and entry.ready and not entry._parked:
            self._policy.touch(key, UNKNOWN_USE)

    def coldest(self, most: int) -> list[K]:
        """Ready keys that would be evicted first, pinned ones among them, at most so many. O(most)."""
        return self._policy.coldest(most)

    def discard(self, key: K) -> bool:
        """Hides a key at once and frees its slot as soon as nobody holds it. False when it is not there."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        if entry.ready and not entry._parked:
            self._policy.remove(key, evicted=False)
        self._hide(entry)
        return True

    def discard_ready(self) -> list[K]:
        """Discards every key that is ready, and returns them; those being written stay. O(slots)."""
        ready = [key for key, entry in self._entries.items() if entry.ready]
        for key in ready:
            self.discard(key)
        return ready

    def add_slots(self, slots: range) -> None:
        """Manages these slots too; they are new and free. O(len(slots))."""
        self._free.update(dict.fromkeys(reversed(slots)))

    def remove_slots(self, slots: range, *, young_s: float = math.inf) -> list[K] | None:
        """Stops managing these slots and returns the keys evicted with them. O(len(slots)).

        None, and nothing changed, when one of them is pinned, being written, or was committed after `young_s`.
        """
        entries = [self._held[slot] for slot in slots if slot in self._held]
        if any(entry.pins or not entry.ready or entry.since_s > young_s for entry in entries):
            return None
        for entry in entries:
            self.discard(entry.key)
        for slot in slots:
            del self._free[slot]
        return [entry.key for entry in entries]

    def holds(self, slots: range) -> bool:
        """Whether one of these slots is anything but free. O(len(slots))."""
        return any(slot in self._held for slot in slots)

    def check(self) -> None:
        """Verifies the bookkeeping; raises `InvariantError`. O(slots)."""
        _require(not self._free.keys() & self._held.keys(), "a slot is free and held")
        for slot, entry in self._held.items():
            _require(entry.slot == slot, f"entry of slot {entry.slot} holds slot {slot}")
            found = self._entries.get(entry.key)
            _require(entry._visible == (found is entry), f"slot {slot}: visible flag and key disagree")
            _require(entry._visible or entry.pins > 0 or not entry.ready, f"slot {slot} leaked")
            _require(not entry.pins or entry.ready, f"slot {slot} is pinned before commit")
            _require(entry.pins >= 0 and (entry.pins > 0 or not entry._parked), f"slot {slot}: bad pins")
            evictable = entry._visible and entry.ready and not entry._parked
            _require(not evictable or entry.key in self._policy, f"slot {slot} is unknown to the policy")
        visible = [entry for entry in self._held.values() if entry._visible]
        _require(len(visible) == len(self._entries), "a key has no slot")
        evictable_count = sum(entry.ready and not entry._parked for entry in visible)
        _require(evictable_count == len(self._policy), "the policy knows a key too many")
        _require(self._num_ready == sum(e.ready for e in visible), "ready entries are miscounted")
        _require(self._ready_bytes == sum(e.nbytes for e in visible if e.ready), "ready bytes are off")

    def _evict(self, young_s: float) -> K | None:
        """Frees the slot of the first unpinned victim. Amortised O(1): a pinned one is met once per pin."""
        while coldest := self._policy.coldest(1):
            (key,) = coldest
            entry = self._entries[key]
            if entry.pins:
                self._policy.remove(key, evicted=True)
                entry._parked = True
                continue
            if entry.since_s > young_s:
                return None
            self._policy.remove(key, evicted=True)
            self._hide(entry)
            return key
        return None

    def _hide(self, entry: Entry[K]) -> None:
        """Makes a visible entry invisible; the policy has lost it already."""
        del self._entries[entry.key]
        entry._visible = False
        entry._parked = False
        if entry.ready:
            self._num_ready -= 1
            self._ready_bytes -= entry.nbytes
            if not entry.pins:
                self._free_slot(entry)

    def _free_slot(self, entry: Entry[K]) -> None:
        del self._held[entry.slot]
        self._free[entry.slot] = None

    def _require_writing(self, entry: Entry[K]) -> None:
        if entry.ready or self._held.get(entry.slot) is not entry:
            raise InvalidInputError(f"slot {entry.slot} is not being written: commit or abort it once")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(f"slot index: {message}")
