"""Prompts that are to stay: pinned in the pool, once they are there."""

from collections.abc import Callable

import pytest
from stepping_rank import BLOCK
from stepping_rig import Engine

from cache_pool import CachePool, until

Start = Callable[..., Engine]


def test_a_prompt_is_pinned_when_the_pool_has_it(start: Start, pool: CachePool) -> None:
    engine = start(pool=pool.address)
    asked = engine.ask(1, 5 * BLOCK + 3, max_tokens=4 * BLOCK, params={"pin": True, "ttl_s": 60})
    other = engine.ask(2, 5 * BLOCK, params={})
    engine.finish()
    assert engine.told[asked] == {"kvtier": {"loaded_blocks": {}}}
    assert engine.told[other] == {"kvtier": {"loaded_blocks": {}}}
    until(lambda: pool.num_pinned() >= 5, "the prompt's blocks are pinned")
    assert pool.num_pinned() == 5, "not its answer, nor the other prompt"
    engine.require_right_answers()


def test_what_others_have_stored_is_pinned_as_well(start: Start, pool: CachePool) -> None:
    first = start(pool=pool.address)
    first.ask(1, 5 * BLOCK)
    first.finish()
    pool.await_written(5)
    first.close()
    engine = start(pool=pool.address)
    again = engine.ask(1, 5 * BLOCK, params={"pin": True, "no_store": True})
    engine.finish()
    assert engine.told[again] == {"kvtier": {"loaded_blocks": {"pool": 4}}}
    until(lambda: pool.num_pinned() == 5, "the prompt's blocks are pinned")


@pytest.mark.parametrize("tables", [{"pin": True, "priority": 1}, {"pin": "yes"}], ids=["priority", "no bool"])
def test_wishes_that_cannot_be_granted(start: Start, pool: CachePool, tables: dict[str, object]) -> None:
    engine = start(pool=pool.address)
    asked = engine.ask(1, 5 * BLOCK, params=tables)
    engine.finish()
    assert set(engine.told[asked]["kvtier"]["ignored"]) == {"priority" if "priority" in tables else "pin"}
    engine.require_right_answers()


def test_a_pool_that_dies_holds_up_nothing(start: Start, pool: CachePool) -> None:
    engine = start(pool=pool.address)
    pool.kill()
    for number in range(3):
        engine.ask(number, 5 * BLOCK, params={"pin": True})
    engine.finish()
    engine.require_right_answers()


def test_what_was_never_computed_is_not_waited_for(start: Start, pool: CachePool) -> None:
    engine = start(pool=pool.address)
    for number in range(100):
        engine.abort(engine.ask(number, 5 * BLOCK, params={"pin": True}))
    engine.ask(1, 5 * BLOCK, params={"pin": True})
    engine.finish()
    until(lambda: pool.num_pinned() == 5, "the only prompt that was computed is pinned")


def test_tenants_pin_their_own(start: Start, pool: CachePool) -> None:
    engine = start(pool=pool.address, gateway=["blue"])
    for tenant in ("red", "blue"):
        engine.ask(1, 5 * BLOCK, params={"pin": True, "tenant": tenant})
    engine.finish()
    until(lambda: pool.num_pinned() == 10, "both tenants' blocks are pinned")
