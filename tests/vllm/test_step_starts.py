"""Which step's start loads come after, and what a worker makes of it."""

from types import SimpleNamespace
from typing import Any

from kvtier.device.kv import Fence
from kvtier_vllm.steps.step_starts import StepNumbers, StepStarts


def step(num_tokens: int = 1, *, clears: bool = False, copies: bool = False) -> Any:
    return SimpleNamespace(
        total_num_scheduled_tokens=num_tokens,
        new_block_ids_to_zero=[3] if clears else None,
        kv_cache_block_copies=[(1, 2)] if copies else None,
    )


def numbers() -> StepNumbers:
    made = StepNumbers()
    made.frees_late = True
    return made


def test_loads_come_after_the_last_step_that_was_processed() -> None:
    steps = numbers()
    assert steps.begin(step()) == (1, 1)
    assert steps.begin(step()) == (2, 1), "none is processed"
    steps.hear(1)
    assert steps.begin(step()) == (3, 2)
    steps.hear(3)
    steps.hear(2)
    steps.hear(0)
    assert steps.begin(step()) == (4, 4), "with nothing under way, this one's"


def test_steps_without_a_forward_pass_have_no_number() -> None:
    steps = numbers()
    assert steps.begin(step(0)) == (0, 1)
    assert steps.begin(step()) == (1, 1)
    assert steps.begin(step(0)) == (0, 1)
    steps.hear(1)
    assert steps.begin(step(0)) == (0, 2), "a step to come: then it is this one's start"


def test_loads_come_after_blocks_were_cleared_or_filled() -> None:
    for cleared in (step(clears=True), step(copies=True)):
        steps = numbers()
        assert steps.begin(step()) == (1, 1)
        assert steps.begin(cleared) == (2, 2)
        assert steps.begin(step()) == (3, 2), "given away with step 2, cleared at its start, and loaded later"
        steps.hear(2)
        assert steps.begin(step()) == (4, 3)


def test_blocks_cleared_without_a_forward_pass() -> None:
    steps = numbers()
    steps.begin(step())
    assert steps.begin(step(0, clears=True)) == (0, 2), "this one's start"
    assert steps.begin(step()) == (2, 2)


def test_loads_come_after_all_steps_until_blocks_are_known_to_be_freed_late() -> None:
    steps = StepNumbers()
    assert steps.begin(step()) == (1, 2)
    steps.hear(1)
    assert steps.begin(step()) == (2, 3)
    assert steps.begin(step(0)) == (0, 3)
    steps.frees_late = True
    assert steps.begin(step()) == (3, 2)


def test_a_worker_knows_the_last_steps() -> None:
    starts, fences = StepStarts(), [Fence() for _ in range(200)]
    assert starts.fence(1) is None
    for number, fence in enumerate(fences[:3], 1):
        starts.begin(number, fence)
    assert [starts.fence(number) for number in (1, 2, 3, 4)] == [*fences[:3], fences[2]]
    starts.begin(0, fences[3])
    assert [starts.fence(number) for number in (3, 4)] == fences[2:4], "without a forward pass, it has no number"
    for number, fence in enumerate(fences[4:], 4):
        starts.begin(number, fence)
    assert starts.fence(1) is fences[-1], "one that is long past is not known any more"
    assert starts.fence(199) is fences[-1]
    assert starts.fence(195) is fences[195]
