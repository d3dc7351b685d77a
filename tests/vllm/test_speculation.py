"""Speculative decoding: what is drafted and not accepted is never kept; a drafter's KV is kept with the model's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_drafters
import tiny_llama
from engine_lab import Engine, Lab
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

from cache_pool import CachePool

PROMPTS = make_prompts()
NUM_DRAFTED = 3
MAKERS: dict[str, Callable[[Path], None]] = {
    "same": lambda folder: tiny_llama.make(folder, seed=0),
    "half right": lambda folder: tiny_drafters.make_half_right(folder, seed=0),
    "wrong": lambda folder: tiny_llama.make(folder, seed=1),
    "eagle": lambda folder: tiny_drafters.make_eagle(folder, seed=5),
    "eagle3": lambda folder: tiny_drafters.make_eagle3(folder, seed=6),
}
METHODS = {"same": "draft_model", "half right": "draft_model", "wrong": "draft_model"}
BY_NGRAM = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTED, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def speculation(lab: Lab) -> Callable[[str], dict[str, Any]]:
    """What users give as `--speculative-config`, by the drafter's name."""

    def of(name: str) -> dict[str, Any]:
        folder = lab.home / f"drafter {name}"
        if not folder.exists():
            MAKERS[name](folder)
        return {"method": METHODS.get(name, name), "model": str(folder), "num_speculative_tokens": NUM_DRAFTED}

    return of


def _hits(prompts: list[list[int]], name: str) -> list[int]:
    """Hits on all blocks of the prompts; with Eagle, the last block is computed again."""
    return [hit - name.startswith("eagle") * BLOCK for hit in all_hit(prompts)]


def _drafted_and_accepted(engine: Engine) -> tuple[int, int]:
    return engine.counter("vllm:spec_decode_num_draft_tokens"), engine.counter("vllm:spec_decode_num_accepted_tokens")


@pytest.mark.parametrize("name", ["same", "half right", "eagle", "eagle3"])
def test_tokens_are_equal_and_prompts_hit(
    lab: Lab, expected: list[Answer], speculation: Callable[[str], dict[str, Any]], name: str
) -> None:
    with lab.engine(transfer(settings()), speculative_config=speculation(name)) as engine:
        cold = engine.generate(PROMPTS)
        assert tokens_of(cold) == tokens_of(expected)
        assert cached_of(cold) == none_hit(PROMPTS)
        drafted, accepted = _drafted_and_accepted(engine)
        assert drafted > accepted if name != "same" else drafted == accepted > 0
        assert accepted or name != "half right"
        engine.reset()
        warm = engine.generate(PROMPTS)
        assert tokens_of(warm) == tokens_of(expected)
        assert cached_of(warm) == _hits(PROMPTS, name)
        engine.reset()
        turns = continued(PROMPTS, expected, 35)
        again = engine.generate(turns, num_tokens=5)
        assert tokens_of(again) == [answer.tokens[35:] for answer in expected]
        assert cached_of(again) == _hits(turns, name)
        if name == "same":
            drafted, accepted = _drafted_and_accepted(engine)
            assert drafted == accepted, "what a drafter sees of the prompt came back as it was"
            # Its last step accepts two tokens more than it may have, and with them a block is full.
            answers = engine.generate(PROMPTS[:1], num_tokens=18)
            assert tokens_of(answers) == [expected[0].tokens[:18]]


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_preemption(
    lab: Lab, crowd_expected: list[Answer], speculation: Callable[[str], dict[str, Any]], is_asynchronous: bool
) -> None:
    """Requests are preempted that have drafted tokens not accepted yet, in an engine with few blocks."""
    crowd, drafting = make_crowd(), speculation("half right")
    few = {"num_gpu_blocks_override": 30, "max_model_len": 512}
    with lab.engine(
        transfer(settings()), async_scheduling=is_asynchronous, speculative_config=drafting, **few
    ) as engine:
        assert engine.facts["async_scheduling"] == is_asynchronous
        for _ in range(2):
            num_before = engine.counter("vllm:num_preemptions")
            answers = engine.generate(crowd, num_tokens=CROWD_TOKENS)
            assert tokens_of(answers) == tokens_of(crowd_expected)
            assert engine.counter("vllm:num_preemptions") > num_before
            # The connector gives blocks back in steps, and an engine without requests makes none.
            engine.generate(PROMPTS[:1], num_tokens=2)
            engine.reset()
        assert sum(cached_of(answers)) > 0


def test_who_meets_whom(
    lab: Lab, expected: list[Answer], speculation: Callable[[str], dict[str, Any]], pool: CachePool
) -> None:
    """Engines with the same drafter do, and those without KV of a drafter."""
    connector = transfer(settings(pool={"address": pool.address}))
    first, second = PROMPTS[:2], PROMPTS[2:]

    def hits(engine: Engine) -> list[int]:
        answers = engine.generate(PROMPTS)
        assert tokens_of(answers) == tokens_of(expected)
        return cached_of(answers)

    with lab.engine(connector, speculative_config=speculation("same")) as engine:
        engine.generate(first)
        engine.restart(connector, speculative_config=speculation("same"))
        assert hits(engine) == all_hit(first) + none_hit(second)
        engine.restart(connector, speculative_config=speculation("wrong"))
        assert hits(engine) == none_hit(PROMPTS)
        engine.restart(connector)
        assert cached_of(engine.generate(first)) == none_hit(first)
    # Where ngrams were looked for, which numba does, vLLM 0.32 cannot start another engine that speculates.
    with lab.engine(connector, own_process=True, speculative_config=BY_NGRAM) as engine:
        assert hits(engine) == all_hit(first) + none_hit(second)
        drafted, accepted = _drafted_and_accepted(engine)
        assert drafted > accepted
        engine.reset()
        assert hits(engine) == all_hit(PROMPTS)
        turns = continued(PROMPTS, expected, 35)
        assert cached_of(engine.generate(turns, num_tokens=5)) == all_hit(turns)
