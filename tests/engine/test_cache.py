"""What the engine finds instead of computing it: on the device, in host memory, in the pool, or on its way there."""

import threading
from collections.abc import Sequence

import pytest
import torch

from engine_rig import PATIENCE_S, MakeRig, judge, rigs
from hierarchy_rig import Held, pool_tier
from kvtier.identity.keys import StoreKey
from kvtier.tiers.base import Status, Tier
from kvtier_engine.scheduling.fetch_planning import PendingPolicy
from tiny_model import prompt

make_rig = pytest.fixture(rigs)
pool = pytest.fixture(pool_tier)


def test_second_request_hits_the_device(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False)
    tokens = prompt(30)
    assert rig.ask(tokens).cached_by_tier == {}
    again = rig.ask(tokens)
    assert again.cached_by_tier == {"device": 28}
    assert again.token_ids == judge(tokens)
    assert rig.ask([*tokens[:17], 3]).cached_by_tier == {"device": 16}


def test_at_least_one_token_is_computed(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False)
    tokens = prompt(32)
    rig.ask(tokens)
    again = rig.ask(tokens)
    assert again.cached_by_tier == {"device": 28}
    assert again.token_ids == judge(tokens)


def test_answers_are_cached_too(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False)
    tokens = prompt(10)
    answer = rig.ask(tokens, 15).token_ids
    # 24 of the 25 tokens have KV: the last one was never computed.
    follow_up = [*tokens, *answer, 5, 6]
    done = rig.ask(follow_up)
    assert done.cached_by_tier == {"device": 24}
    assert done.token_ids == judge(follow_up)


def test_without_cache_nothing_is_shared(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False, cache=False)
    tokens = prompt(30)
    assert rig.ask(tokens).token_ids == rig.ask(tokens).token_ids
    assert rig.counter("engine_cached_tokens", tier="device") == 0


