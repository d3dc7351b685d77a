"""Latent attention: one vector per token in place of keys and values, the same in all tensor-parallel ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_deepseek
from engine_lab import Engine, Lab
from vllm_rig import Answer, all_hit, cached_of, make_prompts, none_hit, num_blocks, settings, tokens_of, transfer

from cache_pool import CachePool

PROMPTS = make_prompts()
SIZE = 16
"""Tokens of a block: vLLM's kernel on the CPU has no other."""
ALL_HIT = all_hit(PROMPTS, block_size=SIZE)
NUM_BLOCKS = num_blocks(PROMPTS, block_size=SIZE)
NUM_RANKS = 2
OPTIONS: dict[str, Any] = {
    "block_size": SIZE,
    "attention_backend": "CPU_MLA",
    # What is left of a prompt after a hit is computed in another way than all of it.
    "dtype": "float32",
    # vLLM 0.32's own kernel for it takes the heads of these queries to lie where they do not.
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
}


@pytest.fixture(scope="module")
def model(lab: Lab) -> Path:
    tiny_deepseek.make(lab.home / "deepseek", seed=0)
    return lab.home / "deepseek"


@pytest.fixture(scope="module")
def engine(lab: Lab, model: Path) -> Iterator[Engine]:
    """Without a connector, at first. Tests start others in its process."""
    with lab.engine(model=model, environ={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, **OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def computed(engine: Engine) -> list[Answer]:
    return engine.generate(PROMPTS)


def test_tokens_are_equal_and_all_hit(engine: Engine, computed: list[Answer], pool: CachePool) -> None:
    connector = transfer(settings(pool={"address": pool.address}))
    for hits in (none_hit(PROMPTS), ALL_HIT):
        engine.restart(connector, **OPTIONS)
        answers = engine.generate(PROMPTS)
        assert tokens_of(answers) == tokens_of(computed)
        assert cached_of(answers) == hits


def test_two_ranks_keep_one_copy(engine: Engine, computed: list[Answer], pool: CachePool) -> None:
    connector = transfer(settings(pool={"address": pool.address}))
    engine.restart(connector, tensor_parallel_size=NUM_RANKS, distributed_executor_backend="mp", **OPTIONS)
    for hits in (none_hit(PROMPTS), ALL_HIT):
        answers = engine.generate(PROMPTS)
        assert tokens_of(answers) == tokens_of(computed)
        assert cached_of(answers) == hits
        pool.await_written(NUM_BLOCKS)
        engine.reset(connector=True)
    assert pool.num_written() == NUM_BLOCKS
    assert pool.num_read() == NUM_RANKS * sum(ALL_HIT) // SIZE
