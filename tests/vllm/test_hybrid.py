"""Hybrid models: KV groups with blocks of their own, of which a sliding window keeps the last few."""

from pathlib import Path
from typing import Any

import pytest
import tiny_llama
from engine_lab import Lab
from vllm_rig import (
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

WINDOW = 80
"""Tokens: 3 of the 10 blocks that a prompt has."""
PROMPTS = make_prompts()


@pytest.fixture(scope="module")
def hybrid(lab: Lab) -> Path:
    tiny_llama.make(lab.home / "hybrid", seed=0, window=WINDOW)
    return lab.home / "hybrid"


@pytest.fixture(scope="module")
def answers(lab: Lab, hybrid: Path) -> tuple[list[Answer], list[Answer]]:
    """Without a connector: to the prompts, and to the crowd."""
    with lab.engine(model=hybrid) as engine:
        return engine.generate(PROMPTS), engine.generate(make_crowd(), num_tokens=CROWD_TOKENS)


def test_tokens_are_equal_and_all_groups_hit(
    lab: Lab,
    hybrid: Path,
    expected: list[Answer],
    answers: tuple[list[Answer], list[Answer]],
    pool: CachePool,
) -> None:
    """In the one engine a prompt is computed at once, in the other in chunks that are shorter than the window."""
    computed, _ = answers
    assert tokens_of(computed) != tokens_of(expected), "the window plays no part"
    connector = transfer(settings(pool={"address": pool.address}))
    with lab.engine(connector, model=hybrid, max_num_batched_tokens=64) as engine:
        assert "KV groups: 2" in engine.output()
        cold = engine.generate(PROMPTS)
        assert tokens_of(cold) == tokens_of(computed)
        assert cached_of(cold) == none_hit(PROMPTS)
        engine.reset()
        warm = engine.generate(PROMPTS)
        assert tokens_of(warm) == tokens_of(computed)
        assert cached_of(warm) == all_hit(PROMPTS)
    turns = continued(PROMPTS, computed, 35)
    with lab.engine(connector, model=hybrid) as engine:
        again = engine.generate(turns, num_tokens=5)
    assert tokens_of(again) == [answer.tokens[35:] for answer in computed]
    assert cached_of(again) == all_hit(turns)


def test_preemption(lab: Lab, hybrid: Path) -> None:
    options: dict[str, Any] = {"model": hybrid, "max_model_len": 512}
    with lab.engine(**options) as engine:
        expected = engine.generate(make_crowd(), num_tokens=CROWD_TOKENS)
    with lab.engine(transfer(settings()), num_gpu_blocks_override=44, **options) as engine:
        for _ in range(3):
            num_before = engine.counter("vllm:num_preemptions")
            crowd = engine.generate(make_crowd(), num_tokens=CROWD_TOKENS)
            assert tokens_of(crowd) == tokens_of(expected)
            assert engine.counter("vllm:num_preemptions") > num_before
            engine.reset()


def test_garbled_blocks_are_computed(
    lab: Lab, hybrid: Path, answers: tuple[list[Answer], list[Answer]], tmp_path: Path
) -> None:
    """With several groups vLLM takes back the request as a whole, not some of its blocks."""
    connector = transfer(settings(disk={"directory": str(tmp_path), "capacity_bytes": "64MiB", "reserve_bytes": 0}))
    with lab.engine(connector, model=hybrid) as engine:
        engine.generate(PROMPTS)
    stored = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 10_000]
    assert stored
    for path in stored[::3]:
        garbled = bytearray(path.read_bytes())
        garbled[len(garbled) // 2] ^= 1
        path.write_bytes(garbled)
    with lab.engine(connector, model=hybrid) as engine:
        assert tokens_of(engine.generate(PROMPTS)) == tokens_of(answers[0])
        assert tokens_of(engine.generate(PROMPTS)) == tokens_of(answers[0])
