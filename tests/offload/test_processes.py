"""The two halves in different processes: a directory here, a mover per rank in a process of its own."""

import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from hierarchy_rig import chain, until
from kvtier.identity.keys import BlockKey, NamespaceId, StoreKey, rank_keys
from kvtier.metrics import Metrics
from kvtier.offload import Directory, DirectorySettings, HierarchyMetrics, JobResult
from kvtier.offload.messages import decode, encode

NUM_RANKS = 2
NUM_SLOTS = 8


class Worker:
    def __init__(self, rank: int) -> None:
        program = Path(__file__).parents[1] / "rigs" / "mover_child.py"
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def call(self, verb: str, argument: Any = None) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        packed = msgpack.packb([verb, argument])
        self.process.stdin.write(struct.pack("<I", len(packed)) + packed)
        self.process.stdin.flush()
        (length,) = struct.unpack("<I", self.process.stdout.read(4))
        return msgpack.unpackb(self.process.stdout.read(length))

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        assert self.process.wait(20) == 0
        self.process.stdout.close()


class Scheduler:
    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.directory = Directory(
            namespaces=[NamespaceId(bytes([rank]) * 16) for rank in range(NUM_RANKS)],
            num_slots=NUM_SLOTS,
            local_tiers=["disk"],
            shared=None,
            metrics=HierarchyMetrics(Metrics()),
            settings=DirectorySettings(saving_fraction=1.0, batch_blocks=3),
        )

    def step(self) -> list[JobResult]:
        for message in self.directory.take_messages():
            for worker in self.workers:
                worker.call("submit", encode(message))
        for rank, worker in enumerate(self.workers):
            self.directory.deliver(rank, map(decode, worker.call("poll")))
        return self.directory.poll()

    def result(self, job_id: int | None) -> JobResult:
        assert job_id is not None
        return until(lambda: next((r for r in self.step() if r.job_id == job_id), None))

    def settle(self) -> None:
        until(lambda: self.step() or not self.directory.is_moving or None)
        self.directory.check()

    def tiers_of(self, hashes: list[BlockKey]) -> list[str]:
        self.step()
        statuses = self.directory.poll_lookup(self.directory.start_lookup(hashes))
        assert statuses is not None
        return [s.tier or s.status.name for s in statuses]


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler([Worker(rank) for rank in range(NUM_RANKS)])
    yield scheduler
    scheduler.directory.close()
    for worker in scheduler.workers:
        worker.close()


def test_save_spill_and_load_on_two_ranks(scheduler: Scheduler) -> None:
    hashes = chain(14)
    for start in (0, 7):
        part = range(start, start + 7)
        result = scheduler.result(scheduler.directory.start_save([(hashes[i], i) for i in part]))
        assert not result.failed
        scheduler.settle()
    where = scheduler.tiers_of(hashes)
    assert where.count("host") == NUM_SLOTS
    assert where.count("disk") == 14 - NUM_SLOTS

    loaded = scheduler.result(scheduler.directory.start_load([(h, 16 + i) for i, h in enumerate(hashes)]))
    assert not loaded.failed
    scheduler.settle()
    for worker in scheduler.workers:
        assert worker.call("device", list(range(16, 30))) == worker.call("device", list(range(14)))
    first, second = (worker.call("device", [16]) for worker in scheduler.workers)
    assert first != second, "each rank has bytes of its own"


def test_a_block_that_one_rank_lost_is_a_miss_for_all(scheduler: Scheduler) -> None:
    hashes = chain(12)
    for start in (0, 6):
        scheduler.result(scheduler.directory.start_save([(hashes[i], i) for i in range(start, start + 6)]))
        scheduler.settle()
    lost = hashes[scheduler.tiers_of(hashes).index("disk")]
    key: StoreKey = rank_keys([lost], NamespaceId(bytes([1]) * 16))[0]
    assert scheduler.workers[1].call("discard", [key]) == 1
    until(lambda: scheduler.tiers_of([lost]) == ["MISS"] or None)
    assert scheduler.result(scheduler.directory.start_load([(lost, 20)])).failed == {0}
    scheduler.settle()
