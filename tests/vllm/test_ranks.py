"""Tensor parallelism: each rank writes its part of a block, and a hit is what all of them have."""

from engine_lab import Lab
from vllm_rig import BLOCK, all_hit, cached_of, make_prompts, none_hit, num_blocks, settings, tokens_of, transfer

from cache_pool import CachePool

PROMPTS = make_prompts()
NUM_RANKS = 2
OPTIONS = {"dtype": "float32"}
"""Ranks add up what one computes at once: in bfloat16 that would be seen."""
RANKS = {"tensor_parallel_size": NUM_RANKS, "distributed_executor_backend": "mp"}


def test_two_ranks_write_and_read_the_pool(lab: Lab, pool: CachePool) -> None:
    connector = transfer(settings(pool={"address": [pool.address]}))
    with lab.engine(**OPTIONS) as engine:
        expected = engine.generate(PROMPTS)
        engine.restart(connector, **OPTIONS, **RANKS)
        answers = engine.generate(PROMPTS)
        assert tokens_of(answers) == tokens_of(expected)
        assert cached_of(answers) == none_hit(PROMPTS)
        engine.restart(connector, **OPTIONS, **RANKS)
        assert pool.num_written() == NUM_RANKS * num_blocks(PROMPTS)
        answers = engine.generate(PROMPTS)
        assert tokens_of(answers) == tokens_of(expected)
        assert cached_of(answers) == all_hit(PROMPTS)
    assert pool.num_read() == NUM_RANKS * sum(all_hit(PROMPTS)) // BLOCK
