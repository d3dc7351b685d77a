"""Leading tokens of a block are reused where a prompt differs from it only later; answers stay."""

import pytest

from engine_rig import MakeRig, judge, rigs
from hierarchy_rig import Held, pool_tier
from kvtier.tiers.base import Tier
from tiny_model import prompt

make_rig = pytest.fixture(rigs)
pool = pytest.fixture(pool_tier)


def other(token: int) -> int:
    return (token + 1) % 61


def test_prompts_that_differ_inside_a_block_share_all_tokens_before(make_rig: MakeRig) -> None:
    """Blocks of 4 tokens: of 19 equal tokens, whole blocks give 16."""
    rig = make_rig(tiers=False, cache_aware=True)
    tokens = prompt(30)
    rig.ask(tokens)
    differing = [*tokens[:19], other(tokens[19]), *prompt(9, seed=1)]
    done = rig.ask(differing)
    assert done.cached_by_tier == {"device": 19}
    assert done.token_ids == judge(differing)
    assert rig.ask(tokens).token_ids == judge(tokens), "what was copied from is as it was"


def test_an_equal_prompt_computes_its_last_token_only(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False, cache_aware=True)
    for num_tokens in (32, 30):  # of 30, the last block became full by the answer
        tokens = prompt(num_tokens, seed=num_tokens)
        rig.ask(tokens)
        again = rig.ask(tokens)
        assert again.cached_by_tier == {"device": num_tokens - 1}
        assert again.token_ids == judge(tokens)


def test_the_first_block_is_reused_in_part_too_but_not_by_another_tenant(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False, cache_aware=True)
    tokens = prompt(8)
    rig.ask(tokens)
    differing = [*tokens[:3], other(tokens[3]), 5]
    assert rig.ask(differing).cached_by_tier == {"device": 3}
    stranger = make_rig(tiers=False, cache_aware=True, secret=bytes(31) + b"x")
    rig.scheduler, stranger.scheduler = rig.scheduler, stranger.scheduler
    index = rig.cache._partial_reuse
    assert index is not None
    assert stranger.hasher is not None
    request = rig.add(differing)
    waiting = rig.scheduler.requests.waiting[0]
    waiting.hasher = stranger.hasher
    waiting.keys = stranger.hasher.hash_blocks(differing)
    rig.run()
    assert rig.done[request].cached_by_tier == {}
    assert rig.done[request].token_ids == judge(differing)


def test_the_sibling_with_most_tokens_in_common_wins(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False, cache_aware=True)
    head = prompt(16)
    for tail in ([1, 2, 9, 9], [1, 2, 3, 9], [1, 7, 3, 4]):
        rig.ask([*head, *tail, 5, 6])
    asked = [*head, 1, 2, 3, 4, 5]
    done = rig.ask(asked)
    assert done.cached_by_tier == {"device": 19}
    assert done.token_ids == judge(asked)


def test_a_sibling_in_host_memory_is_fetched_and_cut(make_rig: MakeRig) -> None:
    tokens = prompt(33)
    differing = [*tokens[:27], other(tokens[27]), *prompt(9, seed=1)]
    rig = make_rig(num_blocks=20, cache_aware=True)
    rig.ask(tokens)
    rig.ask(prompt(70, seed=3))  # pushes the blocks off the device
    done = rig.ask(differing)
    assert sum(done.cached_by_tier.values()) == 27
    assert done.cached_by_tier["host"] >= 7
    assert done.token_ids == judge(differing)


def test_a_sibling_in_the_pool_is_fetched_and_cut(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(33)
    differing = [*tokens[:27], other(tokens[27]), *prompt(9, seed=1)]
    make_rig(shared=pool).ask(tokens)
    rig = make_rig(shared=pool, num_blocks=40, num_slots=8, cache_aware=True)
    rig.ask(tokens)
    rig.ask(prompt(150, seed=4))  # pushes the blocks out of host memory, too
    done = rig.ask(differing)
    assert sum(done.cached_by_tier.values()) == 27
    assert done.cached_by_tier["pool"] >= 7
    assert done.token_ids == judge(differing)


def test_a_sibling_that_cannot_be_fetched_is_computed(make_rig: MakeRig, pool: Tier) -> None:
    tokens = prompt(33)
    differing = [*tokens[:27], other(tokens[27]), *prompt(9, seed=1)]
    held = Held(pool)
    make_rig(shared=pool).ask(tokens)
    rig = make_rig(shared=held, num_blocks=40, num_slots=8, cache_aware=True)
    rig.ask(tokens)
    rig.ask(prompt(150, seed=4))
    assert rig.hasher is not None
    held.broken = {rig.hasher.hash_blocks(tokens)[6]}
    done = rig.ask(differing)
    assert sum(done.cached_by_tier.values()) == 24
    assert done.token_ids == judge(differing)


def test_a_block_on_the_device_is_not_counted_behind_a_load_that_fails(make_rig: MakeRig, pool: Tier) -> None:
    """The sibling is on the device, the blocks before it have to be fetched, and one of them fails."""
    tokens = prompt(33)
    held = Held(pool)
    make_rig(shared=pool).ask(tokens)
    rig = make_rig(shared=held, num_slots=8, cache_aware=True)
    assert rig.hasher is not None
    hashes = rig.hasher.hash_blocks(tokens)
    rig.ask(tokens[:29])
    held.broken = {hashes[4]}
    rig.block_pool.reset()
    rig.run()
    sibling = rig.block_pool.allocate(1)
    assert sibling is not None
    rig.kv.tensor[sibling[0]].fill_(0.5)  # never right: a hit of it would show
    rig.block_pool.assign_key(sibling[0], hashes[6])
    rig.block_pool.free(sibling)
    rig.hierarchy.reset() if rig.hierarchy else None
    differing = [*tokens[:27], other(tokens[27]), 3]
    done = rig.ask(differing)
    assert done.cached_by_tier == {"pool": 16}
    assert done.token_ids == judge(differing)


@pytest.mark.parametrize("tiers", [False, True])
def test_a_request_that_takes_all_blocks_begins_without_the_sibling(make_rig: MakeRig, tiers: bool) -> None:
    """There is no room for the sibling beside the copy of its first tokens."""
    rig = make_rig(num_blocks=11, tiers=tiers, cache_aware=True)
    tokens = prompt(43)
    rig.ask(tokens, 1)
    differing = [*tokens[:14], other(tokens[14]), *tokens[15:]]
    done = rig.ask(differing, 1)
    assert (done.token_ids, done.cached_by_tier) == (judge(differing, 1), {"device": 12})


def test_nothing_is_reused_after_a_reset(make_rig: MakeRig) -> None:
    rig = make_rig(tiers=False, cache_aware=True)
    tokens = prompt(30)
    rig.ask(tokens)
    rig.scheduler.reset_cache()
    assert rig.ask([*tokens[:19], 3, 4]).cached_by_tier == {}
