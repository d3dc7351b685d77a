"""What every policy promises its owner, whatever it evicts first."""

import copy
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.errors import ConfigError
from kvtier.policies.base import EvictionPolicy, Use
from kvtier.policies.registry import POLICIES, by_name
from sweeps import IN_FULL

KEYS = st.integers(0, 11)
USES = st.builds(
    Use,
    parent=st.none() | KEYS,
    position=st.integers(0, 3),
    num_blocks=st.sampled_from([1, 4]),
    num_hits=st.integers(-1, 4),
    priority=st.integers(0, 2),
    nbytes=st.sampled_from([0, 1, 4096]),
)


def make_machine(name: str) -> type[RuleBasedStateMachine]:
    class Owner(RuleBasedStateMachine):
        """Knows which keys are there, as the owner of a policy does."""

        def __init__(self) -> None:
            super().__init__()
            self.policy: EvictionPolicy[Any] = by_name(name)
            self.there: set[int] = set()

        @rule(key=KEYS, use=USES)
        def use(self, key: int, use: Use[int]) -> None:
            (self.policy.touch if key in self.there else self.policy.insert)(key, use)
            self.there.add(key)

        @rule(most=st.integers(1, 4))
        def evict(self, most: int) -> None:
            for key in self.policy.coldest(most):
                self.policy.remove(key, evicted=True)
                self.there.remove(key)

        @rule(key=KEYS)
        def park(self, key: int) -> None:
            """An owner that cannot evict a key for now takes it out, though it is not the first to go."""
            if key in self.there:
                self.policy.remove(key, evicted=True)
                self.there.remove(key)

        @rule(key=KEYS)
        def discard(self, key: int) -> None:
            if key in self.there:
                self.policy.remove(key, evicted=False)
                self.there.remove(key)

        @invariant()
        def knows_what_is_there(self) -> None:
            assert len(self.policy) == len(self.there)
            assert {key for key in range(12) if key in self.policy} == self.there

        @invariant()
        def names_all_keys_in_the_order_of_eviction(self) -> None:
            """Asking for many at once gives what asking for one at a time gives, and changes nothing."""
            order = self.policy.coldest(20)
            assert sorted(order) == sorted(self.there)
            assert self.policy.coldest(20) == order
            assert self.policy.coldest(3) == order[:3]
            assert self.policy.coldest(0) == []
            other = copy.deepcopy(self.policy)
            for key in order:
                assert other.coldest(1) == [key]
                other.remove(key, evicted=True)
            assert other.coldest(1) == []

    return Owner


@pytest.mark.parametrize("name", POLICIES)
def test_the_contract_holds(name: str) -> None:
    case = make_machine(name).TestCase
    case.settings = settings(max_examples=60 if IN_FULL else 25, stateful_step_count=40, deadline=None)
    case("runTest").runTest()


@pytest.mark.parametrize("name", POLICIES)
def test_what_was_discarded_is_as_if_it_had_never_been(name: str) -> None:
    """A key that is discarded leaves no ghost: when it comes back it is treated as a key that is new."""
    seen, unseen = by_name(name), by_name(name)
    seen.insert("gone", Use())
    seen.touch("gone", Use())
    seen.remove("gone", evicted=False)
    for policy in (seen, unseen):
        for key in ("a", "b", "gone", "c"):
            policy.insert(key, Use())
    assert seen.coldest(4) == unseen.coldest(4)


@pytest.mark.parametrize("name", ["lfu", "slru", "s3fifo", "arc"])
def test_a_scan_does_not_take_what_is_used(name: str) -> None:
    policy = by_name(name)
    for _ in range(3):
        for key in ("hot", "warm"):
            (policy.touch if key in policy else policy.insert)(key, Use())
    for number in range(1000):
        while len(policy) >= 10:
            policy.remove(policy.coldest(1)[0], evicted=True)
        policy.insert(f"scan {number}", Use())
    assert "hot" in policy
    assert "warm" in policy


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="'clock': name one of default, lru, lfu"):
        by_name("clock")
