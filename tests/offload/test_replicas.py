"""Ranks that hold the same KV: a shared tier gets a block from one of them, and gives it to all."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from hierarchy_rig import BLOCK_BYTES, NAMESPACE, PATIENCE_S, TENANT, Held, SomeLent, chain, memory_tier, until
from kvtier.device.kv import HostMemoryKV
from kvtier.identity.keys import StoreKey
from kvtier.memory.arena import Arena
from kvtier.memory.buffers import ReadableBuffer
from kvtier.metrics import Metrics
from kvtier.offload import (
    Directory,
    DirectorySettings,
    HierarchyMetrics,
    InventoryLog,
    JobResult,
    Mover,
    MoverTiers,
    Replica,
)
from kvtier.tiers.base import Item, Status, WriteStatus

NUM_RANKS = 3
NUM_SLOTS = 64
KEYS = chain(24)
SAVED, LOADED = range(24), range(24, 48)
"""Device slots."""


class Counted(Held):
    """The pool as one process sees it, with a count of what it was asked for."""

    def __init__(self, pool: Held) -> None:
        super().__init__(pool)
        self.asked: Counter[StoreKey] = Counter()
        self.written: Counter[StoreKey] = Counter()
        self.is_full = False

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        self.asked.update(keys)
        return super().lookup(keys)

    def write(self, items: Sequence[Item[ReadableBuffer]]) -> list[WriteStatus]:
        self.written.update(key for key, _, _ in items)
        return [WriteStatus.FULL] * len(items) if self.is_full else super().write(items)


class Rank:
    def __init__(self, rank: int, pool: Held, *, borrows: bool) -> None:
        self.pool, self.disk = Counted(pool), memory_tier("disk")
        random = np.random.default_rng(7)  # the same in all ranks
        self.device = random.integers(0, 256, (48, BLOCK_BYTES), dtype=np.uint8)
        self.leased = SomeLent(self.pool)
        self.mover = Mover(
            namespace=NAMESPACE,
            device=HostMemoryKV(self.device),
            arena=Arena(NUM_SLOTS, BLOCK_BYTES),
            tiers=MoverTiers(
                by_name={"disk": self.disk, "pool": self.pool},
                inventory=InventoryLog([TENANT], NAMESPACE),
                lenders={"pool": self.leased} if borrows else {},
                shared=["pool"],
                replica=Replica(rank, NUM_RANKS),
            ),
        )


class Engine:
    def __init__(self, pool: Held, *, borrowing: Sequence[int] = ()) -> None:
        """:param borrowing: ranks to which the pool lends."""
        self.ranks = [Rank(rank, pool, borrows=rank in borrowing) for rank in range(NUM_RANKS)]
        self.pool = Counted(pool)
        self.directory = Directory(
            namespaces=[NAMESPACE] * NUM_RANKS,
            num_slots=NUM_SLOTS,
            local_tiers=["disk"],
            shared=self.pool,
            metrics=HierarchyMetrics(Metrics()),
            settings=DirectorySettings(
                lookup_deadline_s=PATIENCE_S, borrows=bool(borrowing), batch_blocks=4, loan_blocks=4
            ),
        )

    def step(self) -> list[JobResult]:
        messages = self.directory.take_messages()
        for rank in self.ranks:
            rank.mover.submit(messages)
        for number, rank in enumerate(self.ranks):
            rank.mover.wait(0.01)
            self.directory.deliver(number, rank.mover.poll())
        return self.directory.poll()

    def result(self, job_id: int | None) -> JobResult:
        assert job_id is not None
        return until(lambda: next((result for result in self.step() if result.job_id == job_id), None))

    def save(self) -> None:
        self.result(self.directory.start_save(list(zip(KEYS, SAVED, strict=True))))
        until(lambda: self.step() or not self.directory.is_moving or None)

    def statuses(self) -> list[str]:
        ticket = self.directory.start_lookup(KEYS)
        return [status.tier or status.status.name for status in until(lambda: self.directory.poll_lookup(ticket))]

    def close(self) -> None:
        for rank in self.ranks:
            rank.mover.close()
        self.directory.check()
        self.directory.close()


@pytest.fixture
def pool() -> Iterator[Held]:
    pool = memory_tier("pool")
    yield Held(pool)
    pool.check()
    pool.close()


def test_each_block_is_written_once_and_read_by_all(pool: Held) -> None:
    engine = Engine(pool)
    engine.save()
    written = sum((rank.pool.written for rank in engine.ranks), Counter[StoreKey]())
    assert set(written.values()) == {1}
    assert len(written) == len(KEYS)
    assert all(rank.pool.written for rank in engine.ranks), "the work is shared"
    assert not any(rank.pool.asked for rank in engine.ranks), "a write finds out by itself what is there"
    assert all(rank.disk.usage().num_blocks == len(KEYS) for rank in engine.ranks), "who else would have it there"
    engine.close()

    other = Engine(pool)
    assert other.statuses() == ["pool"] * len(KEYS)
    assert set(other.pool.asked.values()) == {1}, "one namespace, one question"
    for rank in other.ranks:
        rank.device[list(LOADED)] = 0
    result = other.result(other.directory.start_load(list(zip(KEYS, LOADED, strict=True))))
    assert not result.failed
    for rank in other.ranks:
        assert np.array_equal(rank.device[list(LOADED)], engine.ranks[0].device[list(SAVED)])
    other.close()


@pytest.mark.parametrize("borrowing", [range(NUM_RANKS), [0, 2]], ids=["all ranks", "two of three"])
def test_a_block_that_one_rank_was_not_lent_comes_to_all_by_the_arenas(pool: Held, borrowing: Sequence[int]) -> None:
    saving = Engine(pool)
    saving.save()
    saving.close()
    engine = Engine(pool, borrowing=borrowing)
    for turn in range(3):
        for rank in engine.ranks:
            rank.device[list(LOADED)] = turn
        result = engine.result(engine.directory.start_load(list(zip(KEYS, LOADED, strict=True))))
        assert not result.failed
        assert result.tiers == ("pool",) * len(KEYS) if turn == 0 else set(result.tiers) <= {"pool", "host"}
        for rank in engine.ranks:
            assert np.array_equal(rank.device[list(LOADED)], saving.ranks[0].device[list(SAVED)])
    assert all(engine.ranks[rank].leased.num_leased for rank in borrowing)
    engine.close()


def test_what_a_rank_cannot_write_is_missing_and_nothing_else(pool: Held) -> None:
    engine = Engine(pool)
    engine.ranks[1].pool.is_full = True
    engine.save()
    engine.close()
    mine = {key[:16] + key[32:] for key in engine.ranks[1].pool.written}
    assert mine
    other = Engine(pool)
    assert other.statuses() == ["MISS" if key in mine else "pool" for key in KEYS]
    other.close()
