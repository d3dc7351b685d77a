"""A policy that learns from the traffic which blocks are worth their room.

The method is that of Beckmann, Chen, Cidon: LHD: improving cache hit rate by maximizing hit density (NSDI 2018). What
differs: a rank is the Gittins index of the learned rates, and only a block that no cached block continues may go.
"""

from typing import Any, Generic

from kvtier.policies.base import K, Use
from kvtier.policies.block_classes import NEW, NEXT_USE, BlockClasses, kind_of, shift_of
from kvtier.policies.chains import Chains
from kvtier.policies.evidence import BUCKET, LAST, OLDEST
from kvtier.policies.ghosts import Ghosts, mixed_hash
from kvtier.policies.lru_shadow import TICKS_PER_EPOCH, LRUShadow, uses_per_tick
from kvtier.policies.use_order import NO_SLOT, UseOrder, length_at_first

_STEP = 8
"""Uses between two steps of upkeep."""
_GHOSTS_PER_BLOCK = 6
_NUM_TABLES = 64
_TABLE = _NUM_TABLES - 1


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

    Amortised O(1): 3 to 8 us a use, evictions included, where LRU takes 0.5 to 1 us (busy machine). No call takes a
    millisecond with 100,000 blocks, but for the garbage collector, which may run in any call: it has to look at two
    objects for each class and epoch, and at none for each block. `coldest` of many is O(most log n).
    About 250 bytes a block, and its key; ghosts are 8 bytes each, six for each block of the capacity.
    """

    def __init__(self, num_blocks: int | None = None) -> None:
        """
        :param num_blocks: the capacity. None: it is taken to be the number of blocks at the first eviction, and nothing
            is learned before. One that proves to be wrong by a factor of two is corrected.
        """
        self._num_blocks = num_blocks or 0
        """0 until it is known. All fields: guarded by the owner's lock."""
        self._tables: list[dict[K, int]] = [{} for _ in range(_NUM_TABLES)]
        """The place of each block in the columns, in one of the tables by the key's hash: a single one would take
        milliseconds when it is made anew as it grows."""
        self._order = UseOrder()
        self._keys: list[Any] = [None]
        """The key of the block in each slot. The next two go by slot as well."""
        self._ticks = [0] * length_at_first(9)
        """The time of its last use."""
        self._hashes = [0] * length_at_first(10)
        """The number by which it is remembered."""
        self._classes = BlockClasses()
        self._chains = Chains(self._classes.gone)
        self._candidates = self._chains.candidates
        self._segments = self._candidates.segments
        """The parts of `_chains` that are used most."""
        self._below = NO_SLOT
        """The block of the last use, and the one that should be used next, where that is told."""
        self._next_key: K | None = None
        self._below_position = self._below_length = 0
        """Kept where that is not told: the place of the last use in its request, and the request's length."""
        self._shift = self._priority = self._nbytes = 0
        """What priority and size of the last use add to a level, and the two."""
        self._gone_in_run: set[K] = set()
        """Blocks that were evicted since the request began that is used now: they were there before it."""
        self._ghosts = Ghosts(num_blocks * _GHOSTS_PER_BLOCK, 0) if num_blocks else None
        """Class and last use of evicted blocks; None until the capacity is known."""
        self._shadow = LRUShadow(num_blocks or None)
        """It says when to evict as LRU does, and has the time."""
        self._most = 0
        """Blocks there were at a time in this epoch."""
        self._has_evicted = False
        """Whether a block was evicted in this epoch."""
        uses = uses_per_tick(self._num_blocks)
        self._step_uses = self._until_step = min(_STEP, uses)
        """Uses from one step to the next, and until the next one."""
        self._tick_uses = self._until_tick = -(-uses // self._step_uses) * self._step_uses
        """Uses in this tick; those until its end; those until the next class is learned; and until the next upkeep."""
        self._until_learning = 0
        self._until_upkeep = _STEP

    def insert(self, key: K, use: Use[K]) -> None:
        uses, last = NEW, -1
        mixed = mixed_hash(key)
        ghosts = self._ghosts
        if ghosts is not None:
            kind = ghosts.take(mixed)
            if kind >= 0:
                uses, last = NEXT_USE[kind], ghosts.tick
                self._classes.end(kind, last // TICKS_PER_EPOCH, True)
        free = self._chains.free
        slot = free.pop() if free else self._add_slot()
        self._keys[slot] = key
        self._hashes[slot] = mixed
        self._tables[hash(key) & _TABLE][key] = slot
        self._order.append(slot)
        self._use(slot, key, use, uses, last, False)

    def touch(self, key: K, use: Use[K]) -> None:
        slot = self._tables[hash(key) & _TABLE][key]
        self._order.renew(slot)
        segment = self._segments[slot]
        known, cohort = segment.known, segment.cohort
        if cohort.num_waiting:
            cohort.num_waiting -= 1
            age = self._classes.epoch - cohort.epoch
            known.hits[BUCKET[age] if age < OLDEST else LAST] += 1.0
        if not self._chains.num_children[slot]:
            self._candidates.unlist(slot)
        self._use(slot, key, use, NEXT_USE[known.kind], self._ticks[slot], True)

    def remove(self, key: K, *, evicted: bool) -> None:
        slot = self._tables[hash(key) & _TABLE].pop(key)
        self._order.remove(slot)
        segment = self._segments[slot]
        self._chains.remove(slot)
        if slot == self._below:
            self._below, self._next_key = NO_SLOT, None
        if not evicted:
            segment.cohort.num_waiting = max(segment.cohort.num_waiting - 1, 0)
            self._shadow.discard(self._ticks[slot])
            return
        self._gone_in_run.add(key)
        ghosts = self._ghosts
        if not self._has_evicted:
            self._has_evicted = True
            ghosts = self._ghosts_that_fit()
        assert ghosts is not None
        kind = ghosts.swap(self._hashes[slot], segment.known.kind, self._ticks[slot])
        if kind >= 0:
            self._classes.end(kind, ghosts.tick // TICKS_PER_EPOCH, False)

    def coldest(self, most: int) -> list[K]:
        if not self._shadow.is_trusted:
            return [self._keys[slot] for slot in self._order.oldest(most)]
        candidates = self._candidates
        if most == 1:
            top = candidates.top
            slot = top.first if top is not None and top.first else candidates.coldest()
            return [self._keys[slot]] if slot else []
        levels = candidates.levels()
        taken: list[int] = []
        # Blocks leave their lists as if they were evicted. Going back, each finds its neighbours as it left them.
        while len(taken) < most and (slot := candidates.coldest()):
            taken.append(slot)
            candidates.unlist(slot)
            self._chains.leave_parent(slot)
        for slot in reversed(taken):
            self._chains.back_to_parent(slot)
            candidates.relist(slot)
        candidates.restore_levels(levels)
        return [self._keys[slot] for slot in taken]

    def __len__(self) -> int:
        return len(self._keys) - 1 - len(self._chains.free) - self._chains.num_gone

    def __contains__(self, key: object) -> bool:
        return key in self._tables[hash(key) & _TABLE]

    def _add_slot(self) -> int:
        self._keys.append(None)
        self._hashes.append(0)
        self._ticks.append(0)
        self._order.add_slot()
        self._chains.add_slot()
        return len(self._keys) - 1

    def _use(self, slot: int, key: K, use: Use[K], uses: int, last: int, was_there: bool) -> None:
        """Files a block that is in no list as used now.

        `uses`: the first class of blocks with as many uses, or `NEW`. `last`: the tick of the use before; -1: unknown.
        `was_there`: it is not inserted now.
        """
        parent_key, position, num_blocks, num_hits, priority, nbytes = use
        chains = self._chains
        parents, num_children = chains.parents, chains.num_children
        if not parents[slot] and not num_children[slot]:
            chains.depths[slot] = position
        if key == self._next_key or self._is_next(position, num_blocks):
            below = self._below
            if parents[below] or chains.depths[slot] >= chains.depths[below]:
                chains.continue_with(slot, below)
            else:
                parents[below] = slot
                num_children[slot] += 1
        else:
            self._begin_run(num_blocks)
        if last >= 0 or key in self._gone_in_run:
            self._shadow.use(last, was_there or key in self._gone_in_run)
        self._ticks[slot] = self._shadow.tick
        if nbytes != self._nbytes or priority != self._priority:
            self._nbytes, self._priority, self._shift = nbytes, priority, shift_of(priority, nbytes)
        kind = kind_of(uses, position, num_blocks, num_hits)
        classes = self._classes
        segment = classes.newest[kind]
        if segment.epoch != classes.epoch or segment.shift != self._shift:
            segment = classes.segment(kind, self._shift)
        self._segments[slot] = segment
        if self._ghosts is not None:
            segment.cohort.num_waiting += 1
        self._below, self._next_key = slot, parent_key
        if parent_key is None:
            self._below_position, self._below_length = position, num_blocks
        elif (
            not parents[slot]
            # A parent that the request did not find need not be looked for: it is used next.
            and not 0 <= num_hits < position
            and (parent := self._tables[hash(parent_key) & _TABLE].get(parent_key, NO_SLOT))
        ):
            chains.begin(slot, parent)
        if not num_children[slot]:
            self._candidates.list_last(slot)
        self._until_step -= 1
        if not self._until_step:
            self._step()

    def _is_next(self, position: int, num_blocks: int) -> bool:
        """Whether a block is next to the one that was used last, as far as their places tell where keys do not."""
        return (
            self._next_key is None
            and self._below != NO_SLOT
            and self._below_position == position + 1
            and self._below_length == num_blocks
        )

    def _begin_run(self, num_blocks: int) -> None:
        """The block that is used now does not continue the request of the one before."""
        self._shadow.begin_run()
        if self._gone_in_run:
            self._gone_in_run.clear()
        self._classes.note_length(num_blocks)

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
        self._most = max(self._most, len(self))
        self._shadow.next_tick(self._tick_uses)
        if self._shadow.tick % TICKS_PER_EPOCH == 0:
            self._begin_epoch()
        uses = uses_per_tick(self._num_blocks or len(self))
        self._step_uses = self._until_step = min(_STEP, uses)
        self._tick_uses = self._until_tick = uses - uses % self._step_uses

    def _begin_epoch(self) -> None:
        if self._has_evicted and 2 * self._most < self._num_blocks:
            self._ghosts = self._ghosts_for(self._most)
        elif self._ghosts is not None and not self._ghosts.lasts_until(self._shadow.tick + TICKS_PER_EPOCH):
            self._ghosts = self._ghosts_for(self._num_blocks)
        self._classes.begin_epoch()
        self._candidates.epoch = self._classes.epoch
        self._most, self._has_evicted = 0, False

    def _ghosts_that_fit(self) -> Ghosts:
        """Returns the ghosts, after an eviction: new ones where the capacity is not what it was taken for."""
        num_blocks = len(self) + 1
        if self._ghosts is None or num_blocks > 2 * self._num_blocks:
            self._ghosts = self._ghosts_for(num_blocks)
        return self._ghosts

    def _ghosts_for(self, num_blocks: int) -> Ghosts:
        """New ones for another capacity; those before are forgotten."""
        self._num_blocks = num_blocks
        self._shadow.set_capacity(num_blocks)
        return Ghosts(num_blocks * _GHOSTS_PER_BLOCK, self._shadow.tick + TICKS_PER_EPOCH)
