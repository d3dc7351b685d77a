"""Secrets that are replaced: blocks of before are found, get new keys, and are not found once a secret has retired."""

from collections.abc import Sequence

import numpy as np
import pytest

from hierarchy_rig import NAMESPACE, TENANT, Held, Rig, SomeLent, pool_tier, until
from kvtier.identity.keys import BlockKey, StoreKey, rank_keys, tenant_id
from kvtier.offload.planner import MISSING, PENDING, BlockStatus
from kvtier.offload.previous import PreviousNames
from kvtier.tiers.base import Status
from kvtier.tiers.host.tier import HostTier
from previous_rig import NEW, OLD, OLDEST, RETIRES_S, Rotated, keys_of
from wrapped_tier import WrappedTier

pool = pytest.fixture(pool_tier)


class Asked(WrappedTier):
    """Notes which keys it is asked for."""

    def __init__(self, inner: HostTier) -> None:
        super().__init__(inner)
        self.lookups: list[list[StoreKey]] = []
        self.read_keys: set[StoreKey] = set()

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        self.lookups.append(list(keys))
        return super().lookup(keys)

    def read(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[Status]:
        self.read_keys.update(keys)
        return super().read(keys, into)


def saved(pool: HostTier, keys: Sequence[BlockKey]) -> np.ndarray:
    """What an engine has saved under these keys, before it ended."""
    rig = Rig(pool)
    rig.save(keys, range(len(keys)))
    rig.close()
    return rig.device[: len(keys)].copy()


def found(rig: Rig, keys: Sequence[BlockKey], rotated: Rotated, start: int = 0, seed: int = 0) -> list[str]:
    """Where a lookup finds the blocks from `start` on."""
    ticket = rig.hierarchy.start_lookup(keys[start:], rotated.previous(start, seed))
    return [s.tier or s.status.name for s in until(lambda: rig.hierarchy.poll_lookup(ticket))]


def test_blocks_of_before_are_loaded_and_all_tiers_get_them_under_the_new_secret(pool: HostTier) -> None:
    before, keys = saved(pool, keys_of(6, OLD)), keys_of(8, NEW)
    rig = Rig(pool)
    assert found(rig, keys, Rotated(OLD)) == ["pool"] * 6 + ["MISS"] * 2
    loaded = rig.load(keys[:6], range(10, 16))
    assert (loaded.failed, loaded.tiers) == (frozenset(), ("pool",) * 6)
    assert np.array_equal(rig.device[10:16], before)
    assert rig.counter("previous_secret_blocks") == 6
    assert rig.tiers_of(keys) == ["host"] * 6 + ["MISS"] * 2, "under their own keys"
    rig.settle()
    rig.close()
    assert set(pool.lookup(rank_keys(keys[:6], NAMESPACE))) == {Status.HIT}, "though the pool had them already"
    later = Rig(pool)
    assert later.tiers_of(keys) == ["pool"] * 6 + ["MISS"] * 2, "no previous secret is needed any more"
    assert not later.load(keys[:6], range(6)).failed
    assert np.array_equal(later.device[:6], before)
    later.close()


def test_a_prompt_that_begins_as_one_that_has_moved_is_found_to_its_end(pool: HostTier) -> None:
    """As with a system prompt: the first request after the rotation gives its blocks their new keys."""
    before = saved(pool, keys_of(8, OLD))
    saved(pool, keys_of(3, NEW))
    rig, keys, rotated = Rig(pool), keys_of(8, NEW), Rotated(OLD)
    assert found(rig, keys, rotated) == ["pool"] * 8
    assert not rig.load(keys, range(8)).failed
    assert np.array_equal(rig.device[3:8], before[3:])
    assert rig.counter("previous_secret_blocks") == 5
    rig.close()
    behind_the_device = Rig(pool)
    assert found(behind_the_device, keys_of(8, NEW), rotated, start=3) == ["pool"] * 5
    behind_the_device.close()


def test_the_newest_previous_secret_that_has_a_block_is_taken(pool: HostTier) -> None:
    for secret in (OLD, OLDEST):
        saved(pool, keys_of(4, secret))
    asked = Asked(pool)
    rig, keys = Rig(asked), keys_of(4, NEW)
    assert found(rig, keys, Rotated(OLD, OLDEST)) == ["pool"] * 4
    assert not rig.load(keys, range(4)).failed
    assert asked.read_keys == set(rank_keys(keys_of(4, OLD), NAMESPACE))
    rig.close()
    saved(pool, keys_of(2, OLDEST, seed=5))
    rig = Rig(pool)
    assert found(rig, keys_of(2, NEW, seed=5), Rotated(OLD, OLDEST), seed=5) == ["pool"] * 2, "or else an older one"
    rig.close()


def test_a_prompt_that_nobody_has_costs_one_key_for_each_secret(pool: HostTier) -> None:
    asked, rotated = Asked(pool), Rotated(OLD, OLDEST)
    rig, keys = Rig(asked), keys_of(12, NEW)
    assert found(rig, keys, rotated) == ["MISS"] * 12
    assert rotated.num_made == {OLD: 1, OLDEST: 1}
    assert [len(lookup) for lookup in asked.lookups] == [12, 2]
    rig.close()
    saved(pool, keys)
    rig, rotated = Rig(asked), Rotated(OLD)
    asked.lookups.clear()
    assert found(rig, keys, rotated) == ["pool"] * 12
    assert (len(asked.lookups), rotated.num_made) == (1, {OLD: 0}), "nothing where all is there"
    rig.close()


def test_a_secret_that_retires_is_not_used_any_more(pool: HostTier) -> None:
    saved(pool, keys_of(4, OLD))
    rotated, keys = Rotated(OLD), keys_of(4, NEW)
    rig = Rig(pool)
    rotated.clock.now_s = RETIRES_S - 1
    assert found(rig, keys, rotated) == ["pool"] * 4
    rotated.clock.now_s = RETIRES_S
    assert rig.load(keys, range(4)).failed == {0, 1, 2, 3}, "not even for what a lookup has found before"
    assert found(rig, keys, rotated) == ["MISS"] * 4
    assert rig.counter("previous_secret_blocks") == 0
    rig.close()


def test_neither_another_tenant_nor_another_salt_nor_another_secret_finds_anything(pool: HostTier) -> None:
    blue = tenant_id("blue")
    saved(pool, keys_of(4, OLD))
    strangers = [
        (Rig(pool, tenant=blue), keys_of(4, NEW, tenant=blue), Rotated(OLD, tenant=blue)),
        (Rig(pool), keys_of(4, NEW, salt="other"), Rotated(OLD, salt="other")),
        (Rig(pool), keys_of(4, NEW), Rotated(OLDEST)),
    ]
    for rig, keys, rotated in strangers:
        assert found(rig, keys, rotated) == ["MISS"] * 4
        assert len(rig.load(keys, range(4)).failed) == 4
        rig.close()
    friend = Rig(pool, tenant=TENANT)
    assert found(friend, keys_of(4, NEW), Rotated(OLD)) == ["pool"] * 4
    friend.close()


def test_what_a_pool_would_lend_goes_by_way_of_host_memory_and_is_saved(pool: HostTier) -> None:
    before, keys, lent = saved(pool, keys_of(6, OLD)), keys_of(6, NEW), SomeLent(pool)
    rig = Rig(pool, direct_reads=lent)
    assert found(rig, keys, Rotated(OLD)) == ["pool"] * 6
    assert not rig.load(keys, range(6)).failed
    assert np.array_equal(rig.device[:6], before)
    assert not lent.num_leased
    rig.settle()
    rig.close()
    assert set(pool.lookup(rank_keys(keys, NAMESPACE))) == {Status.HIT}


def test_a_block_that_has_gone_since_it_was_found_fails_alone(pool: HostTier) -> None:
    saved(pool, keys_of(4, OLD))
    rig, keys = Rig(pool), keys_of(4, NEW)
    assert found(rig, keys, Rotated(OLD)) == ["pool"] * 4
    pool.discard(rank_keys(keys_of(4, OLD)[2:3], NAMESPACE))
    assert rig.load(keys, range(4)).failed == {2}
    rig.settle()
    rig.close()


def test_a_lookup_that_takes_too_long_ends_with_what_is_known(pool: HostTier) -> None:
    saved(pool, keys_of(4, OLD))
    held = Held(pool)
    rig = Rig(held, lookup_deadline_s=0.0)
    held.lookup_gate.clear()
    assert found(rig, keys_of(4, NEW), Rotated(OLD)) == ["MISS"] * 4
    assert rig.counter("deadlines_missed", verb="lookup") == 1
    held.lookup_gate.set()
    rig.close()


def test_a_reset_forgets_what_was_found(pool: HostTier) -> None:
    saved(pool, keys_of(4, OLD))
    rig, keys = Rig(pool), keys_of(4, NEW)
    assert found(rig, keys, Rotated(OLD)) == ["pool"] * 4
    rig.hierarchy.reset()
    assert len(rig.load(keys, range(4)).failed) == 4
    rig.close()


HIT = BlockStatus(Status.HIT, "pool")


@pytest.mark.parametrize(
    ("statuses", "asked"),
    [
        ([HIT, MISSING, MISSING, MISSING], slice(2, 4)),
        ([MISSING, HIT, HIT, HIT], None),
        ([HIT, HIT, PENDING, MISSING], None),
        ([MISSING, MISSING, PENDING, HIT], slice(0, 2)),
        ([HIT, HIT, HIT, HIT], None),
    ],
)
def test_of_several_kv_groups_a_block_is_missing_when_no_group_has_it(
    statuses: list[BlockStatus], asked: slice | None
) -> None:
    """And nothing is asked while a request may wait for a block that is on its way."""
    rotated = Rotated(OLD)
    previous = [type(each)(each.hasher, each.first, keys_per_block=2) for each in rotated.previous()]
    questions: list[Sequence[BlockKey]] = []

    class Missed:
        statuses = (MISSING, MISSING)

    def ask(keys: Sequence[BlockKey]) -> Missed:
        questions.append(keys)
        return Missed()

    list(PreviousNames().search(keys_of(4, NEW), statuses, previous, ask))
    assert questions == ([] if asked is None else [keys_of(4, OLD)[asked]])