def test_another_engine_fetches_through_the_pool(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(41)
    first = make_rig(shared=pool)
    cold = first.ask(tokens)
    second = make_rig(shared=pool)
    warm = second.ask(tokens)
    assert warm.cached_by_tier == {"pool": 40}
    assert warm.token_ids == cold.token_ids == judge(tokens)
    assert second.ask(tokens).cached_by_tier == {"device": 40}
    other_secret = make_rig(shared=pool, secret=bytes(31) + b"x")
    assert other_secret.ask(tokens).cached_by_tier == {}


def test_fetched_blocks_are_bit_for_bit_what_was_saved(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(33)
    first, second = make_rig(shared=pool), make_rig(shared=pool)
    first.ask(tokens)
    second.ask(prompt(9, seed=5))  # so that its blocks have other ids
    second.ask(tokens)
    hashes = first.hasher.hash_blocks(tokens) if first.hasher else []
    ours, theirs = first.block_pool.match_prefix(hashes), second.block_pool.match_prefix(hashes)
    assert len(ours) == len(theirs) == 8
    assert ours != theirs
    assert torch.equal(first.kv.tensor[ours], second.kv.tensor[theirs])


def test_device_then_host_then_pool(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(49)
    make_rig(shared=pool).ask(tokens)
    rig = make_rig(shared=pool, num_blocks=20)
    rig.ask(tokens[:33])
    rig.ask(prompt(60, seed=1))  # pushes the prefix off the device, but not out of host memory
    rig.ask(tokens[:9])
    assert rig.ask(tokens).cached_by_tier == {"device": 8, "host": 24, "pool": 16}
    assert rig.done[4].token_ids == judge(tokens)


def test_failed_blocks_are_computed_from_the_first_one_on(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(41)
    rig = make_rig(shared=pool)
    rig.ask(tokens)
    hashes = rig.hasher.hash_blocks(tokens) if rig.hasher else []
    held = Held(pool)
    held.broken = {hashes[6], hashes[8]}
    second = make_rig(shared=held)
    done = second.ask(tokens)
    assert done.cached_by_tier == {"pool": 24}
    assert done.token_ids == judge(tokens)
    assert second.counter("degraded_fetches") == 1
    # What was computed instead is as good as what was fetched.
    assert second.ask(tokens).cached_by_tier == {"device": 40}


def test_one_load_serves_two_requests(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(41)
    make_rig(shared=pool).ask(tokens)
    held = Held(pool)
    # Nobody waits for blocks on their way to host memory: that alone would hide a second load.
    rig = make_rig(shared=held, pending=PendingPolicy(wait_s=0))
    held.gate.clear()
    first, second = rig.add(tokens), rig.add([*tokens[:30], 1, 2, 3])
    rig.run_until(held.entered.is_set)
    for _ in range(20):
        assert not rig.step()
    held.gate.set()
    rig.run()
    assert rig.done[first].cached_by_tier == {"pool": 40}
    assert rig.done[second].cached_by_tier == {"device": 28}
    assert rig.counter("loaded_blocks", tier="pool") == 10


def test_device_hits_lost_during_a_lookup_are_looked_up_too(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(41)
    make_rig(shared=pool).ask(tokens)
    held = Held(pool)
    rig = make_rig(shared=held, num_blocks=24)
    rig.ask(tokens[:25])
    held.lookup_gate.clear()
    request = rig.add(tokens)
    rig.step()
    greedy = rig.add([7], 90)  # takes every block for its answer; too short to look anything up
    rig.run_until(lambda: greedy in rig.done)
    assert rig.hasher is not None
    assert len(rig.block_pool.match_prefix(rig.hasher.hash_blocks(tokens))) < 6
    held.lookup_gate.set()
    rig.run()
    cached = rig.done[request].cached_by_tier
    assert sum(cached.values()) == 40
    assert cached["host"] > 0
    assert cached["pool"] == 16


def test_blocks_are_not_reused_while_they_are_copied(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(41)
    rig = make_rig(shared=pool, num_blocks=16)
    rig.device.gate.clear()
    first = rig.add(tokens)
    rig.run_until(lambda: first in rig.done)
    assert rig.block_pool.num_free == 16 - 11  # the 11 full blocks of 46 computed tokens
    second = rig.add(prompt(30, seed=1))
    for _ in range(20):
        assert not rig.step()
    rig.device.gate.set()
    rig.run()
    assert rig.done[second].token_ids == judge(prompt(30, seed=1))
    fetched = make_rig(shared=pool).ask(tokens)
    assert fetched.cached_by_tier == {"pool": 40}
    assert fetched.token_ids == judge(tokens)


def test_blocks_that_could_not_be_saved_are_copied_before_they_are_overwritten(make_rig: MakeRig, pool: Tier) -> None:
    held = Held(pool)
    rig = make_rig(shared=held, num_blocks=24, num_slots=32, clean_ahead_blocks=24)
    assert rig.hierarchy is not None
    held.gate.clear()
    tokens = [prompt(50), prompt(30, seed=7)]
    ids = [rig.add(each) for each in tokens]
    rig.run_until(lambda: len(rig.done) == len(ids))
    assert rig.counter("saves_dropped") > 0
    held.gate.set()
    rig.run()
    hierarchy = rig.hierarchy
    rig.run_until(lambda: all(hierarchy.holds(chain_hash) for chain_hash, _ in rig.block_pool.coldest(24)))
    rig.ask(prompt(80, seed=8), 1)
    assert rig.counter("device_evictions", state="clean") > 0
    assert rig.counter("device_evictions", state="dropped") == 0


def test_others_run_while_one_waits_for_the_pool(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(41)
    make_rig(shared=pool).ask(tokens)
    held = Held(pool)
    rig = make_rig(shared=held)
    held.lookup_gate.clear()
    waiting, passing = rig.add(tokens), rig.add([7])  # one token: no full block, so nothing to look up
    rig.run_until(lambda: passing in rig.done)
    assert waiting not in rig.done
    held.lookup_gate.set()
    rig.run()
    assert rig.done[waiting].cached_by_tier == {"pool": 40}


class BeingWritten(Held):
    """Answers PENDING for what it has until `written`: what a pool says while another engine sends the blocks."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.written = threading.Event()
        self.num_asked = 0

    def lookup(self, keys: Sequence[StoreKey]) -> list[Status]:
        self.num_asked += 1
        statuses = super().lookup(keys)
        return statuses if self.written.is_set() else [Status.PENDING if s is Status.HIT else s for s in statuses]


def test_pending_blocks_are_awaited(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(41)
    make_rig(shared=pool).ask(tokens)
    writing = BeingWritten(pool)
    rig = make_rig(shared=writing, pending=PendingPolicy(wait_s=PATIENCE_S, ask_every_s=0.001))
    request = rig.add(tokens)
    rig.run_until(lambda: writing.num_asked > 3)
    assert request not in rig.done
    writing.written.set()
    rig.run()
    assert rig.done[request].cached_by_tier == {"pool": 40}


def test_pending_blocks_are_not_awaited_for_long(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(41)
    make_rig(shared=pool).ask(tokens)
    rig = make_rig(shared=BeingWritten(pool))
    done = rig.ask(tokens)
    assert done.cached_by_tier == {}
    assert done.token_ids == judge(tokens)
