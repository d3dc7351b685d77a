"""The blocks of one owner of slots: which key has which slot, who holds it, and in which order blocks are evicted."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from kvtier.errors import InvalidInputError, InvariantError
from kvtier.policies.base import UNKNOWN_USE, EvictionPolicy, Use

K = TypeVar("K", bound=bytes)

_FIRST_LOOK = 16
"""Blocks that are looked at for an old one when the first to go is too young."""
_MOST_PASSED = 1024
"""Blocks that are looked at before writers hear that there is no room, which takes 0.1 ms, or 2 ms with policies that
sort. A tenant that commits as many within the time that its blocks have to stay may have to wait for them."""


class Entry(Generic[K]):
    """One occupied slot. Read its fields freely under its owner's lock; only `Entries` and relocations write them."""

    __slots__ = (
        "_parked",
        "_visible",
        "_writing",
        "checksum",
        "generation",
        "key",
        "moving",
        "nbytes",
        "owner",
        "pins",
        "ready",
        "since_s",
        "slot",
    )

    def __init__(self, key: K, slot: int, owner: "Entries[K]") -> None:
        self.key = key
        self.slot = slot
        self.owner = owner
        """The tenant that it is counted for, and in whose order it is evicted."""
        self.ready = False
        """Committed: the slot's bytes are final."""
        self.pins = 0
        """Readers that rely on the bytes; a pinned slot is never given to another key."""
        self.moving = False
        """Its bytes are being copied to another slot: this one is given to nobody else meanwhile."""
        self.nbytes = 0
        self.checksum = 0
        self.generation = 0
        """The generation of the slot's content, where the owner of the slots counts it."""
        self.since_s = 0.0
        """When it was committed, by the clock of whoever commits."""
        self._writing = True
        """Prepared, and neither committed nor aborted yet."""
        self._visible = True
        """Found under its key. False after discard; the slot is freed by the last holder."""
        self._parked = False
        """Was chosen as a victim while pinned; the policy gets it back at the last unpin."""

    @property
    def is_at_rest(self) -> bool:
        """Committed, found under its key, and used by nobody at the moment: it may be copied to another slot."""
        return self.ready and self._visible and not self.pins and not self.moving


