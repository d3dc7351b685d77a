"""A policy that learns from the traffic which blocks are worth their room.

The method is that of Beckmann, Chen, Cidon: LHD: improving cache hit rate by maximizing hit density (NSDI 2018). What
differs: a rank is the Gittins index of the learned rates, and only a block that no cached block continues may go.
"""

from collections import OrderedDict
from itertools import islice
from typing import Generic

from kvtier.policies.base import K, Use
from kvtier.policies.block_classes import NEXT_USE, BlockClasses
from kvtier.policies.candidates import NO_SLOT, Candidates
from kvtier.policies.evidence import BUCKET, LAST, OLDEST
from kvtier.policies.ghosts import NO_GHOST, Ghosts, mixed_hash
from kvtier.policies.lru_shadow import TICKS_PER_EPOCH, LRUShadow, uses_per_tick

_STEP = 8
"""Uses between two steps of upkeep."""
_GHOSTS_PER_BLOCK = 6
_KIND_BITS = 9
_KIND = (1 << _KIND_BITS) - 1
_TICK = (1 << 31) - 1


class Learned(Generic[K]):
    """Evicts the block whose room is worth least, by what became of blocks that were used alike.

    Blocks are of one class when they have as many uses (1, 2, more), are as far from the start and the end of their
    request, and as much of it was found. For each class and age the policy learns the rate of uses, from cached blocks
    and from a bounded number of evicted ones. A block is worth the highest rate of uses that keeping it for some time
    gives. Only blocks without a cached continuation are candidates: a chain goes from its tail on.

    It counts what LRU would have had, and evicts as LRU does while what it learned has not proved to be better: see
    `LRUShadow`. Then what is used longest ago goes first, whether a cached block continues it or not.

    Keys that are bytes or numbers: the same calls have the same answers in every process. A use of which nothing is
    known (`UNKNOWN_USE`) leaves a block in its place. A block that was removed as evicted and comes back, as one that
    was pinned when its turn came, goes on where it was, but for the use; discarded, it is new.

    Amortised O(1): 4 to 9 us a use, evictions included, where LRU takes 0.5 to 1 us (busy machine). As with LRU, a call
    in some ten thousand makes the table of keys anew: 10 ms with 100,000 blocks. `coldest` of many is O(most log n).
    About 250 bytes a block, and its key; ghosts are 8 bytes each, six for each block of the capacity.
    """

    def __init__(self, num_blocks: int | None = None) -> None:
        """
        :param num_blocks: the capacity. None: it is taken to be the number of blocks at the first eviction, and nothing
            is learned before. One that proves to be wrong by a factor of two is corrected.
        """
        self._num_blocks = num_blocks or 0
        """0 until it is known. All fields: guarded by the owner's lock."""
        self._slots: OrderedDict[K, int] = OrderedDict()
        """The place of each block in the columns; the block that was used longest ago comes first."""
        self._keys: list[K] = []
        """The key of the block in each slot. The next six fields go by slot as well."""
        self._ticks: list[int] = []
        """The time of its last use."""
        self._hashes: list[int] = []
        """The number by which it is remembered."""
        self._parents: list[int] = []
        """The slot of the block before it, as far as it is known."""
        self._num_children: list[int] = []
        """Cached blocks that continue it, as far as is known. A block that has none is in a list of `_candidates`."""
        self._depths: list[int] = []
        """Larger than that of the parent, so that no chain is a ring."""
        self._candidates = Candidates()
        self._free: list[int] = []
        """Slots that are to be used again."""
        self._classes = BlockClasses()
        self._gone = self._classes.gone
        """The segment of a removed block that has children: its slot becomes free after they are gone."""
        self._below = NO_SLOT
        """The block of the last use, its parent, its position and the length of its request."""
        self._below_parent: K | None = None
        self._below_position = self._below_length = 0
        self._gone_in_run: set[K] = set()
        """Blocks that were evicted since the request began that is used now: they were there before it."""
        self._ghosts = Ghosts(num_blocks * _GHOSTS_PER_BLOCK) if num_blocks else None
        """Class and last use of evicted blocks; None until the capacity is known."""
        self._shadow = LRUShadow(num_blocks or None)
        """It says when to evict as LRU does, and has the time."""
        self._most = 0
        """Blocks there were at a time in this epoch."""
        self._has_evicted = False
        """Whether a block was evicted in this epoch."""
        self._tick_uses = uses_per_tick(self._num_blocks)
        """Uses in this tick; those until its end; those until the next class is learned; and until the next steps."""
        self._until_tick = self._tick_uses
        self._until_learning = 0
        self._until_upkeep = _STEP
        self._step_uses = self._until_step = min(_STEP, self._tick_uses)

    def insert(self, key: K, use: Use[K]) -> None:
        uses, last = -1, -1
        mixed = mixed_hash(key)
        if self._ghosts is not None:
            ghost = self._ghosts.take(mixed)
            if ghost != NO_GHOST:
                uses, last = NEXT_USE[ghost & _KIND], self._end(ghost, True)
        if self._free:
            slot = self._free.pop()
            self._keys[slot] = key
            self._parents[slot] = NO_SLOT
            self._num_children[slot] = 0
            self._hashes[slot] = mixed
        else:
            slot = len(self._keys)
            self._keys.append(key)
            self._parents.append(NO_SLOT)
            self._num_children.append(0)
            self._depths.append(0)
            self._ticks.append(0)
            self._hashes.append(mixed)
            self._candidates.add_slot(self._gone)
        self._slots[key] = slot
        self._ticks[slot] = last
        self._use(slot, key, use, uses, False)

    def touch(self, key: K, use: Use[K]) -> None:
        slots = self._slots
        slot = slots[key]
        slots.move_to_end(key)
        segment = self._candidates.segments[slot]
        known, cohort = segment.known, segment.cohort
        if cohort.num_waiting:
            cohort.num_waiting -= 1
            age = self._classes.epoch - cohort.epoch
            known.hits[BUCKET[age] if age < OLDEST else LAST] += 1.0
        if not self._num_children[slot]:
            self._candidates.unlist(slot)
        self._use(slot, key, use, NEXT_USE[known.kind], True)

    def remove(self, key: K, *, evicted: bool) -> None:
        slot = self._slots.pop(key)
        segments = self._candidates.segments
        segment = segments[slot]
        parent = self._parents[slot]
        if self._num_children[slot]:
            segments[slot] = self._gone
            if parent >= 0:
                self._orphan(slot)
        else:
            self._free.append(slot)
            if parent >= 0 and self._num_children[parent] == 1 and segments[parent] is segment:
                self._num_children[parent] = 0
                self._candidates.replace(slot, parent)
            else:
                self._candidates.unlist(slot)
                if parent >= 0:
                    self._orphan(slot)
        if slot == self._below:
            self._below = NO_SLOT
        if not evicted:
            segment.cohort.num_waiting = max(segment.cohort.num_waiting - 1, 0)
            self._shadow.discard(self._ticks[slot])
            return
        self._has_evicted = True
        self._gone_in_run.add(key)
        if self._ghosts is None or len(self._slots) >= 2 * self._num_blocks:
            self._ghosts = self._ghosts_for(len(self._slots) + 1)
        value = (self._ticks[slot] & _TICK) << _KIND_BITS | segment.known.kind
        forgotten = self._ghosts.swap(self._hashes[slot], value)
        if forgotten != NO_GHOST:
            self._end(forgotten, False)

    def coldest(self, most: int) -> list[K]:
        if not self._shadow.is_trusted:
            return list(islice(self._slots, most))
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

    def _use(self, slot: int, key: K, use: Use[K], uses: int, was_there: bool) -> None:
        """Files a block that is in no list as used now.

        `uses`: the first class of blocks with as many uses; -1: it is new. `was_there`: it is not inserted now.
        """
        parent_key, position, num_blocks, _, _, _ = use
        parents, below = self._parents, self._below
        has_children = self._num_children[slot]
        if not has_children and parents[slot] < 0:
            self._depths[slot] = position
        if below >= 0 and (
            self._below_parent == key
            if self._below_parent is not None
            else self._below_position == position + 1 and self._below_length == num_blocks
        ):
            if parents[below] != slot and self._depths[slot] < self._depths[below]:
                if parents[below] >= 0:
                    self._orphan(below)
                parents[below] = slot
                has_children += 1
                self._num_children[slot] = has_children
        else:
            self._begin_run(num_blocks)
        shadow, ticks = self._shadow, self._ticks
        shadow.use(ticks[slot], was_there or key in self._gone_in_run)
        ticks[slot] = shadow.tick
        segment = self._classes.segment(use, uses)
        self._candidates.segments[slot] = segment
        if self._ghosts is not None:
            segment.cohort.num_waiting += 1
        self._below = slot
        self._below_parent = parent_key
        self._below_position = position
        self._below_length = num_blocks
        if parent_key is not None and parents[slot] < 0 and parent_key in self._slots:
            self._link(slot, self._slots[parent_key])
        if not has_children:
            self._candidates.list_last(slot)
        self._until_step -= 1
        if not self._until_step:
            self._step()

    def _begin_run(self, num_blocks: int) -> None:
        """The block that is used now does not continue the request of the one before."""
        self._shadow.begin_run()
        if self._gone_in_run:
            self._gone_in_run.clear()
        self._classes.note_length(num_blocks)

    def _link(self, slot: int, parent: int) -> None:
        """Gives a block that is in no list its parent, which is there."""
        if self._depths[parent] < self._depths[slot]:
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

    def _end(self, ghost: int, is_hit: bool) -> int:
        """A remembered block was used again, or is forgotten. Returns the tick of its last use."""
        now = self._shadow.tick
        last = now - ((now - (ghost >> _KIND_BITS)) & _TICK)
        self._classes.end(ghost & _KIND, last // TICKS_PER_EPOCH, is_hit)
        return last

    def _step(self) -> None:
        """Ends a tick, ranks two segments again, or learns one class, where it is time to."""
        step = self._step_uses
        self._until_step = step
        self._until_tick -= step
        if self._until_tick <= 0:
            self._end_tick()
        self._until_upkeep -= step
        if self._until_upkeep > 0:
            return
        self._until_upkeep = _STEP
        self._candidates.rank_some(2, 2 * _STEP)
        self._until_learning -= _STEP
        if self._ghosts is not None and self._until_learning <= 0:
            self._until_learning = self._classes.learn_next(self._num_blocks)

    def _end_tick(self) -> None:
        self._most = max(self._most, len(self._slots))
        self._shadow.next_tick(self._tick_uses)
        if self._shadow.tick % TICKS_PER_EPOCH == 0:
            self._begin_epoch()
        uses = uses_per_tick(self._num_blocks or len(self._slots))
        self._step_uses = self._until_step = min(_STEP, uses)
        self._tick_uses = self._until_tick = uses - uses % self._step_uses

    def _begin_epoch(self) -> None:
        if self._has_evicted and 2 * self._most < self._num_blocks:
            self._ghosts = self._ghosts_for(self._most)
        self._classes.begin_epoch()
        self._candidates.epoch = self._classes.epoch
        self._most, self._has_evicted = 0, False

    def _ghosts_for(self, num_blocks: int) -> Ghosts:
        """New ones for another capacity; those before are forgotten."""
        self._num_blocks = num_blocks
        self._shadow.set_capacity(num_blocks)
        return Ghosts(num_blocks * _GHOSTS_PER_BLOCK)
