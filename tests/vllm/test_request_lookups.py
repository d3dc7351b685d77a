"""What counts as a hit of all KV groups, and what is worth waiting for. No engine, and no tiers."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from request_rig import HASHER, SIZE, known_request

from clock_rig import StillClock
from kvtier.identity.keys import BlockHasher, BlockKey, PrefixHasher, PreviousHasher
from kvtier.offload import AlwaysFetch, Planner, PreviousKeys
from kvtier.offload.planner import MISSING, PENDING, BlockStatus
from kvtier.tiers.base import Status
from kvtier_vllm.kv.groups import KVGroups
from kvtier_vllm.requests.keys import RequestKeys
from kvtier_vllm.requests.known_requests import PrefixLookup
from kvtier_vllm.requests.lookups import RequestLookups

HERE, BELOW = BlockStatus(Status.HIT, "host"), BlockStatus(Status.HIT, "disk")
PATIENCE_S = 1.0
PLAIN = KVGroups(2, 100)
STATES = KVGroups(3, 100, frozenset((0, 2)))
"""KV in the middle, states before and after it."""


class Directory:
    """Answers every lookup at once, and always the same."""

    def __init__(self, statuses: Sequence[BlockStatus]) -> None:
        self._statuses = list(statuses)
        self.asked: list[Sequence[BlockKey]] = []
        self.previous: Sequence[PreviousKeys] = ()

    def start_lookup(self, keys: Sequence[BlockKey], previous: Sequence[PreviousKeys]) -> int:
        assert len(keys) == len(self._statuses)
        self.asked.append(keys)
        self.previous = previous
        return len(self.asked)

    def poll_lookup(self, ticket: int) -> list[BlockStatus]:
        assert ticket == len(self.asked)
        return self._statuses


class FetchTwo:
    """A planner for which that is worth while."""

    def blocks_to_fetch(self, statuses: Sequence[BlockStatus], num_computed: int | None = None) -> int:
        return min(2, AlwaysFetch().blocks_to_fetch(statuses, num_computed))


class Asking:
    """A request of some blocks and a token, of which none is computed."""

    def __init__(
        self,
        groups: KVGroups,
        statuses: Sequence[BlockStatus],
        planner: Planner | None = None,
        *,
        num_volatile_blocks: int = 0,
    ) -> None:
        """:param statuses: of all groups, block by block."""
        self.clock, self.directory = StillClock(), Directory(statuses)
        self.known = known_request(range(len(statuses) // groups.num_groups * SIZE + 1))
        directory: Any = self.directory
        self._lookups = RequestLookups(
            directory,
            planner or AlwaysFetch(),
            groups,
            tokens_per_block=SIZE,
            num_volatile_blocks=num_volatile_blocks,
            patience_s=PATIENCE_S,
            clock=self.clock,
        )

    def match(self, num_computed_tokens: int = 0) -> int | None:
        return self._lookups.match(self.known, num_computed_tokens)

    def match_at_last(self) -> int | None:
        """What is left when nothing more comes."""
        self.clock.now_s += PATIENCE_S
        return self.match()


def _reach(groups: KVGroups, statuses: Sequence[BlockStatus], usable: set[Status]) -> int:
    """The longest prefix that a model can go on from, tried one by one."""
    size, reach = groups.num_groups, 0
    for num_blocks in range(1, len(statuses) // size + 1):
        is_there = [status.status in usable for status in statuses[: num_blocks * size]]
        kv = [there for n, there in enumerate(is_there) if n % size not in groups.of_states]
        states = [is_there[(num_blocks - 1) * size + group] for group in groups.of_states]
        if all(kv) and all(states):
            reach = num_blocks
    return reach


@pytest.mark.parametrize(("groups", "num_blocks"), [(STATES, 2), (PLAIN, 3)], ids=["states", "attention alone"])
def test_a_hit_is_what_all_groups_have(groups: KVGroups, num_blocks: int) -> None:
    """In every combination; and only what could make it longer is waited for."""
    for statuses in itertools.product((HERE, PENDING, MISSING), repeat=num_blocks * groups.num_groups):
        hit = _reach(groups, statuses, {Status.HIT})
        is_awaited = _reach(groups, statuses, {Status.HIT, Status.PENDING}) > hit
        asking = Asking(groups, statuses)
        assert asking.match() == (None if is_awaited else hit), statuses
        assert asking.match_at_last() == hit, statuses


def test_a_hit_ends_at_the_last_block_with_all_states() -> None:
    for present in itertools.product((HERE, MISSING), repeat=6):
        states = [*present, HERE, MISSING]
        statuses = [status for n in range(4) for status in (states[2 * n], HERE, states[2 * n + 1])]
        assert Asking(STATES, statuses).match() == _reach(STATES, statuses, {Status.HIT}), states


def test_sources_are_those_of_the_kv() -> None:
    asking = Asking(STATES, [MISSING, BELOW, MISSING, HERE, HERE, BELOW, MISSING, HERE, MISSING])
    assert asking.match() == 2
    assert asking.known.lookup.tiers == ["disk", "host"]


def test_what_is_not_worth_fetching_is_not_waited_for() -> None:
    block = [HERE, HERE, HERE]
    assert Asking(STATES, [*block, *block, *block, PENDING, PENDING, PENDING], FetchTwo()).match() == 2
    without_states = [MISSING, HERE, MISSING]
    assert Asking(STATES, [*block, *without_states, *block], FetchTwo()).match() == 1


def test_the_end_of_a_hit_may_be_left_out() -> None:
    """As where a drafter's KV of the last token depends on the next one."""
    assert Asking(PLAIN, [HERE] * 6, num_volatile_blocks=1).match() == 2
    assert Asking(PLAIN, [HERE] * 2, num_volatile_blocks=1).match() == 0
    awaited = Asking(PLAIN, [HERE, HERE, PENDING, HERE], num_volatile_blocks=1)
    assert awaited.match() is None
    assert awaited.match_at_last() == 0


def test_all_groups_are_asked_for_what_is_not_computed() -> None:
    asking = Asking(STATES, [HERE] * 6)
    asking.known = known_request(range(3 * SIZE + 1))
    assert asking.match(SIZE) == 2
    assert asking.directory.asked == [STATES.keys(asking.known.keys.first(3)[1:])]
    assert asking.match(SIZE + 1) == 0, "a hit within a block"
    asking.known.is_tombstoned = True
    assert asking.match(SIZE) == 0


def test_previous_secrets_are_asked_for_all_groups_from_the_first_block_that_is_not_computed() -> None:
    old = BlockHasher(HASHER.tenant, PrefixHasher(b"the old secret of red", "", SIZE))
    new = BlockHasher(old.tenant, PrefixHasher(b"the new secret of red", "", SIZE), [PreviousHasher(old, 2000.0)])
    asking = Asking(STATES, [HERE] * 6)
    asking.known = known_request(range(3 * SIZE + 1))
    asking.match(SIZE)
    assert not asking.directory.previous, "there are none"
    request = asking.known.request
    asking.known = replace(asking.known, keys=RequestKeys(request, new, salt=None), lookup=PrefixLookup())
    asking.match(SIZE)
    [previous] = asking.directory.previous
    names = STATES.keys(old.hash_blocks(list(range(3 * SIZE)))[1:])
    assert previous.keys_per_block == 3
    assert previous.first(3) == names[:3]
    assert previous.first(6) == names
