"""A policy that learns from the traffic which blocks are worth their room.

The method is that of Beckmann, Chen, Cidon: LHD: improving cache hit rate by maximizing hit density (NSDI 2018). What
differs: a rank is the Gittins index of the learned rates, and only a block that no cached block continues may go.
"""

from collections import deque
from typing import Generic

from kvtier.policies.base import K, Use
from kvtier.policies.candidates import NO_SLOT, Candidates, Segment
from kvtier.policies.evidence import BUCKET, LAST, LEVELS_PER_DOUBLING, OLDEST, BlockClass, ClassGroup, Cohort
from kvtier.policies.ghosts import NO_GHOST, Ghosts

_STEP = 8
"""Uses between two steps of upkeep."""
_LEARN_LEAST = 64
"""Uses between two classes that are learned, at least."""
_EPOCHS_PER_CAPACITY = 4
_LEAST_EPOCH = 16
_GHOSTS_PER_BLOCK = 6
_PLACES = 3 * 4 * 8
"""Classes for each count of uses: 3 kinds of request, 4 places from its start, 8 from its end."""
_UNKNOWN = 3 * _PLACES
"""The class of blocks of which nothing is known: LRU, as a chain could not be told from its blocks otherwise."""
_FROM_START = tuple(8 * min((position + 1).bit_length() >> 1, 3) for position in range(32))
_FROM_END = tuple(max(left.bit_length() - 1, 0) for left in range(256))
_NEXT_KIND = (*(min(k + _PLACES, 2 * _PLACES + k % _PLACES) for k in range(_UNKNOWN)), _UNKNOWN)
"""The class of a block with one use more."""
_KIND_BITS = 16
_KIND = (1 << _KIND_BITS) - 1
_EPOCH = (1 << 24) - 1


