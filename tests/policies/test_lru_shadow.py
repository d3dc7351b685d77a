"""The shadow of LRU: that it counts what LRU would have had, and when another order is trusted."""

import random

from kvtier.policies.base import UNKNOWN_USE
from kvtier.policies.lru import LRU
from kvtier.policies.lru_shadow import LRUShadow, uses_per_tick

CAPACITY = 400


def uses(count: int) -> list[int]:
    """Keys, of which some are liked better than others; those that are liked change with time."""
    choice = random.Random(5)
    return [int(choice.paretovariate(0.35)) % 5000 + place // 2000 for place in range(count)]


def shadow_told(keys: list[int], hits: list[bool]) -> LRUShadow:
    shadow, last = LRUShadow(CAPACITY), dict[int, int]()
    per_tick = uses_per_tick(CAPACITY)
    for place, (key, is_hit) in enumerate(zip(keys, hits, strict=True)):
        shadow.begin_run()
        shadow.use(last.get(key, -1), is_hit)
        last[key] = shadow.tick
        if place % per_tick == per_tick - 1:
            shadow.next_tick(per_tick)
    return shadow


def lru_hits(keys: list[int]) -> list[bool]:
    policy, hits = LRU[int](), []
    for key in keys:
        hits.append(key in policy)
        if hits[-1]:
            policy.touch(key, UNKNOWN_USE)
            continue
        if len(policy) == CAPACITY:
            policy.remove(policy.coldest(1)[0], evicted=True)
        policy.insert(key, UNKNOWN_USE)
    return hits


def test_it_counts_what_lru_would_have_had() -> None:
    """The credit falls by the hits of LRU, and by nothing else but for the grants, where nothing else has a hit."""
    keys = uses(50_000)
    hits = lru_hits(keys)
    first = LRUShadow(CAPACITY)._credit
    granted = shadow_told(keys, hits)._credit - first
    assert 0 < granted < 0.005 * len(keys)
    lost = first + granted - shadow_told(keys, [False] * len(keys))._credit
    assert abs(lost - sum(hits)) < 0.002 * len(keys)


def test_who_has_fewer_hits_than_lru_is_not_trusted_any_more() -> None:
    keys = uses(5000)
    assert shadow_told(keys, lru_hits(keys)).is_trusted
    assert not shadow_told(keys, [False] * len(keys)).is_trusted


def test_trust_comes_back_with_time() -> None:
    keys = uses(30_000)
    hits = lru_hits(keys)
    lacking = [*hits[:2500], *[False] * 70, *hits[2570:]]
    assert sum(hits) - sum(lacking) > 25
    assert not shadow_told(keys[:4000], lacking[:4000]).is_trusted
    assert shadow_told(keys, lacking).is_trusted


def test_nobody_is_trusted_before_the_capacity_is_known() -> None:
    shadow = LRUShadow(None)
    assert not shadow.is_trusted
    shadow.use(-1, False)
    shadow.next_tick(1)
    assert not shadow.is_trusted


def test_blocks_that_fit_take_no_more_room_with_time() -> None:
    keys = [place % 50 for place in range(20_000)]
    assert len(shadow_told(keys, [True] * len(keys))._num_by_tick) <= 50
