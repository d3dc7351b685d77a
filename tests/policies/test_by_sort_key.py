"""The policies that are a sort key, against a list that is sorted anew for each question."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.policies.base import Use
from kvtier.policies.registry import by_name


@dataclass
class Block:
    created: int
    used: list[int]
    priorities: list[int]


NAIVE = {
    "lru": lambda block: block.used[-1],
    "lfu": lambda block: (len(block.used), block.used[-1]),
    "slru": lambda block: (len(block.used) > 1, block.used[-1]),
    "fifo": lambda block: block.created,
    "mru": lambda block: -block.used[-1],
    "filo": lambda block: -block.created,
    "priority": lambda block: (max(block.priorities), block.used[-1]),
}


@pytest.mark.parametrize("name", NAIVE)
@given(steps=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2), st.booleans()), max_size=60))
def test_the_order_is_that_of_the_sort_key(name: str, steps: list[tuple[int, int, bool]]) -> None:
    policy = by_name(name)
    blocks: dict[int, Block] = {}
    for now, (key, priority, leaves) in enumerate(steps):
        if key not in blocks:
            policy.insert(key, Use(priority=priority))
            blocks[key] = Block(now, [now], [priority])
        elif leaves:
            policy.remove(key, evicted=True)
            del blocks[key]
        else:
            policy.touch(key, Use(priority=priority))
            blocks[key].used.append(now)
            blocks[key].priorities.append(priority)
        assert policy.coldest(9) == sorted(blocks, key=lambda key: NAIVE[name](blocks[key]))


def test_stale_entries_do_not_pile_up() -> None:
    policy = by_name("lfu")
    for key in range(10):
        policy.insert(key, Use())
    for turn in range(10_000):
        policy.touch(turn % 10, Use())
    assert len(policy._heap) < 100
    assert policy.coldest(10) == list(range(10))