class Learned(Generic[K]):
    """Evicts the block whose room is worth least, by what became of blocks that were used alike.

    Blocks are of one class when they have as many uses (1, 2, more), are as far from the start and the end of their
    request, and as much of it was found. For each class and age the policy learns the rate of uses, from cached blocks
    and from a bounded number of evicted ones. A block is worth the highest rate of uses that keeping it for some time
    gives. Only blocks without a cached continuation are candidates: a chain goes from its tail on.

    Keys that are bytes or numbers: the same calls have the same answers in every process. A use of which nothing is
    known (`UNKNOWN_USE`) leaves a block in its place. A block that was removed as evicted and comes back, as one that
    was pinned when its turn came, goes on where it was, but for the use; discarded, it is new.

    Amortised O(1): 4 to 8 us a use, evictions included, where LRU takes 1 us (busy machine). `coldest` of many is
    O(most log n). About 250 bytes a block, and its key; ghosts are 8 bytes each, six for each block of the capacity.
    """

    def __init__(self, num_blocks: int | None = None) -> None:
        """
        :param num_blocks: the capacity. None: it is taken to be the number of blocks at the first eviction, and nothing
            is learned before. One that proves to be wrong by a factor of two is corrected.
        """
        self._num_blocks = num_blocks or 0
        """0 until it is known. All fields: guarded by the owner's lock."""
        self._slots: dict[K, int] = {}
        """Where the columns have each block."""
        self._keys: list[K] = []
        """The key of the block in each slot. The next four fields go by slot as well."""
        self._parents: list[int] = []
        """The slot of the block before it, as far as it is known."""
        self._num_children: list[int] = []
        """Cached blocks that continue it, as far as is known. A block that has none is in a list of `_candidates`."""
        self._depths: list[int] = []
        """Larger than that of the parent, so that no chain is a ring."""
        self._candidates = Candidates()
        self._free: list[int] = []
        """Slots that are to be used again."""
        groups: list[ClassGroup] = []
        self._groups = [ClassGroup(groups) for _ in range(4)]
        gone = Segment(BlockClass(0, ClassGroup([]), 0), Cohort(-1), 0, 0)
        self._gone = gone
        """The segment of a removed block that has children: its slot becomes free after they are gone."""
        self._classes: list[BlockClass | None] = [None] * (_UNKNOWN + 1)
        self._newest = [gone] * (_UNKNOWN + 1)
        """The segment that was last used, by class."""
        self._others: dict[tuple[int, int], Segment] = {}
        """All segments of this epoch, by class and shift."""
        self._num_segments = 0
        """Counts them all."""
        self._to_learn: deque[BlockClass] = deque()
        """Every class, the next first."""
        self._below = NO_SLOT
        """The block of the last use, its parent, its position and the length of its request."""
        self._below_parent: K | None = None
        self._below_position = self._below_length = 0
        self._ghosts = Ghosts(num_blocks * _GHOSTS_PER_BLOCK) if num_blocks else None
        """Class and epoch of evicted blocks; None until the capacity is known."""
        self._epoch = 0
        self._most = 0
        """Blocks there were at a time in this epoch."""
        self._has_evicted = False
        """Whether a block was evicted in this epoch."""
        self._until_epoch = max(self._num_blocks // _EPOCHS_PER_CAPACITY, _LEAST_EPOCH)
        """Uses until the next epoch, the next class to learn, and the next step of upkeep."""
        self._until_learning = 0
        self._until_step = _STEP

    def insert(self, key: K, use: Use[K]) -> None:
        kind = -1
        if self._ghosts is not None:
            ghost = self._ghosts.take(key)
            if ghost != NO_GHOST:
                kind = ghost & _KIND
                self._class_of(kind).end(ghost >> _KIND_BITS, self._epoch, is_hit=True)
                kind = _NEXT_KIND[kind]
        if self._free:
            slot = self._free.pop()
            self._keys[slot] = key
            self._parents[slot] = NO_SLOT
            self._num_children[slot] = 0
        else:
            slot = len(self._keys)
            self._keys.append(key)
            self._parents.append(NO_SLOT)
            self._num_children.append(0)
            self._depths.append(0)
            self._candidates.add_slot(self._gone)
        self._slots[key] = slot
        self._use(slot, key, use, kind)

    def touch(self, key: K, use: Use[K]) -> None:
        slot = self._slots[key]
        segment = self._candidates.segments[slot]
        known, cohort = segment.known, segment.cohort
        if cohort.num_waiting:
            cohort.num_waiting -= 1
            age = self._epoch - cohort.epoch
            known.hits[BUCKET[age] if age < OLDEST else LAST] += 1.0
        if not self._num_children[slot]:
            self._candidates.unlist(slot)
        self._use(slot, key, use, _NEXT_KIND[known.kind])

    def remove(self, key: K, *, evicted: bool) -> None:
        slot = self._slots.pop(key)
        segment = self._candidates.segments[slot]
        if self._num_children[slot]:
            self._candidates.segments[slot] = self._gone
        else:
            self._candidates.unlist(slot)
            self._free.append(slot)
        if self._parents[slot] >= 0:
            self._orphan(slot)
        if slot == self._below:
            self._below = NO_SLOT
        if not evicted:
            segment.cohort.num_waiting = max(segment.cohort.num_waiting - 1, 0)
            return
        self._has_evicted = True
        if self._ghosts is None or len(self._slots) >= 2 * self._num_blocks:
            self._ghosts = self._ghosts_for(len(self._slots) + 1)
        forgotten = self._ghosts.swap(key, (segment.epoch & _EPOCH) << _KIND_BITS | segment.known.kind)
        if forgotten != NO_GHOST:
            self._class_of(forgotten & _KIND).end(forgotten >> _KIND_BITS, self._epoch, is_hit=False)

    def coldest(self, most: int) -> list[K]:
        candidates = self._candidates
        if most == 1:
            slot = candidates.coldest()
            return [self._keys[slot]] if slot >= 0 else []
        levels = candidates.levels()
        taken: list[int] = []
        # Blocks leave their lists as if they were evicted. Going back, each finds its neighbours as it left them.
        while len(taken) < most and (slot := candidates.coldest()) >= 0:
            taken.append(slot)
            candidates.unlist(slot)
            self._leave_parent(slot)
        for slot in reversed(taken):
            self._back_to_parent(slot)
            candidates.relist(slot)
        candidates.restore_levels(levels)
        return [self._keys[slot] for slot in taken]

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def _use(self, slot: int, key: K, use: Use[K], kind: int) -> None:
        """Files a block that is in no list as used now. `kind`: its class by what was known before; -1: nothing."""
        parent_key, position, num_blocks, num_hits, priority, nbytes = use
        if num_blocks > 1 or num_hits >= 0:
            left = num_blocks - position
            kind = (
                (kind - kind % _PLACES if 0 <= kind < _UNKNOWN else 0)
                + (64 if num_hits * 4 >= 3 * num_blocks else 32 if num_hits > 1 else 0)
                + (_FROM_START[position] if position < 32 else 24)
                + (_FROM_END[left] if 0 <= left < 256 else 7)
            )
        elif kind < 0:
            kind = _UNKNOWN
        segment = self._newest[kind]
        shift = LEVELS_PER_DOUBLING * (priority - nbytes.bit_length()) if priority or nbytes else 0
        if segment.epoch != self._epoch or segment.shift != shift:
            segment = self._newest[kind] = self._segment_of(kind, shift)
        self._candidates.segments[slot] = segment
        if self._ghosts is not None:
            segment.cohort.num_waiting += 1
        if not self._num_children[slot] and self._parents[slot] < 0:
            self._depths[slot] = position
        self._link_below(slot, key, position, num_blocks)
        self._below, self._below_parent, self._below_position, self._below_length = (
            slot,
            parent_key,
            position,
            num_blocks,
        )
        if parent_key is not None and self._parents[slot] < 0:
            self._link(slot, parent_key)
        if not self._num_children[slot]:
            self._candidates.list_last(slot)
        self._until_step -= 1
        if not self._until_step:
            self._step()

    def _link_below(self, slot: int, key: K, position: int, num_blocks: int) -> None:
        """Makes a block that is in no list the parent of the one used before, where that one continues it.

        A parent that is unknown is taken to be the next block used, where position and length say so.
        """
        below = self._below
        if below < 0 or self._parents[below] == slot or self._depths[slot] >= self._depths[below]:
            return
        if self._below_parent is not None:
            follows = self._below_parent == key
        else:
            follows = self._below_position == position + 1 and self._below_length == num_blocks
        if follows:
            if self._parents[below] >= 0:
                self._orphan(below)
            self._parents[below] = slot
            self._num_children[slot] += 1

    def _link(self, slot: int, parent_key: K) -> None:
        """Gives a block that is in no list its parent, if that is there."""
        parent = self._slots.get(parent_key)
        if parent is not None and self._depths[parent] < self._depths[slot]:
            if not self._num_children[parent]:
                self._candidates.unlist(parent)
            self._parents[slot] = parent
            self._num_children[parent] += 1

    def _orphan(self, slot: int) -> None:
        """Takes a block from its parent."""
        parent = self._parents[slot]
        self._leave_parent(slot)
        self._parents[slot] = NO_SLOT
        if not self._num_children[parent] and self._candidates.segments[parent] is self._gone:
            self._free.append(parent)

    def _leave_parent(self, slot: int) -> None:
        """Counts it no more among its parent's children. The parent is a candidate after its last one."""
        parent = self._parents[slot]
        if parent >= 0:
            self._num_children[parent] -= 1
            if not self._num_children[parent] and self._candidates.segments[parent] is not self._gone:
                self._candidates.list_first(parent)

    def _back_to_parent(self, slot: int) -> None:
        """Undoes `_leave_parent`."""
        parent = self._parents[slot]
        if parent >= 0:
            if not self._num_children[parent] and self._candidates.segments[parent] is not self._gone:
                self._candidates.unlist(parent)
            self._num_children[parent] += 1

    def _segment_of(self, kind: int, shift: int) -> Segment:
        """The segment of this epoch."""
        segment = self._others.get((kind, shift))
        if segment is None:
            self._num_segments += 1
            known = self._class_of(kind)
            segment = Segment(known, known.cohort(self._epoch), shift, self._num_segments)
            self._others[kind, shift] = segment
        return segment

    def _class_of(self, kind: int) -> BlockClass:
        known = self._classes[kind]
        if known is None:
            group = self._groups[kind // _PLACES]
            known = self._classes[kind] = BlockClass(kind, group, self._epoch, falls=kind == _UNKNOWN)
            self._to_learn.append(known)
        return known

    def _step(self) -> None:
        """Ranks two segments again, and now and then learns one class or begins an epoch."""
        self._until_step = _STEP
        self._candidates.rank_some(2, 2 * _STEP)
        self._most = max(self._most, len(self._slots))
        self._until_learning -= _STEP
        if self._ghosts is not None and self._until_learning <= 0:
            self._to_learn[0].learn(self._epoch)
            self._to_learn.rotate(-1)
            self._until_learning = max(self._num_blocks // len(self._to_learn), _LEARN_LEAST)
        self._until_epoch -= _STEP
        if self._until_epoch <= 0:
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        if self._has_evicted and 2 * self._most < self._num_blocks:
            self._ghosts = self._ghosts_for(self._most)
        self._epoch += 1
        self._candidates.epoch = self._epoch
        self._others = {}
        self._most, self._has_evicted = 0, False
        self._until_epoch = max((self._num_blocks or len(self._slots)) // _EPOCHS_PER_CAPACITY, _LEAST_EPOCH)

    def _ghosts_for(self, num_blocks: int) -> Ghosts:
        """New ones for another capacity; those before are forgotten."""
        self._num_blocks = num_blocks
        return Ghosts(num_blocks * _GHOSTS_PER_BLOCK)
