"""Loads that fail as a whole or in part: what was good is kept, the rest is computed, and no request notices."""

from collections.abc import Callable
from typing import Any

import pytest
from stepping_rank import BLOCK
from stepping_rig import Engine
from test_loads import MODES, fill

from hierarchy_rig import Held

Start = Callable[..., Engine]
NUM_TOKENS = 6 * BLOCK + 5


def breaking(start: Start, **mode: Any) -> tuple[Engine, Held]:
    """An engine whose disk has the prompts 1 and 2, and breaks as it is told."""
    fill(start, (1, NUM_TOKENS), (2, NUM_TOKENS))
    engine = start(disk=True, **mode)
    return engine, engine.ranks[0].hold_disk()


@MODES
@pytest.mark.parametrize("broken", [[0], [5], [2, 4], [0, 1, 2, 3, 4, 5]], ids=str)
def test_blocks_that_fail_are_computed(start: Start, broken: list[int], mode: dict[str, bool]) -> None:
    engine, disk = breaking(start, **mode)
    failing, good = engine.ask(1, NUM_TOKENS), engine.ask(2, NUM_TOKENS)
    disk.broken = {engine.hashes(failing)[index] for index in broken}
    engine.finish()
    assert engine.spared[failing] == min(broken) * BLOCK, "what came before the first bad block is not computed again"
    assert engine.spared[good] == 6 * BLOCK
    assert engine.received == {failing: 1, good: 1}, "a failed prefix is not offered again"
    engine.require_right_answers()


@MODES
def test_blocks_that_failed_are_saved_anew(start: Start, mode: dict[str, bool]) -> None:
    """What was computed in their place is kept in host memory, and a later request has it from there."""
    engine, disk = breaking(start, **mode)
    failing = engine.ask(1, NUM_TOKENS)
    disk.broken = set(engine.hashes(failing)[2:])
    engine.finish()
    engine.forget_device()
    again = engine.ask(1, NUM_TOKENS)
    engine.step()
    assert engine.requests[again].num_computed_tokens == 6 * BLOCK
    engine.finish()
    engine.require_right_answers()


@MODES
@pytest.mark.parametrize("told", [True, False], ids=["vLLM knows", "vLLM does not know yet"])
def test_a_failed_load_leaves_nothing_in_the_prefix_cache(start: Start, told: bool, mode: dict[str, bool]) -> None:
    """Neither vLLM's cache nor ours has blocks that were never filled, also when the request is aborted there."""
    engine, disk = breaking(start, **mode)
    failing = engine.ask(1, NUM_TOKENS)
    disk.broken = set(engine.hashes(failing)[1:])
    side = engine.connector._scheduler  # type: ignore[attr-defined]
    engine.until(lambda: engine.received[failing] > 0 if told else failing in side._work.loads.ended, "it has failed")
    engine.abort(failing)
    engine.finish()
    disk.broken = set()
    for _ in range(2):
        engine.ask(1, NUM_TOKENS)
        engine.finish()
        engine.forget_device()
    engine.require_right_answers()


@MODES
def test_a_prefix_that_fails_for_one_of_two_that_share_it(start: Start, mode: dict[str, bool]) -> None:
    fill(start, (1, NUM_TOKENS), (2, NUM_TOKENS), common=4 * BLOCK)
    engine = start(disk=True, **mode)
    disk = engine.ranks[0].hold_disk()
    failing, _ = (engine.ask(number, NUM_TOKENS, common=4 * BLOCK) for number in (1, 2))
    disk.broken = set(engine.hashes(failing)[2:4])
    engine.finish()
    assert engine.spared[failing] == 2 * BLOCK
    engine.require_right_answers()


@MODES
def test_failures_one_after_the_other(start: Start, mode: dict[str, bool]) -> None:
    """Loads of one prompt fail with ever earlier blocks; each of its requests has one load, and ends."""
    engine, disk = breaking(start, num_host_blocks=16, **mode)
    for first_broken in (5, 3, 0):
        request_id = engine.ask(1, NUM_TOKENS)
        disk.broken = set(engine.hashes(request_id)[first_broken:])
        engine.finish()
        engine.forget_device()
    assert all(count == 1 for count in engine.received.values())
    engine.require_right_answers()


@MODES
def test_many_that_fail_at_once_among_many_that_do_not(start: Start, mode: dict[str, bool]) -> None:
    fill(start, *[(number, NUM_TOKENS) for number in range(1, 13)])
    engine = start(disk=True, num_blocks=60, **mode)
    disk = engine.ranks[0].hold_disk()
    requests = [engine.ask(number, NUM_TOKENS, max_tokens=40) for number in range(1, 13)]
    disk.broken = {engine.hashes(request_id)[index % 6] for index, request_id in enumerate(requests) if index % 2}
    engine.finish()
    engine.require_right_answers()


@MODES
def test_a_disk_that_raises(start: Start, mode: dict[str, bool]) -> None:
    engine, disk = breaking(start, **mode)

    def read(*_: Any) -> Any:
        raise OSError("the disk is gone")

    disk.inner.read = read  # type: ignore[method-assign]
    failing = engine.ask(1, NUM_TOKENS)
    engine.finish()
    assert engine.received == {failing: 1}
    engine.require_right_answers()


@MODES
def test_a_preempted_request_whose_load_fails_the_second_time(start: Start, mode: dict[str, bool]) -> None:
    """Loaded well at first, preempted, loaded again, and then in vain."""
    fill(start, *[(number, 5 * BLOCK) for number in range(1, 5)])
    engine = start(disk=True, num_blocks=20, num_host_blocks=16, **mode)
    disk = engine.ranks[0].hold_disk()
    requests = [engine.ask(number, 5 * BLOCK, max_tokens=60) for number in range(1, 5)]
    keys = {key for request_id in requests for key in engine.hashes(request_id)}
    engine.until(lambda: engine.num_preemptions > 0, "one is preempted")
    disk.broken = keys
    engine.finish()
    engine.require_right_answers()
