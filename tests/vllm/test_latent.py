"""Latent attention: one vector per token in place of keys and values, the same in all tensor-parallel ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_deepseek
from engine_lab import Engine, Lab
from tiny_deepseek import BLOCK, OPTIONS
from vllm_rig import (
    Answer,
    all_hit,
    cached_of,
    make_prompts,
    none_hit,
    num_blocks,
    settings,
    tokens_of,
    transfer,
)

from cache_pool import CachePool

PROMPTS = make_prompts()
ALL_HIT = all_hit(PROMPTS, block_size=BLOCK)
NUM_BLOCKS = num_blocks(PROMPTS, block_size=BLOCK)
NUM_RANKS = 2


@pytest.fixture(scope="module")
def model(lab: Lab) -> Path:
    tiny_deepseek.make(lab.home / "deepseek", seed=0)
    return lab.home / "deepseek"


@pytest.fixture(scope="module")
def engine(lab: Lab, model: Path) -> Iterator[Engine]:
    """Without a connector, at first. Tests start others in its process."""
    with lab.engine(model=model, **OPTIONS) as running:
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


def test_a_layer_of_the_model_that_drafts(engine: Engine, computed: list[Answer]) -> None:
    """Its KV of a block's last token depends on the next one: the last block of a hit is computed again."""
    # The layer that drafts takes a kernel for AMX by itself, where there is one, and that refuses float32.
    backend = OPTIONS["attention_backend"]
    speculation = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": backend}
    engine.restart(transfer(settings()), speculative_config=speculation, **OPTIONS)
    for hits in (none_hit(PROMPTS), [hit - BLOCK for hit in ALL_HIT]):
        answers = engine.generate(PROMPTS)
        assert tokens_of(answers) == tokens_of(computed)
        assert cached_of(answers) == hits
        engine.reset()
    assert engine.counter("vllm:spec_decode_num_draft_tokens") > 0


def test_two_ranks_keep_one_copy(engine: Engine, computed: list[Answer], pool: CachePool) -> None:
    # The pool counts what it was asked for: by way of the arena, that is each block once.
    connector = transfer(settings(pool={"address": pool.address, "direct_loads": False}))
    engine.restart(connector, tensor_parallel_size=NUM_RANKS, distributed_executor_backend="mp", **OPTIONS)
    for hits in (none_hit(PROMPTS), ALL_HIT):
        answers = engine.generate(PROMPTS)
        assert tokens_of(answers) == tokens_of(computed)
        assert cached_of(answers) == hits
        pool.await_written(NUM_BLOCKS)
        engine.reset(connector=True)
    assert pool.num_written() == NUM_BLOCKS
    assert pool.num_read() == NUM_RANKS * sum(ALL_HIT) // BLOCK
