"""An engine whose tenant's secret was replaced, and another one that has only the new secret, over one pool."""

import pytest

from clock_rig import StillClock
from engine_rig import TOKENS_PER_BLOCK, EngineRig, MakeRig, judge, rigs
from hierarchy_rig import pool_tier
from kvtier.identity.keys import BlockHasher, PrefixHasher, PreviousHasher, tenant_id
from kvtier.tiers.base import Tier
from tiny_model import prompt

make_rig = pytest.fixture(rigs)
pool = pytest.fixture(pool_tier)
OLD, NEW = bytes(32), b"n" * 32
RETIRES_S = 2000.0


def of_secret(secret: bytes, *previous: PreviousHasher) -> BlockHasher:
    return BlockHasher(tenant_id("red"), PrefixHasher(secret, "", TOKENS_PER_BLOCK), previous)


def is_written(rig: EngineRig) -> bool:
    assert rig.hierarchy is not None
    directory = rig.hierarchy._directory
    return not (directory.is_moving or directory._stores.num_blocks or directory._owed.due)


def test_prompts_of_before_a_rotation_hit_until_the_secret_retires(make_rig: MakeRig, pool: Tier) -> None:
    system, clock = prompt(8), StillClock()
    prompts = [[*system, *prompt(13, seed=seed)] for seed in (1, 2, 3)]
    old = make_rig(shared=pool)
    for tokens in prompts:
        old.ask(tokens)
    moving = make_rig(shared=pool)
    moving.hasher = of_secret(NEW, PreviousHasher(of_secret(OLD), RETIRES_S, clock))
    assert moving.ask(prompts[0]).cached_by_tier == {"pool": 20}
    second = moving.ask(prompts[1])
    assert second.cached_by_tier == {"device": 8, "pool": 12}, "though the system prompt has its new keys by now"
    assert second.token_ids == judge(prompts[1])
    clock.now_s = RETIRES_S
    third = moving.ask(prompts[2])
    assert third.cached_by_tier == {"device": 8}
    assert third.token_ids == judge(prompts[2])
    assert moving.counter("previous_secret_blocks") == 8
    moving.run_until(lambda: is_written(moving))
    new = make_rig(shared=pool, secret=NEW)
    for tokens in prompts:
        asked = new.ask(tokens)
        assert asked.token_ids == judge(tokens)
        assert sum(asked.cached_by_tier.values()) == 20
