"""The ways in which vLLM schedules: the same tokens as without a connector, computed, loaded or both."""

from typing import Any

import pytest
from engine_lab import Lab
from vllm_rig import (
    BLOCK,
    CROWD_TOKENS,
    Answer,
    all_hit,
    cached_of,
    continued,
    make_crowd,
    make_prompts,
    none_hit,
    settings,
    tokens_of,
    transfer,
)

CHUNKED = {"max_num_batched_tokens": 64}
FEW_BLOCKS = {"num_gpu_blocks_override": 30, "max_model_len": 512}
PROMPTS = make_prompts()

MODES: dict[str, dict[str, Any]] = {
    "in process": {},
    "processes": {"processes": True},
    "chunked prefill": CHUNKED,
    "asynchronous": {"async_scheduling": True},
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_tokens_are_equal_and_prompts_hit(lab: Lab, expected: list[Answer], mode: dict[str, Any]) -> None:
    with lab.engine(transfer(settings()), **mode) as engine:
        assert engine.facts["async_scheduling"] == mode.get("async_scheduling", False)
        cold = engine.generate(PROMPTS)
        assert tokens_of(cold) == tokens_of(expected)
        assert cached_of(cold) == none_hit(PROMPTS)
        engine.reset()
        warm = engine.generate(PROMPTS)
        assert tokens_of(warm) == tokens_of(expected)
        assert cached_of(warm) == all_hit(PROMPTS)
        engine.reset()
        # Half of each answer, as the next turn of a conversation brings it: its blocks were saved too.
        turns = continued(PROMPTS, expected, 35)
        again = engine.generate(turns, num_tokens=5)
        assert tokens_of(again) == [answer.tokens[35:] for answer in expected]
        assert cached_of(again) == all_hit(turns)


@pytest.mark.parametrize("mode", [{}, {"async_scheduling": True}], ids=["plain", "asynchronous"])
def test_a_request_goes_on_with_the_next_step_after_its_load(lab: Lab, mode: dict[str, Any]) -> None:
    with lab.engine(transfer(settings()), **mode) as engine:
        engine.generate(PROMPTS[:1])
        engine.reset()
        engine.note_steps()
        assert cached_of(engine.generate(PROMPTS[:1])) == all_hit(PROMPTS[:1])
        noted = engine.noted()
        after = noted.index("loaded") + 1
        assert not any(noted[: after - 1]), "nothing is computed before"
        assert noted[after], "the next step does without it"


@pytest.mark.parametrize("mode", [{}, {"async_scheduling": True, **CHUNKED}], ids=["plain", "asynchronous, chunked"])
def test_preemption(lab: Lab, crowd_expected: list[Answer], mode: dict[str, Any]) -> None:
    """Blocks of preempted requests go to others at once, and what they held comes back by loads."""
    crowd = make_crowd()
    with lab.engine(transfer(settings()), **FEW_BLOCKS, **mode) as engine:
        for _ in range(3):
            num_before = engine.counter("vllm:num_preemptions")
            answers = engine.generate(crowd, num_tokens=CROWD_TOKENS)
            assert tokens_of(answers) == tokens_of(crowd_expected)
            assert engine.counter("vllm:num_preemptions") > num_before
            engine.reset()
        assert sum(cached_of(answers)) > 0


def test_a_reset_with_the_connector_forgets_everything(lab: Lab, expected: list[Answer]) -> None:
    with lab.engine(transfer(settings())) as engine:
        engine.generate(PROMPTS)
        engine.reset(connector=True)
        answers = engine.generate(PROMPTS)
    assert tokens_of(answers) == tokens_of(expected)
    assert cached_of(answers) == none_hit(PROMPTS)


def test_a_request_may_ask_for_nothing_to_be_saved_and_what_was_loaded(lab: Lab, expected: list[Answer]) -> None:
    with lab.engine(transfer(settings())) as engine:
        for number, (params, loaded) in enumerate(
            [({"no_store": True}, False), ({}, False), ({"no_store": True}, True)],
        ):
            answers = engine.generate(PROMPTS, params={"kvtier": params})
            assert tokens_of(answers) == tokens_of(expected)
            assert cached_of(answers) == (all_hit(PROMPTS) if loaded else none_hit(PROMPTS)), number
            from_host = [{"host": hit // BLOCK} if loaded else {} for hit in all_hit(PROMPTS)]
            assert [answer.params for answer in answers] == [{"kvtier": {"loaded_blocks": each}} for each in from_host]
            engine.reset()
        assert engine.generate(PROMPTS[:1])[0].params is None
