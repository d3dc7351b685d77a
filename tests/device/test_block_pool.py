"""BlockPool against the published example, a naive model, and bad callers."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.device.block_pool import BlockPool
from kvtier.errors import InvalidInputError
from kvtier.identity.keys import BlockHasher, BlockKey, PrefixHasher, tenant_id

HASHER = BlockHasher(tenant_id("red"), PrefixHasher(bytes(32), "", 4))


def chain(text: str) -> list[BlockKey]:
    return HASHER.hash_blocks([ord(c) for c in text])


def test_published_example() -> None:
    """vLLM's prefix caching example, step by step: block size 4, 10 blocks."""
    evicted: list[int] = []
    pool = BlockPool(10, on_evict=lambda _key, block_id: evicted.append(block_id))

    prompt0 = "ABCDEFGHIJKLMNO"
    table0 = pool.allocate(4)
    assert table0 == [0, 1, 2, 3]
    for block_id, chain_hash in zip(table0, chain(prompt0), strict=False):
        pool.assign_key(block_id, chain_hash)
    assert pool.match_prefix(chain(prompt0)) == [0, 1, 2]

    generated0 = prompt0 + "PQ"  # two decode steps: block 3 is full, block 4 is taken
    pool.assign_key(3, chain(generated0)[3])
    table0 += pool.allocate(1) or []
    assert table0 == [0, 1, 2, 3, 4]

    prompt1 = "ABCDEFGHIJabcd"  # 14 tokens, the first 10 equal
    hits = pool.match_prefix(chain(prompt1))
    assert hits == [0, 1]
    pool.acquire(hits)
    table1 = hits + (pool.allocate(2) or [])
    assert table1 == [0, 1, 5, 6]
    pool.assign_key(5, chain(prompt1)[2])

    pool.free(table0)
    pool.free(table1)
    assert pool.free_queue() == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]

    prompt2 = prompt0[:12] + "abcdefghijklmnopq"  # 29 tokens, the first 12 equal
    hits = pool.match_prefix(chain(prompt2))
    assert hits == [0, 1, 2]
    pool.acquire(hits)
    assert pool.free_queue() == [7, 8, 9, 4, 3, 6, 5]
    assert pool.allocate(5) == [7, 8, 9, 4, 3]
    assert evicted == [3]
    assert pool.match_prefix(chain(generated0)) == [0, 1, 2]
    pool.check()


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.check()


def test_a_duplicate_stays_private() -> None:
    pool = BlockPool(2)
    (key,) = chain("ABCD")
    pool.allocate(2)
    pool.assign_key(0, key)
    pool.assign_key(1, key)
    assert pool.match_prefix([key]) == [0]
    pool.free([0])
    pool.free([1])
    assert pool.allocate(1) == [0]
    assert pool.match_prefix([key]) == []
    pool.check()


def test_cold_blocks_go_before_all_cached_ones() -> None:
    pool = BlockPool(4)
    keys = chain("ABCDEFGH")
    table = pool.allocate(2) or []
    for block_id, key in zip(table, keys, strict=True):
        pool.assign_key(block_id, key)
    pool.free(table)
    assert pool.free_queue() == [2, 3, 1, 0]
    assert pool.coldest(3) == [(keys[1], 1)]
    pool.acquire([1])
    pool.free([1], cold=True)
    assert pool.free_queue() == [2, 3, 1, 0], "empty blocks are used up first"
    pool.acquire([0])
    pool.free([0], cold=True)
    assert pool.free_queue() == [2, 3, 0, 1]


def test_reset_forgets_keys_and_leaves_blocks_to_their_owners() -> None:
    evicted: list[BlockKey] = []
    pool = BlockPool(4, on_evict=lambda key, _: evicted.append(key))
    keys = chain("ABCDEFGH")
    table = pool.allocate(2) or []
    for block_id, key in zip(table, keys, strict=True):
        pool.assign_key(block_id, key)
    pool.free(table[1:])
    assert pool.reset() == 2
    assert pool.match_prefix(keys) == []
    assert (pool.num_free, pool.coldest(4)) == (3, [])
    pool.check()
    pool.assign_key(table[0], keys[0])
    assert pool.match_prefix(keys) == table[:1]
    pool.free(table[:1])
    assert len(pool.allocate(4) or []) == 4
    assert evicted == keys[:1], "forgotten blocks are not spilled"
    pool.check()


