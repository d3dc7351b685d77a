"""Tensor parallelism: each rank writes its part of a block, and a hit is what all of them have."""

import re

import pytest
from engine_lab import Lab
from vllm_rig import (
    BLOCK,
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
NUM_RANKS = 2
RANKS = {"tensor_parallel_size": NUM_RANKS, "distributed_executor_backend": "mp"}


@pytest.fixture(scope="module")
def of_one_rank(lab: Lab) -> list[Answer]:
    """What one rank without a connector answers to `PROMPTS`."""
    with lab.engine() as engine:
        return engine.generate(PROMPTS)


@pytest.mark.parametrize("direct_loads", [True, False])
def test_two_ranks_write_and_read_the_pool(
    lab: Lab, pool: CachePool, of_one_rank: list[Answer], direct_loads: bool
) -> None:
    connector, expected = (
        transfer(settings(pool={"address": [pool.address], "direct_loads": direct_loads})),
        of_one_rank,
    )
    with lab.engine(connector, **RANKS) as engine:
        answers = engine.generate(PROMPTS)
        assert tokens_of(answers) == tokens_of(expected)
        assert cached_of(answers) == none_hit(PROMPTS)
        taken_mib = [int(size) for size in re.findall(r"memory for this rank: arena (\d+) MiB", engine.output())]
        assert len(taken_mib) == NUM_RANKS
        assert 63 <= sum(taken_mib) <= 64, "what is configured is for all of them"
        engine.restart(connector, **RANKS)
        assert pool.num_written() == NUM_RANKS * num_blocks(PROMPTS)
        answers = engine.generate(PROMPTS)
        assert tokens_of(answers) == tokens_of(expected)
        assert cached_of(answers) == all_hit(PROMPTS)
    num_blocks_read = NUM_RANKS * sum(all_hit(PROMPTS)) // BLOCK
    if direct_loads:  # what it could not lend yet, it was asked for once more
        assert num_blocks_read <= pool.num_read() <= 2 * num_blocks_read
    else:
        assert pool.num_read() == num_blocks_read