class Entries(Generic[K]):
    """Keys with slots: evicts, pins, and keeps slots of discarded keys until their last holder is gone.

    An entry is being written (from `enter` to `commit` or `abort`), then ready. Pins, commit and
    abort go by entry, not by key, because a key that was discarded may be entered again in another
    slot while the old one is still held.

    Not thread-safe: the owner's lock guards all of it. Every method is O(1) beside what the policy takes,
    about 1 us or less, unless it says otherwise.
    """

    def __init__(
        self,
        policy: EvictionPolicy[K],
        free: Callable[[Entry[K]], None],
        visible: dict[K, Entry[K]] | None = None,
    ) -> None:
        """
        :param policy: empty; owned from now on.
        :param free: told of each entry whose slot nobody holds any more.
        :param visible: where entries are found by their keys; several may share one.
        """
        self._policy = policy
        """Exactly the entries that are visible, ready and not parked."""
        self._old: OrderedDict[K, None] = OrderedDict()
        """Keys that the policy would evict next, but for young ones and pinned ones before them: those that were looked
        at, and were not used since. All are in the policy; some may be pinned."""
        self._young_from_s = -math.inf
        """What was committed before that may not go, or is behind too many that may not: a look has found nothing."""
        self._free = free
        self._visible: dict[K, Entry[K]] = {} if visible is None else visible
        """The visible entries by key, those of others too where it is shared."""
        self._num_visible = 0
        """Number of visible entries of this owner."""
        self._num_ready = 0
        """Number of visible, ready entries."""
        self._ready_bytes = 0
        """Sum of their `nbytes`."""

    def __len__(self) -> int:
        """Number of visible entries, ready or being written."""
        return self._num_visible

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
        return self._visible.get(key)

    def enter(self, key: K, slot: int) -> Entry[K]:
        """An entry that is being written, for a key that is not there, in a slot that the caller has taken."""
        entry = self._visible[key] = Entry(key, slot, self)
        self._num_visible += 1
        return entry

    def commit(
        self, entry: Entry[K], *, nbytes: int, checksum: int = 0, now_s: float = 0.0, use: Use[K] = UNKNOWN_USE
    ) -> bool:
        """Makes an entry ready. False when its key was discarded meanwhile: the slot is free again."""
        self._end_writing(entry)
        if not entry._visible:
            self._free(entry)
            return False
        entry.nbytes = nbytes
        entry.checksum = checksum
        entry.since_s = now_s
        entry.ready = True
        self._num_ready += 1
        self._ready_bytes += nbytes
        self._policy.insert(entry.key, use)
        return True

    def abort(self, entry: Entry[K]) -> None:
        """Gives back an entry that was not committed."""
        self._end_writing(entry)
        if entry._visible:
            self._visible.pop(entry.key, None)  # which is empty after all was forgotten at once
            self._num_visible -= 1
            entry._visible = False
        self._free(entry)

    def pin(self, key: K) -> Entry[K] | None:
        """Holds a ready entry's bytes until `unpin`. None when the key is absent or being written. Not a use."""
        entry = self._visible.get(key)
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
        if entry.since_s < self._young_from_s:
            self._young_from_s = entry.since_s
        if not entry._visible:
            if not entry.moving:
                self._free(entry)
        elif entry._parked:
            entry._parked = False
            self._policy.insert(entry.key, Use(nbytes=entry.nbytes))

    def touch(self, key: K, use: Use[K] = UNKNOWN_USE) -> None:
        """Notes a use. Ignores keys that are absent or being written."""
        entry = self._visible.get(key)
        if entry is not None:
            self.note_use(entry, use)

    def note_use(self, entry: Entry[K], use: Use[K]) -> None:
        """`touch` of an entry that was found."""
        if entry.ready and not entry._parked:
            self._policy.touch(entry.key, use)
            if self._old:
                self._old.pop(entry.key, None)

    def coldest(self, most: int) -> list[K]:
        """Ready keys that would be evicted first, pinned ones among them, at most so many. O(most)."""
        return self._policy.coldest(most)

    def discard(self, key: K) -> bool:
        """Hides a key at once and frees its slot as soon as nobody holds it. False when it is not there."""
        entry = self._visible.get(key)
        if entry is None:
            return False
        self.forget(entry)
        return True

    def forget(self, entry: Entry[K], *, evicted: bool = False) -> None:
        """`discard` of a visible entry. `evicted`: its room was needed."""
        if entry._parked:  # the policy may remember it, as one that was evicted
            self._policy.insert(entry.key, UNKNOWN_USE)
        if entry.ready:
            self._take_out(entry.key, evicted=evicted)
        self._hide(entry)

    def are_all_young(self, young_s: float) -> bool:
        """Whether `evict` has found nothing that was committed until `young_s`, and would find nothing now."""
        return young_s < self._young_from_s

    def evict(self, young_s: float = math.inf) -> Entry[K] | None:
        """Forgets the policy's first victim that may go and returns it; its slot is free, or will be when it has moved.

        Pinned ones may not, nor may those that were committed after `young_s`. None when nothing may go, or nothing
        among the first 1024. Amortised O(1) where fewer than 768 young ones are in the way: a pinned one is met once
        per pin, and young ones stay in their places while those behind them are evicted. A look that found nothing
        is not repeated until the oldest of what was looked at may go.
        """
        while coldest := self._policy.coldest(1):
            (key,) = coldest
            entry = self._visible[key]
            if entry.pins:
                self._take_out(key, evicted=True)
                entry._parked = True
                continue
            victim: Entry[K] | None = entry
            if entry.since_s > young_s:
                victim = self._next_old() or (None if self.are_all_young(young_s) else self._look_for_old(young_s))
            if victim is not None:
                self.forget(victim, evicted=True)
            return victim
        return None

    def end_move(self, entry: Entry[K]) -> bool:
        """The bytes of an entry were copied. True when it may have its new slot: nobody uses the old one.

        Frees the old slot of an entry that was forgotten meanwhile.
        """
        entry.moving = False
        if entry._visible:
            return not entry.pins
        if not entry.pins:
            self._free(entry)
        return False

    def check_held(self, held: Iterable[Entry[K]]) -> None:
        """Verifies the bookkeeping; raises `InvariantError`. O(entries).

        :param held: every entry of this owner that holds a slot, visible or not, once.
        """
        visible: list[Entry[K]] = []
        for entry in held:
            slot = entry.slot
            found = self._visible.get(entry.key)
            _require(entry.owner is self, f"slot {slot} is another owner's")
            _require(entry._visible == (found is entry), f"slot {slot}: visible flag and key disagree")
            in_use = entry.pins > 0 or entry._writing or entry.moving
            _require(entry._visible or in_use, f"slot {slot} leaked")
            _require(entry.ready != entry._writing, f"slot {slot} is neither written nor being written")
            _require(not (entry.pins or entry.moving) or entry.ready, f"slot {slot} is pinned before commit")
            _require(entry.pins >= 0 and (entry.pins > 0 or not entry._parked), f"slot {slot}: bad pins")
            evictable = entry._visible and entry.ready and not entry._parked
            _require(not evictable or entry.key in self._policy, f"slot {slot} is unknown to the policy")
            if entry._visible:
                visible.append(entry)
        _require(len(visible) == self._num_visible, "a key has no slot")
        _require(all(key in self._policy for key in self._old), "a block is to be evicted that is gone")
        evictable_count = sum(entry.ready and not entry._parked for entry in visible)
        _require(evictable_count == len(self._policy), "the policy knows a key too many")
        _require(self._num_ready == sum(e.ready for e in visible), "ready entries are miscounted")
        _require(self._ready_bytes == sum(e.nbytes for e in visible if e.ready), "ready bytes are off")

    def _next_old(self) -> Entry[K] | None:
        """The first victim behind young ones, among those that were looked at."""
        while self._old:
            key, _ = self._old.popitem(last=False)
            entry = self._visible[key]
            if not entry.pins:
                return entry
        return None

    def _look_for_old(self, young_s: float) -> Entry[K] | None:
        """`_next_old` after a look at more and more of the coldest, until a quarter may go: so each look pays off."""
        most = _FIRST_LOOK
        while True:
            keys = self._policy.coldest(most)
            entries = [self._visible[key] for key in keys]
            old = [entry.key for entry in entries if entry.since_s <= young_s and not entry.pins]
            is_all = most >= _MOST_PASSED or len(keys) == len(self._policy)
            if is_all or (old and 4 * len(old) >= len(keys)):
                self._old = OrderedDict.fromkeys(old)
                if not old:
                    self._young_from_s = min((e.since_s for e in entries if not e.pins), default=-math.inf)
                return self._next_old()
            most = min(4 * most, _MOST_PASSED)

    def _take_out(self, key: K, *, evicted: bool) -> None:
        """The policy no longer has this key."""
        self._policy.remove(key, evicted=evicted)
        self._old.pop(key, None)

    def _hide(self, entry: Entry[K]) -> None:
        """Makes a visible entry invisible; the policy has lost it already."""
        del self._visible[entry.key]
        self._num_visible -= 1
        entry._visible = False
        entry._parked = False
        if entry.ready:
            self._num_ready -= 1
            self._ready_bytes -= entry.nbytes
            if not entry.pins and not entry.moving:
                self._free(entry)

    def _end_writing(self, entry: Entry[K]) -> None:
        if not entry._writing:
            raise InvalidInputError(f"slot {entry.slot} is not being written: commit or abort it once")
        entry._writing = False


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(f"slot index: {message}")