def test_cold_blocks_without_a_key_go_first() -> None:
    pool = BlockPool(4)
    pool.assign_key(*(pool.allocate(1) or []), chain("ABCD")[0])
    pool.reset()
    pool.free([0], cold=True)
    assert pool.free_queue() == [0, 1, 2, 3]
    pool.check()


def test_bad_callers() -> None:
    pool = BlockPool(2)
    with pytest.raises(InvalidInputError, match="is free"):
        pool.assign_key(0, chain("ABCD")[0])
    table = pool.allocate(1) or []
    pool.assign_key(table[0], chain("ABCD")[0])
    with pytest.raises(InvalidInputError, match="another key"):
        pool.assign_key(table[0], chain("EFGH")[0])
    pool.free(table)
    with pytest.raises(InvalidInputError, match="once more"):
        pool.free(table)
    with pytest.raises(InvalidInputError, match="at least 1"):
        BlockPool(0)


class BlockPoolMachine(RuleBasedStateMachine):
    """Random requests over few distinct prompts; `model` is a list with the eviction order."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.evicted: list[tuple[BlockKey, int]] = []
        self.pool = BlockPool(num_blocks, on_evict=lambda key, block_id: self.evicted.append((key, block_id)))
        self.running: list[list[int]] = []
        self.queue = list(range(num_blocks))
        self.keys: dict[int, BlockKey] = {}

    @rule(seed=st.integers(0, 5), num_blocks=st.integers(1, 6))
    def admit(self, seed: int, num_blocks: int) -> None:
        generator = random.Random(seed // 2)
        prompt = [generator.randrange(9) for _ in range(4 * num_blocks)]
        prompt[-1] += seed % 2
        hashes = HASHER.hash_blocks(prompt)
        findable = set(self.keys.values())
        run = 0
        while run < len(hashes) and hashes[run] in findable:
            run += 1
        hits = self.pool.match_prefix(hashes)
        assert [self.keys[block_id] for block_id in hits] == hashes[:run]
        self.pool.acquire(hits)
        self.queue = [b for b in self.queue if b not in hits]
        fresh = self.pool.allocate(len(hashes) - run)
        if len(hashes) - run > len(self.queue):
            assert fresh is None
            self.pool.free(hits)
            self._model_free(hits)
            return
        assert fresh == self.queue[: len(hashes) - run]
        expected = [(self.keys.pop(b), b) for b in fresh if b in self.keys]
        assert self.evicted == expected
        self.evicted.clear()
        self.queue = self.queue[len(fresh) :]
        for block_id, key in zip(fresh, hashes[run:], strict=True):
            self.pool.assign_key(block_id, key)
            if key not in self.keys.values():
                self.keys[block_id] = key
        self.running.append(hits + fresh)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), cold=st.booleans())
    def finish(self, data: st.DataObject, cold: bool) -> None:
        table = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pool.free(table, cold=cold)
        self._model_free(table, cold=cold)

    def _model_free(self, table: list[int], *, cold: bool = False) -> None:
        held = {b for other in self.running for b in other}
        for block_id in table if cold else reversed(table):
            if block_id not in held:
                cached = [i for i, queued in enumerate(self.queue) if queued in self.keys]
                place = (cached[0] if cached else len(self.queue)) if block_id in self.keys else 0
                self.queue.insert(place if cold else len(self.queue), block_id)

    @rule()
    def reset(self) -> None:
        assert self.pool.reset() == len(self.keys)
        self.keys.clear()

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.free_queue() == self.queue
            assert self.pool.num_free == len(self.queue)


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
