"""BlockPool: slot allocator and prefix cache of the device tier.

The shape is vLLM V1's (`vllm/v1/core/block_pool.py`, `kv_cache_utils.py`, 0.8 and later), for its zero
overhead at zero hits: preallocated block objects, an intrusive doubly linked free queue with sentinels,
reference counts, a map from key to block. The code is our own.

Life of a block:  free, no key -> allocated -> full, keyed -> freed, still findable -> evicted and reused
                                                        ^---- a hit takes it out of the queue

Scheduler thread only: there are no locks here.
"""

from collections.abc import Callable, Sequence

from kvtier.errors import InvalidInputError, InvariantError
from kvtier.identity.keys import BlockKey

EvictionCallback = Callable[[BlockKey, int], None]
"""Called with (chain hash, block id) when a free keyed block loses its key to a new owner. The bytes
are still in place during the call and may be overwritten after it. Must not block or call the pool."""


class _Block:
    """One block of device memory. `previous` and `next` are set exactly while it is in the free queue."""

    __slots__ = ("block_id", "key", "next", "previous", "references")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.key: BlockKey | None = None
        self.references = 0
        self.previous: _Block | None = None
        self.next: _Block | None = None


class BlockPool:
    """Hands out device blocks by id and finds the ones that hold a known prefix.

    Eviction order is the free queue, head first: blocks freed longest ago go first, and of one chain
    the end goes before its beginning, because `free` queues a chain in reverse.

    All methods are for the scheduler thread and none blocks; each costs O(1) per block.
    """

    def __init__(self, num_blocks: int, *, on_evict: EvictionCallback | None = None) -> None:
        """
        One object per block for the life of the pool: a service should `gc.freeze()` when it is built, or
        every full collection walks a million of them (130 ms).

        :param num_blocks: blocks of device memory, ids 0 to num_blocks - 1.
        :param on_evict: the spill callback.
        """
        if num_blocks < 1:
            raise InvalidInputError(f"num_blocks {num_blocks}: a block pool needs at least 1")
        self._on_evict = on_evict
        self._blocks = [_Block(i) for i in range(num_blocks)]
        self._by_key: dict[BlockKey, _Block] = {}
        self._head = _Block(-1)
        self._tail = _Block(-2)
        self._head.next, self._tail.previous = self._tail, self._head
        self._num_free = 0
        for block in self._blocks:
            self._insert_before(self._tail, block)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        """Blocks that nobody references, cached ones included."""
        return self._num_free

    def __contains__(self, key: BlockKey) -> bool:
        """Whether a block with this key is on the device."""
        return key in self._by_key

    def match_prefix(self, keys: Sequence[BlockKey]) -> list[int]:
        """Block ids of the leading run of `keys` that is on the device. Takes no reference."""
        ids: list[int] = []
        by_key = self._by_key
        for key in keys:
            block = by_key.get(key)
            if block is None:
                break
            ids.append(block.block_id)
        return ids

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Takes one more reference on each block; one that was free leaves the free queue and keeps its bytes."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.references == 0:
                self._unlink(block)
            block.references += 1

    def is_shared(self, block_id: int) -> bool:
        """Whether more than one reference is on a block: then none of its owners may write to it."""
        return self._blocks[block_id].references > 1

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Takes `num_blocks` from the head of the free queue, one reference each; None when there are fewer.

        A taken block that still had a key loses it, after `on_evict`. Its bytes are undefined.
        """
        if num_blocks > self._num_free:
            return None
        ids: list[int] = []
        sentinel, tail = self._head, self._tail
        block = sentinel.next
        for _ in range(num_blocks):
            assert block is not None
            assert block is not tail
            following = block.next
            if block.key is not None:
                self._evict(block)
            block.references = 1
            block.previous = block.next = None
            ids.append(block.block_id)
            block = following
        if block is not None and num_blocks:
            sentinel.next, block.previous = block, sentinel
        self._num_free -= num_blocks
        return ids

    def assign_key(self, block_id: int, key: BlockKey) -> None:
        """Publishes a full block under its chain hash. The owner must hold a reference.

        When another block holds the same hash already, that one stays the findable one: block tables
        must not change under running requests, so both live and this one is private.
        """
        block = self._blocks[block_id]
        if block.references == 0:
            raise InvalidInputError(f"block {block_id} is free: only its owner may give it a key")
        if block.key is not None and block.key != key:
            raise InvalidInputError(f"block {block_id} has another key already")
        if key not in self._by_key:
            self._by_key[key] = block
            block.key = key

    def free(self, block_ids: Sequence[int], *, cold: bool = False) -> None:
        """Gives back one reference on each block of a chain, given in chain order.

        Blocks without references stay findable until they are reused. They join the tail of the free
        queue in reverse, so that the end of a chain is evicted before its beginning.

        :param cold: put them before all other cached blocks instead (first to be evicted): for blocks
            that were only held to be copied away. O(free blocks without a key at the head) for those with a key;
            others go to the head at once.
        """
        blocks = self._blocks
        for block_id in block_ids if cold else reversed(block_ids):
            block = blocks[block_id]
            if block.references == 0:
                raise InvalidInputError(f"block {block_id} is freed once more than it was taken")
            block.references -= 1
            if block.references == 0:
                self._insert_before(self._cold_place(block) if cold else self._tail, block)

    def coldest(self, limit: int) -> list[tuple[BlockKey, int]]:
        """Returns the blocks with a key among the next `limit` to be allocated, as (chain hash, block id)."""
        found: list[tuple[BlockKey, int]] = []
        block = self._head.next
        for _ in range(min(limit, self._num_free)):
            assert block is not None
            if block.key is not None:
                found.append((block.key, block.block_id))
            block = block.next
        return found

    def free_queue(self) -> list[int]:
        """Block ids from the head (allocated next) to the tail. O(num_free): for tests and debugging."""
        ids = []
        block = self._head.next
        while block is not None and block is not self._tail:
            ids.append(block.block_id)
            block = block.next
        return ids

    def reset(self) -> int:
        """Forgets all keys, without `on_evict`; returns how many there were.

        Referenced blocks stay their owners', which may give them keys again.
        """
        num_forgotten = len(self._by_key)
        for block in self._by_key.values():
            block.key = None
        self._by_key.clear()
        return num_forgotten

    def check(self) -> None:
        """Verifies queue, counts and map against each other; raises `InvariantError`. O(num_blocks)."""
        queue = self.free_queue()
        queued = set(queue)
        if len(queue) != self._num_free or len(queued) != len(queue):
            raise InvariantError(f"free queue holds {len(queue)} blocks, counted {self._num_free}")
        for block in self._blocks:
            if (block.references == 0) != (block.block_id in queued) or block.references < 0:
                raise InvariantError(f"block {block.block_id} has {block.references} references, in queue or not")
            if block.key is not None and self._by_key.get(block.key) is not block:
                raise InvariantError(f"block {block.block_id} has a key that leads elsewhere")
        if any(block.key != key for key, block in self._by_key.items()):
            raise InvariantError("the map names a block under a key that is not its own")

    def _evict(self, block: _Block) -> None:
        assert block.key is not None
        if self._on_evict is not None:
            self._on_evict(block.key, block.block_id)
        del self._by_key[block.key]
        block.key = None

    def _cold_place(self, freed: _Block) -> _Block:
        """What a cold block goes before: the first queued one with a key, since empty ones are used up first."""
        block = self._head.next
        while freed.key is not None and block is not None and block is not self._tail and block.key is None:
            block = block.next
        assert block is not None
        return block

    def _unlink(self, block: _Block) -> None:
        assert block.previous is not None
        assert block.next is not None
        block.previous.next, block.next.previous = block.next, block.previous
        block.previous = block.next = None
        self._num_free -= 1

    def _insert_before(self, place: _Block, block: _Block) -> None:
        before = place.previous
        assert before is not None
        block.previous, block.next = before, place
        before.next = place.previous = block
        self._num_free += 1
