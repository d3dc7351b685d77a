"""What the planner fetches, by what fetching and computing have taken."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clock_rig import StillClock
from hierarchy_rig import Held, Rig, chain, memory_tier, until
from kvtier.offload.planner import MISSING, PENDING, BlockStatus, FetchIfFaster
from kvtier.offload.speeds import Speeds
from kvtier.tiers.base import Status

HOST, POOL = BlockStatus(Status.HIT, "host"), BlockStatus(Status.HIT, "pool")


class Measured:
    def __init__(self) -> None:
        self.clock = StillClock()
        self.speeds = Speeds(self.clock)
        self.planner = FetchIfFaster(self.speeds)

    def fetch(self, tier: str, seconds_per_block: float, num_blocks: int = 100) -> None:
        self.speeds.fetch_begins(tier, num_blocks)
        self.speeds.fetch_ends(tier, num_blocks, num_there=num_blocks, seconds=seconds_per_block * num_blocks)

    def compute(self, seconds_per_block: float, num_blocks: int = 100) -> None:
        self.speeds.note_computed(num_blocks, seconds_per_block * num_blocks)


def test_what_is_not_measured_is_fetched() -> None:
    measured = Measured()
    statuses = [HOST, POOL, POOL, MISSING, POOL]
    assert measured.planner.blocks_to_fetch(statuses) == 3
    measured.compute(0.001)
    assert measured.planner.blocks_to_fetch(statuses) == 3
    measured.fetch("pool", 10.0, num_blocks=3)
    assert measured.planner.blocks_to_fetch(statuses) == 3, "three blocks say nothing yet"


def test_a_slow_tier_is_not_waited_for() -> None:
    measured = Measured()
    measured.fetch("pool", 0.010)
    measured.compute(0.004)
    assert measured.planner.blocks_to_fetch([POOL] * 8) == 0
    assert measured.planner.blocks_to_fetch([HOST] * 3 + [POOL] * 8) == 3, "the others come from host memory"
    assert measured.planner.blocks_to_fetch([POOL] + [HOST] * 8) == 9, "nor is anything behind it given up"
    measured.compute(0.100)
    assert measured.planner.blocks_to_fetch([POOL] * 8) == 8, "a larger model now, or longer prompts"


def test_what_several_blocks_of_the_same_tokens_save_is_counted_once() -> None:
    measured = Measured()
    measured.fetch("pool", 0.010)
    measured.compute(0.006)
    assert measured.planner.blocks_to_fetch([POOL] * 70) == 70
    assert measured.planner.blocks_to_fetch([POOL] * 70, 10) == 0, "0.7 s for what is computed in 0.06 s"
    measured.compute(0.004)
    assert measured.planner.blocks_to_fetch([POOL] * 3) == 0
    assert measured.planner.blocks_to_fetch([POOL] * 3, 8) == 3, "with them, five more on the device are of use"


def test_computing_must_be_faster_by_far() -> None:
    measured = Measured()
    measured.fetch("pool", 0.010)
    measured.compute(0.006)
    assert measured.planner.blocks_to_fetch([POOL] * 8) == 8


def test_a_queue_counts() -> None:
    measured = Measured()
    measured.fetch("pool", 0.010)
    measured.compute(0.010)
    measured.speeds.fetch_begins("pool", 100)
    assert measured.planner.blocks_to_fetch([POOL] * 8) == 0, "a second of others' blocks before them"
    assert measured.planner.blocks_to_fetch([POOL] * 500) == 500, "for so many, that is worth it"
    measured.speeds.fetch_ends("pool", 100, num_there=100, seconds=1.0)
    assert measured.planner.blocks_to_fetch([POOL] * 8) == 8


def test_one_that_hung_is_no_rule() -> None:
    measured = Measured()
    measured.fetch("pool", 0.001)
    measured.compute(0.010)
    measured.fetch("pool", 10.0, num_blocks=1)
    assert measured.planner.blocks_to_fetch([POOL] * 500) == 500
    for _ in range(10):
        measured.fetch("pool", 10.0, num_blocks=32)
    assert measured.planner.blocks_to_fetch([POOL] * 500) == 0, "but many are"


def test_what_did_not_come_says_nothing_of_speed() -> None:
    measured = Measured()
    measured.fetch("pool", 0.100)
    measured.compute(0.010)
    for _ in range(20):
        measured.speeds.fetch_begins("pool", 50)
        measured.speeds.fetch_ends("pool", 50, num_there=0, seconds=0.0)
    assert measured.planner.blocks_to_fetch([POOL] * 8) == 0


def test_a_slow_tier_is_tried_again() -> None:
    measured = Measured()
    measured.fetch("pool", 1.0)
    measured.compute(0.001)
    assert measured.planner.blocks_to_fetch([POOL] * 8) == 0
    measured.clock.now_s += 21
    measured.compute(0.001)
    assert measured.planner.blocks_to_fetch([POOL] * 8) == 8


@given(
    statuses=st.lists(st.sampled_from([HOST, POOL, MISSING, PENDING]), max_size=20),
    rates=st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
    under_way=st.integers(0, 200),
)
def test_never_more_than_the_leading_hits(
    statuses: list[BlockStatus], rates: tuple[float, float, float], under_way: int
) -> None:
    measured = Measured()
    measured.fetch("host", rates[0])
    measured.fetch("pool", rates[1])
    measured.compute(rates[2])
    measured.speeds.fetch_begins("pool", under_way)
    num_fetched = measured.planner.blocks_to_fetch(statuses)
    assert all(status.status is Status.HIT for status in statuses[:num_fetched])


def test_the_directory_measures_its_loads() -> None:
    pool = memory_tier("pool")
    writer = Rig(pool)
    keys = chain(16)
    writer.save(keys, range(16))
    writer.settle()
    writer.close()
    held = Held(pool)
    rig = Rig(held)
    speeds = rig.hierarchy._directory.speeds
    held.gate.clear()
    job_id = rig.hierarchy.start_load(list(zip(keys, range(16), strict=True)))
    until(lambda: held.entered.is_set() or None)
    assert speeds._source("pool").num_under_way == 16
    time.sleep(0.05)
    held.gate.set()
    assert not rig.result(job_id).failed
    source = speeds._source("pool")
    assert (source.num_under_way, source.rate.num_blocks) == (0, 16)
    assert source.rate.seconds >= 0.05
    assert np.array_equal(rig.device[:16], writer.device[:16])
    held.broken = set(keys)
    rig.hierarchy.reset()
    assert rig.result(rig.hierarchy.start_load(list(zip(keys, range(16), strict=True)))).failed == set(range(16))
    assert (source.num_under_way, source.rate.num_blocks) == (0, 16)
    rig.close()
    pool.close()


def test_small_hits_do_not_make_large_ones_look_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a load waits for the engine's next step is no time of the tier. Nothing else takes any, by this clock."""
    now_s = 0.0
    monkeypatch.setattr("kvtier.offload.mover.fetcher.MONOTONIC", lambda: now_s)
    pool = memory_tier("pool")
    writer = Rig(pool)
    keys = chain(16)
    writer.save(keys, range(16))
    writer.settle()
    writer.close()
    rig = Rig(pool, clock=lambda: now_s)

    def is_loaded() -> bool:
        """The directory has not heard of it yet."""
        with rig.mover._fetcher._lock:
            return not rig.mover._fetcher._running

    for _ in range(20):
        rig.hierarchy.reset()
        job_id = rig.hierarchy.start_load(list(zip(keys[:2], range(2), strict=True)))
        until(lambda: is_loaded() or None)
        now_s += 1.0  # a step of the engine
        rig.result(job_id)
    rate = rig.hierarchy._directory.speeds.fetching_s("pool")
    assert rate is not None
    assert rate[1] < 0.01
    rig.close()
    pool.close()
