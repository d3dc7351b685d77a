"""The order in which entries are evicted: what is young or pinned is passed over, whatever the policy."""

from typing import Any

import pytest

from kvtier.policies.base import K
from kvtier.policies.lru import LRU
from kvtier.policies.registry import POLICIES, by_name
from kvtier.policies.s3fifo import S3FIFO
from kvtier.testing.contract import make_key, make_payload, summed
from kvtier.tiers.base import WriteStatus
from kvtier.tiers.host.entries import Entries, Entry
from kvtier.tiers.host.tier import HostTier

KIB = 1024


class Spy(LRU[K]):
    """An LRU that notes what it is told of removals, and counts how often it is asked for more than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.removals: list[tuple[K, bool]] = []
        self.num_looks = 0

    def remove(self, key: K, *, evicted: bool) -> None:
        super().remove(key, evicted=evicted)
        self.removals.append((key, evicted))

    def coldest(self, most: int) -> list[K]:
        self.num_looks += most > 1
        return super().coldest(most)


def make_entries(policy: Any) -> Entries[bytes]:
    return Entries(policy, lambda entry: None)


def store(entries: Entries[bytes], key: bytes, *, now_s: float = 0.0) -> Entry[bytes]:
    entry = entries.enter(key, 0)
    entries.commit(entry, nbytes=1, now_s=now_s)
    return entry


def evict_all(entries: Entries[bytes], young_s: float) -> list[bytes]:
    evicted = []
    while (entry := entries.evict(young_s)) is not None:
        evicted.append(entry.key)
    return evicted


@pytest.mark.parametrize("name", POLICIES)
def test_writers_get_the_room_of_old_blocks_whatever_the_policy_would_evict_first(name: str) -> None:
    now_s = 0.0
    tier = HostTier(
        1024 * KIB, prefault=False, make_policy=lambda: by_name(name), min_residency_s=1.0, clock=lambda: now_s
    )

    def write(label: object) -> WriteStatus:
        return tier.write([summed(make_key(label), make_payload(label, 4 * KIB))])[0]

    old = [make_key(i) for i in range(224)]
    assert {write(i) for i in range(224)} == {WriteStatus.STORED}
    for _ in range(2):
        tier.release(tier.acquire(old))
    now_s = 100.0
    assert {write(("new", i)) for i in range(176)} == {WriteStatus.STORED}
    tier.check()


@pytest.mark.parametrize("name", POLICIES)
def test_young_blocks_are_passed_over_in_the_order_of_the_policy(name: str) -> None:
    policy: Any = by_name(name)
    entries = make_entries(policy)
    keys = [bytes([i]) for i in range(20)]
    for i, key in enumerate(keys):
        store(entries, key, now_s=float(i % 2))
    order = policy.coldest(20)
    assert evict_all(entries, 0.5) == [key for key in order if key[0] % 2 == 0]
    assert policy.coldest(20) == [key for key in order if key[0] % 2], "what is passed over keeps its place"
    assert len(evict_all(entries, 1.0)) == 10


def test_so_many_young_blocks_are_passed_over_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiers.host.entries._MOST_PASSED", 64)
    entries = make_entries(LRU())
    for i in range(63):
        store(entries, b"young %d" % i, now_s=1.0)
    store(entries, b"old")
    assert evict_all(entries, 0.5) == [b"old"]
    store(entries, b"young 63", now_s=1.0)
    store(entries, b"old")
    assert evict_all(entries, 0.5) == []


def test_a_look_that_found_nothing_is_not_repeated_before_something_may_go() -> None:
    policy: Spy[bytes] = Spy()
    entries = make_entries(policy)
    for i in range(100):
        store(entries, b"%d" % i, now_s=1.0 + i)
    store(entries, b"old")
    pinned = entries.pin(b"old")
    assert pinned is not None
    assert entries.evict(0.5) is None
    num_looks = policy.num_looks
    assert entries.evict(0.5) is entries.evict(0.9) is None
    assert policy.num_looks == num_looks
    assert entries.are_all_young(0.9)
    entries.unpin(pinned)
    assert not entries.are_all_young(0.9)
    assert evict_all(entries, 0.9) == [b"old"]
    assert evict_all(entries, 2.0) == [b"0", b"1"]


def test_what_is_used_or_pinned_or_gone_since_it_was_looked_at_is_not_the_next_victim() -> None:
    entries = make_entries(LRU())
    store(entries, b"young", now_s=1.0)
    for key in (b"a", b"b", b"c", b"d", b"e"):
        store(entries, key)
    first = entries.evict(0.5)
    assert first is not None
    assert first.key == b"a"
    entries.touch(b"b")
    pinned = entries.pin(b"c")
    entries.discard(b"d")
    store(entries, b"d", now_s=1.0)
    assert evict_all(entries, 0.5) == [b"e", b"b"]
    assert pinned is not None
    entries.unpin(pinned)
    assert evict_all(entries, 0.5) == [b"c"]


def test_a_pinned_victim_is_parked_as_if_it_were_evicted_and_comes_back_at_its_last_unpin() -> None:
    policy: Spy[bytes] = Spy()
    entries = make_entries(policy)
    store(entries, b"a")
    pinned = entries.pin(b"a")
    assert pinned is not None
    assert entries.evict() is None
    assert policy.removals == [(b"a", True)]
    entries.unpin(pinned)
    assert policy.coldest(1) == [b"a"]


def with_one_parked(entries: Entries[bytes]) -> Entry[bytes]:
    """Stores `a` and `b`, and evicts `b` while `a` is pinned. Returns the pin of `a`, which the policy has parked."""
    store(entries, b"a")
    store(entries, b"b")
    pinned = entries.pin(b"a")
    assert pinned is not None
    assert entries.evict() is not None, "b goes, as a is pinned"
    return pinned


def test_a_parked_block_that_is_discarded_leaves_no_trace() -> None:
    policy: S3FIFO[bytes] = S3FIFO()
    entries = make_entries(policy)
    parked = with_one_parked(entries)
    entries.discard(b"a")
    entries.unpin(parked)
    store(entries, b"a")
    store(entries, b"c")
    assert policy.coldest(2) == [b"a", b"c"], "a is new, and so before c"


@pytest.mark.parametrize("name", ["arc", "s3fifo"])
def test_a_block_that_was_parked_is_one_that_came_back(name: str) -> None:
    """Not one that is new: blocks that were used once go before it."""
    policy: Any = by_name(name)
    entries = make_entries(policy)
    parked = with_one_parked(entries)
    entries.unpin(parked)
    store(entries, b"c")
    store(entries, b"d")
    assert policy.coldest(1) == [b"c"]
